"""Open a ready model's folder, and map tensor names between disk, transformers' class and this project's parts.

Names on disk are transformers' current names, or older ones that it converts when loading. In this project, a ready
model has the parts vision_tower.tower.*, projector.connector.*, and the language model with its usual names.
"""

import copy
import json
from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.initialization import no_init_weights

from llava_ds.constants import ConfigError
from llava_ds.extensions.ready.family import ReadyFamily, ReadyModel
from llava_ds.extensions.ready.known_families import register_text_models
from llava_ds.files.model_files import library_errors
from llava_ds.model.families.language import config_of, trunk_name
from llava_ds.model.open.loading import persistent_buffers
from llava_ds.model.open.weights import WeightFiles, tensor_names

TOWER, CONNECTOR = "tower.", "connector."  # prefixes of tensor names in these parts


class ReadyNames:
    """Maps tensor names of a ready model: from a part to transformers' class, and from disk to a part."""

    def __init__(self, ready: ReadyModel, text_config: PreTrainedConfig) -> None:
        family = ready.family
        register_text_models(family)
        self._prefixes = {
            **{f"{path}.": ("projector", f"{CONNECTOR}{inner}") for path, inner in family.connector.items()},
            f"{family.vision}.": ("vision_tower", TOWER),  # it may contain the connector
            f"{family.trunk}.": ("language_model", f"{trunk_name(text_config)}."),
            "lm_head.": ("language_model", "lm_head."),
        }
        found = _outer_names(ready.config.model_type, json.dumps(ready.config.to_dict(), sort_keys=True, default=str))
        self.in_memory, self._known, self.ends, self.is_tied, self.buffers = found
        self._beside = family.beside

    def is_unused_part(self, in_memory: str) -> bool:
        """Return True for tensors of parts that images don't use."""
        return in_memory.startswith(self._beside)

    def is_unchanged(self, on_disk: str) -> bool:
        """Return True for buffers of transformers' class and for parts that images don't use: neither is trained."""
        in_memory = self.to_memory(on_disk)
        return in_memory is not None and (in_memory in self.buffers or self.is_unused_part(in_memory))

    def to_memory(self, on_disk: str) -> str | None:
        """Map a name on disk to transformers' name in memory; None for tensors that the model lacks."""
        return self._known.get(on_disk)

    def part_of(self, in_memory: str) -> tuple[str, str] | None:
        """Split a name in memory into the part that holds the tensor, and the tensor's name in that part."""
        for prefix, (part, inner) in self._prefixes.items():
            if in_memory.startswith(prefix):
                return part, inner + in_memory.removeprefix(prefix)
        return None

    def from_part(self, name: str) -> str:
        """Map this project's name in the complete model ("vision_tower.tower.x") to transformers' name in memory."""
        for prefix, (part, inner) in self._prefixes.items():
            if name.startswith(f"{part}.{inner}"):
                return prefix + name.removeprefix(f"{part}.{inner}")
        raise KeyError(name)

    def renames(self) -> dict[str, Callable[[str], str | None]]:
        """Return, per part, a function that maps names on disk to the part's names."""
        found: dict[str, dict[str, str]] = {"vision_tower": {}, "projector": {}, "language_model": {}}
        for on_disk, in_memory in self._known.items():
            if (place := self.part_of(in_memory)) is not None:
                found[place[0]][on_disk] = place[1]
        return {part: names.get for part, names in found.items()}


class _OuterNames(NamedTuple):
    """Names of a complete model.

    in_memory: names of all tensors in transformers' class. known: maps every possible name on disk to the name in
    memory. ends: names of embedding and output layer. is_tied: True if the class ties these two. buffers: names of
    buffers.
    """

    in_memory: tuple[str, ...]
    known: dict[str, str]
    ends: tuple[str, str]
    is_tied: bool
    buffers: frozenset[str]


@lru_cache(maxsize=8)
def _outer_names(model_type: str, config_json: str) -> _OuterNames:
    """Read the names from transformers' class, built without weights. Takes a second for a large model."""
    config = config_of({**json.loads(config_json), "model_type": model_type}, "a ready model")
    with torch.device("meta"), no_init_weights():
        kind = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
        outer = kind._from_config(config, attn_implementation="eager", dtype=torch.float32)
    outer.tie_weights()
    buffers = persistent_buffers(outer)
    tensors = {name: p.data for name, p in outer.named_parameters(remove_duplicate=False)} | buffers
    known = {name: name for name in tensors}
    for name, tensor in tensors.items():
        known |= dict.fromkeys(revert_weight_conversion(outer, {name: tensor}), name)
    inputs, outputs = outer.get_input_embeddings(), outer.get_output_embeddings()
    modules = {id(module): name for name, module in outer.named_modules()}
    ends = tuple(f"{modules[id(end)]}.weight" for end in (inputs, outputs))
    return _OuterNames(tuple(tensors), known, ends, outputs.weight is inputs.weight, frozenset(buffers))


@cache
def _ends_differ(path: str, embedding: str, output: str) -> bool:
    """Return True if the values of the stored embedding and output layer differ. embedding, output: names on disk."""
    files = WeightFiles(path, {embedding: embedding, output: output}.get)
    found = dict(files.read((embedding, output)))
    return not torch.equal(found[embedding], found[output])


def read_ready(
    family: ReadyFamily, path: str, config: dict, missing: list[str], where: str
) -> tuple[ReadyModel, PreTrainedConfig, ReadyNames]:
    """Return a ready model with its configuration, its language model's configuration, and its tensors' names.

    config: the content of config.json. Raises ConfigError if a part is missing, or has no class.
    """
    register_text_models(family)
    if missing:
        raise ConfigError(f"{where}: its config.json has no {' and no '.join(missing)}: copy it again")
    whole = config_of(config, where, path)
    text = copy.deepcopy(whole.text_config)
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(f"{where}: its text_config is a {text.model_type}, expected a causal language model")
    ready = ReadyModel(family, whole)
    with library_errors(where, "transformers can't read its config.json"):
        names = ReadyNames(ready, text)
    if names.is_tied:  # like transformers: don't tie weights that are stored twice with different values
        on_disk = {names.to_memory(name): name for name in tensor_names(path)}
        ends = [on_disk.get(end) for end in names.ends]
        names.is_tied = None in ends or not _ends_differ(path, *ends)
    text.tie_word_embeddings = names.is_tied
    if names.buffers and (lost := sorted(names.buffers - set(map(names.to_memory, tensor_names(path))))):
        raise ConfigError(f"{where}: its files of weights don't hold {lost[0]}: copy it again")
    experts = [name for name in tensor_names(path) if ".mlp.experts." in name and name != names.to_memory(name)]
    if experts:
        raise ConfigError(
            f"{where}: its experts are separate tensors ({experts[0]}), expected one tensor for all of a layer "
            "(mlp.experts.gate_up_proj), as published: save it with transformers' save_original_format=False"
        )
    strange = [name for name in names.in_memory if names.part_of(name) is None and not names.is_unused_part(name)]
    if strange:
        raise ConfigError(f"{where}: its class in transformers has a part that is not known here, {strange[0]}")
    return ready, text, names


def names_in_folder(names: ReadyNames, on_disk: Iterable[str]) -> dict[str, str]:
    """Map this project's tensor names to the names in a folder. If two names fit, the first one wins."""
    found: dict[str, str] = {}
    for name in on_disk:
        in_memory = names.to_memory(name)
        place = None if in_memory is None else names.part_of(in_memory)
        if place is not None:
            found.setdefault(f"{place[0]}.{place[1]}", name)
    return found


def but_output(rename: Callable[[str], str | None], on_disk: str) -> str | None:
    """Rename a language model's tensor; return None for a tied output layer that has no tensor here."""
    name = rename(on_disk)
    return None if name == "lm_head.weight" else name
