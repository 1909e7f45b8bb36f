"""All of a model but its weights, whatever holds it: transformers' folder, LLaVA's, an adapter, or a checkpoint."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from llava_ds.checkpoint import commit
from llava_ds.checkpoint.trainer_file import is_training_checkpoint
from llava_ds.constants import ConfigError, DataError
from llava_ds.files.model_files import check_folder, is_there, read_config, shown
from llava_ds.model.families.language import config_of
from llava_ds.model.hf import HF_CLASSES, HFModel
from llava_ds.model.lora import ADAPTER_CONFIG
from llava_ds.model.open import names as formats
from llava_ds.model.open.folder import FLAG
from llava_ds.model.open.weights import WeightFiles, Weights
from llava_ds.tokenizer import read_tokenizer

if TYPE_CHECKING:
    from llava_ds.export.export_plan import ExportPlan
    from llava_ds.export.tensors import Entry

# Where the models that a checkpoint, an adapter or a folder in LLaVA's format does not bring lie now.
MOVED_FLAGS = {
    "model_name_or_path": "where a checkpoint's base language model lies now",
    "model_base": "the model under an adapter, where the adapter does not say it",
    "vision_tower": "where the vision tower of a checkpoint, an adapter or a folder in LLaVA's format lies now",
    "pretrain_mm_mlp_adapter": "where the projector that a checkpoint began with lies now",
}
CHECKPOINT_FLAGS = ("model_name_or_path", "pretrain_mm_mlp_adapter")  # those that only a checkpoint lacks


@dataclass(frozen=True)
class UnloadedModel:
    """path: as the user named it; folder: where configuration and tokenizer lie; weights: of the class as it lives in
    memory, by its own names; is_folder: whether transformers opens the path itself; notes: lines about what it is."""

    path: Path
    folder: Path
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    weights: Callable[[HFModel], Weights]
    is_folder: bool
    notes: tuple[str, ...] = ()

    def precision(self, asked: torch.dtype | None) -> torch.dtype:
        """The precision asked for, the configuration's, or the first weight's. Raises ConfigError for what is none."""
        said = self.config.dtype
        if isinstance(said, str):
            said = getattr(torch, said, said)
        if said is not None and not (isinstance(said, torch.dtype) and said.is_floating_point):
            raise ConfigError(f"--model_path {self.path}: config.json says dtype {shown(said)}: copy it again")
        if asked is None and said is None and self.is_folder:
            read_all = (read() for _, read in WeightFiles(self.path).tensors())
            said = next((tensor.dtype for tensor in read_all if tensor.is_floating_point()), None)
        return asked or said or torch.float32


@contextlib.contextmanager
def open_model(
    path: str | Path, moved: Mapping[str, str] | None = None, version: str | None = None
) -> Iterator[UnloadedModel]:
    """What there is at a path, before any weight is read; its folder may be gone afterwards.

    moved: values of MOVED_FLAGS; version: the conversation template of a folder in LLaVA's format that does not say it.
    What is no folder of transformers' is read as run/export.py reads it, and nothing is written but its settings.
    Raises ConfigError where there is no LLaVA, or what it needs is not there; DataError for a damaged one.
    """
    path, moved = Path(path).expanduser(), dict(moved or {})
    if not path.is_dir():
        raise ConfigError(f"--model_path {path}: there is no such folder")
    if is_training_checkpoint(path):
        with _as_exported(path, *_of_checkpoint(path, moved)) as found:
            yield found
    elif _is_transformers(path):
        if moved:
            raise ConfigError(
                f"{', '.join(f'--{name}' for name in moved)}: {path} brings all that it needs, leave it out"
            )
        config, tokenizer = _settings(path, path)
        yield UnloadedModel(path, path, config, tokenizer, lambda model: WeightFiles(path, _renaming(model)), True)
    else:
        with _as_exported(path, *_of_folder(path, moved, version)) as found:
            yield found


def _is_transformers(folder: Path) -> bool:
    """Whether a folder is for transformers alone, whether it opens it or says why not.

    Raises ConfigError for one that holds no model at all.
    """
    config = folder / "config.json"
    if (folder / ADAPTER_CONFIG).is_file():
        return False
    if not is_there(config):
        raise ConfigError(
            f"{folder} holds no exported model (no config.json) and is no whole checkpoint-<step> (no "
            f"{commit.MANIFEST}): train one first, as make finetune does"
        )
    said = read_config(config, f"--model_path {folder}")
    return not ("mm_vision_tower" in said and "text_config" not in said)


def _of_checkpoint(path: Path, moved: dict[str, str]) -> "tuple[ExportPlan, list[Entry], tuple[str, ...]]":
    from llava_ds.export.from_checkpoint import (
        restore,  # with DeepSpeed, which takes seconds, and a folder does without
    )

    restored = restore(path, moved, None)
    return restored.export, restored.entries, ()


def _of_folder(
    path: Path, moved: dict[str, str], version: str | None
) -> "tuple[ExportPlan, list[Entry], tuple[str, ...]]":
    from llava_ds.export.from_folder import open_folder  # with DeepSpeed, too

    if wrong := [f"--{name}" for name in CHECKPOINT_FLAGS if name in moved]:
        raise ConfigError(f"{', '.join(wrong)} goes with a checkpoint, and {path} is none: leave it out")
    given = moved if version is None else {**moved, "version": version}
    try:
        export, entries, lines = open_folder(path, given, None, "hf")
    except (ConfigError, DataError) as error:  # says the flag that training has for it
        raise type(error)(str(error).replace(f"{FLAG} {path}", f"--model_path {path}")) from error
    return export, entries, tuple(lines)


@contextlib.contextmanager
def _as_exported(
    path: Path, export: "ExportPlan", entries: "list[Entry]", notes: tuple[str, ...]
) -> Iterator[UnloadedModel]:
    """A model as the folder that its export would be, whose files of weights are holes."""
    from llava_ds.export.export_plan import hf_container
    from llava_ds.export.transformers_folder import hf_entries, write_hf

    kind, why = hf_container(export.model, export.args, export.image_options)
    if kind is None:
        raise ConfigError(f"{path} can't be asked here: {why}")
    named = hf_entries(export, entries)
    with tempfile.TemporaryDirectory(prefix="llava_ds-") as scratch:
        folder = Path(scratch)
        write_hf(export, entries, folder, holes=True)
        config, tokenizer = _settings(folder, path)
        yield UnloadedModel(
            path, folder, config, tokenizer, lambda model: _Entries(path, named, _renaming(model)), False, notes
        )


class _Entries:
    """The tensors of a checkpoint, an adapter over its base or LLaVA's format, as a class of transformers' has them."""

    notes = ()

    def __init__(self, path: Path, entries: "list[Entry]", rename: Callable[[str], str | None]) -> None:
        self.path = path
        self._entries = {new: entry for entry in entries if (new := rename(entry.name)) is not None}
        self.shapes = {name: tuple(entry.shape) for name, entry in self._entries.items()}

    def tensors(self) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        for name, entry in self._entries.items():
            yield name, entry.read


def _renaming(model: HFModel) -> Callable[[str], str | None]:
    """From names on disk to the model's own; None for what it does not have: layers of tables, and of other uses."""
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}

    def rename(name: str) -> str | None:
        new = formats.to_transformers(name)
        for spelling in (new, new.replace("vision_tower.vision_model.", "vision_tower.")):
            if spelling in known:
                return spelling
        return None

    return rename


def _settings(folder: Path, path: Path) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase]:
    """Configuration and tokenizer in a folder. path: as the user named it."""
    where = f"--model_path {path}"
    check_folder(folder, where)
    said = read_config(folder / "config.json", where)
    absent = [name for name in ("text_config", "vision_config") if not isinstance(said.get(name), dict)]
    kind = said.get("model_type")
    if isinstance(kind, str) and kind in HF_CLASSES and absent:  # transformers would take a model of 7 billion
        raise ConfigError(f"{where}: its config.json has no {' and no '.join(absent)}: copy it again")
    if said.get("quantization_config"):
        raise ConfigError(f"{where} is quantized: give the model that it was made from")
    config = config_of(said, where, str(folder))
    if config.model_type not in HF_CLASSES:
        raise ConfigError(f"{where}: its model_type is {config.model_type!r}, expected {' or '.join(HF_CLASSES)}")
    return config, read_tokenizer(folder, where)
