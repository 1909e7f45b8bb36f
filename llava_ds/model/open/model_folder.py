"""The content of a model's folder: the configuration and the weights of its parts."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from transformers import PreTrainedConfig

from llava_ds.config.arguments import Arguments
from llava_ds.constants import ConfigError
from llava_ds.extensions.active import text_part
from llava_ds.extensions.architecture import Architecture
from llava_ds.files.model_files import BESIDE_ADAPTER, check_folder, is_there, read_config
from llava_ds.model.open import names as formats
from llava_ds.model.open.weights import Over, Source, Weights

FLAG = "--model_name_or_path"

STAGE_1_HINT = "it is stage 1's output: name it in --pretrain_mm_mlp_adapter, and the language model's folder here"


@dataclass(frozen=True)
class ModelFolder:
    """A model folder's content, independent of the flags.

    kind: description for messages; tokenizer: path of the folder with the tokenizer; flags: the values of flags that
    the model was trained with; projector, newline, vision_tower: None if the folder lacks them; vision_config: the
    configuration of the folder's tower; trained_with: path of the tower that the model was trained with, and width of
    its features; base: the base model's folder, if this is an adapter; tower_changes: the adapter's changes to a tower
    in another folder; architecture: the architecture if an extension reads the folder.
    """

    path: str
    kind: str
    text_config: PreTrainedConfig
    language_model: Source
    tokenizer: str
    flags: dict[str, object] = dataclasses.field(default_factory=dict)
    projector: Source | None = None
    newline: Source | None = None
    vision_tower: Source | None = None
    vision_config: PreTrainedConfig | None = None
    trained_with: tuple[str | None, int | None] = (None, None)
    base: str | None = None
    tower_changes: tuple[Callable[[Weights], Weights], ...] = ()
    architecture: Architecture | None = None

    def problems(self, args: Arguments) -> list[str]:
        """Return lines about flags that an extension's architecture does not support."""
        kind = f"{FLAG} {self.path} is {self.kind}"
        return [] if self.architecture is None else self.architecture.problems(args, kind)


def language_model_source(path: str, config: PreTrainedConfig, rename: Callable[[str], str | None]) -> Source:
    """Return the source of a language model's weights. rename: see Source."""
    part = text_part(config)

    def in_memory(on_disk: str) -> str | None:
        name = rename(on_disk)
        return name and part.from_disk(name, config)

    return Source(FLAG, path, in_memory, (partial(part.stacked, config=config),))


def read_model_config(path: str) -> dict:
    file = Path(path) / "config.json"
    if not is_there(file):
        from llava_ds.config.other_names import hub_hint

        expected = f"expected the folder of a language model or of a LLaVA{hub_hint(path)}"
        hint = STAGE_1_HINT if has_only_projector(path) else expected
        raise ConfigError(f"{FLAG} {path} has no config.json: {hint}")
    check_folder(path, f"{FLAG} {path}")
    config = read_config(file, f"{FLAG} {path}")
    if config.get("quantization_config"):
        raise ConfigError(f"{FLAG} {path} is quantized: give the unquantized model")
    return config


def has_only_projector(path: str) -> bool:
    """True for a folder that stage 1 wrote. LLaVA's whole models may contain a projector file as well."""
    names = [file.name for file in Path(path).iterdir()] if Path(path).is_dir() else []
    models = [name for name in names if name.startswith(("model", "pytorch_model"))]
    return "mm_projector.bin" in names and not any(
        name.endswith((".safetensors", ".bin", ".index.json")) for name in models
    )


def without_adapter(source: Source | None) -> Source | None:
    """Return the source of a part without the adapter's changes; None if only the adapter's folder has the part."""
    if source is None or Path(source.path).name == BESIDE_ADAPTER:
        return None
    return dataclasses.replace(source, changes=tuple(each for each in source.changes if not isinstance(each, Over)))


def without_prefix(rename: Callable[[str], str | None]) -> Callable[[str], str | None]:
    """Wrap a renaming function to accept names with peft's prefixes, as in adapter files."""
    return lambda name: rename(formats.plain_name(name))
