"""Open models for inference without reading weights: folders of transformers or LLaVA, adapters, and checkpoints."""

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from llava_ds.checkpoint import commit
from llava_ds.checkpoint.trainer_file import is_training_checkpoint
from llava_ds.constants import ConfigError, DataError
from llava_ds.extensions.active import architecture_of, folder_part, model_types, text_part
from llava_ds.files.model_files import ADAPTER_CONFIG, check_folder, is_there, read_config, shown
from llava_ds.model.families.language import config_of
from llava_ds.model.open import names as formats
from llava_ds.model.open.file_order import ignored_files_of_folder
from llava_ds.model.open.hf import HF_CLASSES, HFModel
from llava_ds.model.open.model_folder import FLAG
from llava_ds.model.open.weights import WeightFiles, Weights
from llava_ds.tokenizer import read_tokenizer

if TYPE_CHECKING:
    from llava_ds.export.export_plan import ExportPlan
    from llava_ds.export.tensors import Entry

# Flags giving the current location of models that checkpoints, adapters and folders in LLaVA's format refer to.
CHECKPOINT_FLAGS = ("model_name_or_path", "pretrain_mm_mlp_adapter")  # for checkpoints only


@dataclass(frozen=True)
class UnloadedModel:
    """A model whose weights are still on disk.

    path: the user's path; folder: the folder with configuration and tokenizer; weights: reads weights by their names in
    transformers' class; is_folder: True if transformers can open the path itself; notes: lines for the user; own: the
    export plan of a model whose tower or projector has no class in transformers, None otherwise.
    """

    path: Path
    folder: Path
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    weights: Callable[[HFModel], Weights]
    is_folder: bool
    notes: tuple[str, ...] = ()
    own: "ExportPlan | None" = None

    def precision(self, requested: torch.dtype | None) -> torch.dtype:
        """Return the requested dtype, else the configuration's, else the first weight's.

        Raises ConfigError if the configuration's value is not a floating-point dtype.
        """
        dtype = self.config.dtype
        if isinstance(dtype, str):
            dtype = getattr(torch, dtype, dtype)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ConfigError(f"--model_path {self.path}: config.json says dtype {shown(dtype)}: copy it again")
        if requested is None and dtype is None and self.is_folder:
            read_all = (read() for _, read in WeightFiles(self.path).tensors())
            dtype = next((tensor.dtype for tensor in read_all if tensor.is_floating_point()), None)
        return requested or dtype or torch.float32


@contextlib.contextmanager
def open_model(
    path: str | Path, moved: Mapping[str, str] | None = None, version: str | None = None
) -> Iterator[UnloadedModel]:
    """Open the model at a path without reading its weights. Its `folder` may be temporary.

    moved: values of MOVED_FLAGS; version: the conversation template, if the folder has none. Formats other than
    transformers' are opened like in run/export.py, and only their settings are written to a folder. Raises ConfigError
    if the path has no LLaVA model or a part is missing, and DataError if the model is damaged.
    """
    path, moved = Path(path).expanduser(), dict(moved or {})
    if not path.is_dir():
        raise ConfigError(f"--model_path {path}: there is no such folder")
    if is_training_checkpoint(path):
        with _as_exported(path, *_read_checkpoint(path, moved)) as found:
            yield found
    elif _is_transformers(path):
        if moved:
            raise ConfigError(f"{', '.join(f'--{name}' for name in moved)}: {path} is complete, leave it out")
        config, tokenizer = _settings(path, path)
        notes = ignored_files_of_folder(path, f"--model_path {path}", template=architecture_of(config) is not None)
        weights = partial(_in_memory, partial(WeightFiles, path))
        yield UnloadedModel(path, path, config, tokenizer, weights, True, tuple(notes))
    else:
        with _as_exported(path, *_read_folder(path, moved, version)) as found:
            yield found


def _is_transformers(folder: Path) -> bool:
    """Return True for a folder in transformers' format, False for LLaVA's format and adapters.

    Raises ConfigError for a folder without a model.
    """
    config = folder / "config.json"
    if (folder / ADAPTER_CONFIG).is_file():
        return False
    if not is_there(config):
        raise ConfigError(
            f"{folder} contains no exported model (no config.json) and is not a complete checkpoint-<step> (no "
            f"{commit.MANIFEST}): train one first, as make finetune does"
        )
    config_json = read_config(config, f"--model_path {folder}")
    return not ("mm_vision_tower" in config_json and "text_config" not in config_json)


def _read_checkpoint(path: Path, moved: dict[str, str]) -> "tuple[ExportPlan, list[Entry], tuple[str, ...]]":
    # Imported here because it imports DeepSpeed. This takes seconds and is not needed for exported folders.
    from llava_ds.export.from_checkpoint import restore

    restored = restore(path, moved, None)
    return restored.export, restored.entries, ()


def _read_folder(
    path: Path, moved: dict[str, str], version: str | None
) -> "tuple[ExportPlan, list[Entry], tuple[str, ...]]":
    from llava_ds.export.from_folder import open_folder  # imports DeepSpeed as well

    if wrong := [f"--{name}" for name in CHECKPOINT_FLAGS if name in moved]:
        raise ConfigError(f"{', '.join(wrong)} goes with a checkpoint, but {path} is not one: leave it out")
    given = moved if version is None else {**moved, "version": version}
    try:
        export, entries, lines = open_folder(path, given, None, "hf")
    except (ConfigError, DataError) as error:  # the error names the flag that training uses
        raise type(error)(str(error).replace(f"{FLAG} {path}", f"--model_path {path}")) from error
    return export, entries, tuple(lines)


@contextlib.contextmanager
def _as_exported(
    path: Path, export: "ExportPlan", entries: "list[Entry]", notes: tuple[str, ...]
) -> Iterator[UnloadedModel]:
    """Open a model through its temporary export with sparse weight files."""
    from llava_ds.export.export_plan import own_vision
    from llava_ds.export.transformers_folder import hf_entries, write_hf

    is_own = export.model.architecture is None and bool(own_vision(export.model, export.args, export.image_options))
    named = hf_entries(export, entries)
    with tempfile.TemporaryDirectory(prefix="llava_ds-") as scratch:
        folder = Path(scratch)
        write_hf(export, entries, folder, holes=True)
        config, tokenizer = _settings(folder, path)
        weights = partial(_in_memory, partial(_Entries, path, named))
        yield UnloadedModel(path, folder, config, tokenizer, weights, False, notes, export if is_own else None)


class _Entries:
    """Tensors of a checkpoint, an adapter with its base, or LLaVA's format, under the names in transformers' class."""

    notes = ()

    def __init__(self, path: Path, entries: "list[Entry]", rename: Callable[[str], str | None]) -> None:
        self.path = path
        self._entries = {new: entry for entry in entries if (new := rename(entry.name)) is not None}
        self.shapes = {name: tuple(entry.shape) for name, entry in self._entries.items()}

    def tensors(self) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        for name, entry in self._entries.items():
            yield name, entry.read

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each of the names with its tensor."""
        for name in names:
            yield name, self._entries[name].read()


def _in_memory(weights: Callable[[Callable[[str], str | None]], Weights], model: HFModel) -> Weights:
    """Return the weights in their form in memory, under the model's names, without tensors that the model lacks.

    weights: called with a function that maps a name on disk to the model's name, or to None to drop the tensor.
    """
    text = model.config.get_text_config()
    part = text_part(text)
    if (architecture := architecture_of(model.config)) is not None:
        return part.stacked(weights(architecture.names(text).to_memory), text)
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}

    def rename(name: str) -> str | None:
        new = formats.to_transformers(name)
        spellings = (new, new.replace("vision_tower.vision_model.", "vision_tower."))
        return next(filter(None, (part.from_disk(spelling, text, known) for spelling in spellings)), None)

    return part.stacked(weights(rename), text)


def _settings(folder: Path, path: Path) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase]:
    """Read the configuration and tokenizer in a folder. path: the user's path, for messages."""
    where = f"--model_path {path}"
    check_folder(folder, where)
    config_json = read_config(folder / "config.json", where)
    kind = config_json.get("model_type")
    part = folder_part(kind)
    part = part if part is not None and kind in part.model_types else None
    absent = [name for name in ("text_config", "vision_config") if not isinstance(config_json.get(name), dict)]
    absent = absent if part is None else part.missing(config_json)
    if (
        isinstance(kind, str) and (kind in HF_CLASSES or part) and absent
    ):  # transformers' default has 7 billion parameters
        raise ConfigError(f"{where}: its config.json has no {' and no '.join(absent)}: copy it again")
    if config_json.get("quantization_config"):
        raise ConfigError(f"{where} is quantized: give the model that it was made from")
    config = config_of(config_json, where, str(folder))
    architecture = architecture_of(config)
    if config.model_type not in HF_CLASSES and architecture is None:
        known = (*HF_CLASSES, *model_types())
        raise ConfigError(f"{where}: its model_type is {config.model_type!r}, expected {' or '.join(known)}")
    if architecture is None:
        return config, read_tokenizer(folder, where)
    return config, architecture.open_tokenizer(str(folder), where)
