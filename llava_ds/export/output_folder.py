"""Write model folders of any format, from entries or from a model in training, completely or not at all."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers.initialization import no_init_weights

from llava_ds.constants import ConfigError
from llava_ds.export.bit_check import Written
from llava_ds.export.export_plan import ExportPlan
from llava_ds.export.tensors import Counted, Entry, live_entries, take_part, without_own_files, write_own_files
from llava_ds.export.tokenizer_files import ORIGINAL_FILES
from llava_ds.export.transformers_folder import hf_entries, write_hf
from llava_ds.extensions.active import active, choice
from llava_ds.extensions.table import EXTENSIONS
from llava_ds.files.model_files import ADAPTER_FILES, BESIDE_ADAPTER, JSON_FILES, OTHER_FILES, TEMPLATES_FOLDER
from llava_ds.model.llava import LlavaModel, assemble
from llava_ds.model.open.loading import return_freed_memory
from llava_ds.model.open.names import OWN, PROJECTOR_FILES, VALUE_HEAD_FILE
from llava_ds.runtime.ranks import Ranks
from llava_ds.runtime.scratch import scratch_folder

# Files of a model in its folder. They are removed before another model is written there, or the two would be mixed.
MODEL_FILES = (
    "model*.safetensors", "model.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json",
    *(name for each in EXTENSIONS.values() for name in each.model_files.split()),
    *ADAPTER_FILES, BESIDE_ADAPTER, VALUE_HEAD_FILE, f"{OWN}*.safetensors", *PROJECTOR_FILES, *JSON_FILES, *OTHER_FILES,
    f"{ORIGINAL_FILES}/*", f"{TEMPLATES_FOLDER}/*",
)  # fmt: skip


def _functions(form: str) -> tuple[Callable[..., list[Entry]], Callable[..., Written]] | None:
    """Return the two functions that list and write the entries in a form; None for an extension's form."""
    if form == "hf":
        return hf_entries, write_hf
    if form not in ("llava", "projector"):
        return None
    from llava_ds.export import llava_folder as llava

    own = {"llava": (llava.llava_entries, llava.write_llava)}
    own["projector"] = llava.projector_entries, llava.write_projector
    return own[form]


def folder_entries(export: ExportPlan, entries: list[Entry]) -> list[Entry]:
    """List a folder's tensors under their names on disk: first the model's weights, then tensors in separate files.

    entries: the model's tensors. The plan's form has to be "hf", "llava" or "projector".
    """
    rest, beside = without_own_files(entries)
    list_entries, _ = _functions(export.form)
    return list_entries(export, rest) + beside


def write_folder(export: ExportPlan, entries: list[Entry], output_dir: Path, *, holes: bool = False) -> Written:
    """Write a model's entries as a folder of any form. Returns checksums of the tensors' bits ({} for extensions).

    holes: True to write weight files with holes instead of weights. The files of write_own_files are then left out.
    """
    rest, beside = without_own_files(entries)
    if (functions := _functions(export.form)) is not None:
        written = functions[1](export, rest, output_dir, **({"holes": True} if holes else {})) or {}
    else:
        choice("format", export.form).write(export, rest, output_dir)
        written = {}
    if holes:
        return {}
    for extension in active(export.args.own).extensions.values():
        if extension.beside is not None:
            extension.beside(export.args, output_dir)
    return written | write_own_files({entry.name: entry.read().to(export.dtype) for entry in beside}, output_dir)


def write_live_folder(export: ExportPlan, model: LlavaModel, output_dir: Path, ranks: Ranks) -> Written:
    """Write a model in training as "hf", "llava" or "projector". Collective.

    Only rank 0 writes and returns checksums of the tensors' bits. If a file can't be written, rank 0 still takes part
    in gathering the rest of the model before it raises, so that no other rank waits forever.
    """
    entries = live_entries(model, ranks)
    with return_freed_memory():
        if ranks.is_first:
            counted = Counted()
            try:
                return write_folder(export, counted.entries(entries), output_dir)
            except (OSError, SafetensorError):
                take_part(reads_of(export, entries)[counted.num_read :])
                raise
        take_part(reads_of(export, entries))
    return {}


def reads_of(export: ExportPlan, entries: list[Entry]) -> list[Entry]:
    """Return a model's entries in the order in which write_folder reads them; an entry stored twice appears twice."""
    found: list[Entry] = []
    noted = [dataclasses.replace(entry, read=partial(found.append, entry)) for entry in entries]
    take_part(folder_entries(export, noted))
    return found


def planned_entries(export: ExportPlan) -> list[Entry]:
    """Return entries with the names and shapes of the model to train, before it is built. They can't be read."""
    plan = export.model
    with torch.device("meta"), no_init_weights():
        mean, std = torch.empty(3), torch.empty(3)
        model = assemble(plan.text_config, plan.tower, export.args, mean, std, plan.has_value_head)
    return [Entry(name, tuple(p.shape), p.detach) for name, p in model.named_parameters()]


@contextlib.contextmanager
def staged(output_dir: Path) -> Iterator[Path]:
    """Yield a temporary folder of the same name; at the end of the block, the model in it replaces output_dir's model.

    If the block raises, even for Ctrl-C, output_dir is unchanged. Files that don't belong to the old model are kept. No
    reader can mix both models, because config.json is removed first and written last. Raises ConfigError if output_dir
    can't be created.
    """
    was_there = output_dir.is_dir()
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        # The temporary folder is inside output_dir, to be on the same disk.
        scratch = contextlib.ExitStack()
        stage = scratch.enter_context(scratch_folder(".export-", output_dir)) / output_dir.resolve().name
    except OSError as error:
        raise ConfigError(
            f"--output_dir {output_dir} can't be created ({error.strerror}): name another folder"
        ) from error
    try:
        with scratch:
            stage.mkdir()
            yield stage
            _replace(output_dir, stage)
    except BaseException:
        if not was_there:
            with contextlib.suppress(OSError):  # complete files are already in place
                output_dir.rmdir()
        raise


def _replace(output_dir: Path, stage: Path) -> None:
    """Move the stage's files into output_dir, replacing the model there."""
    new = sorted(
        (file.relative_to(stage) for file in stage.rglob("*") if file.is_file()),
        key=lambda name: (name.name == "config.json", name.name.endswith(".index.json"), name),
    )
    targets = [output_dir / name for name in new]
    inner = [output_dir / name for name in (ORIGINAL_FILES, TEMPLATES_FOLDER)]
    links = {folder for folder in inner if folder.is_symlink()}  # remove only links, not their targets
    old = links | {file for pattern in MODEL_FILES for file in output_dir.glob(pattern) if file.parent not in links}
    if folders := sorted(file for file in old.union(targets) if file.is_dir() and not file.is_symlink()):
        raise ConfigError(f"{folders[0]} is a folder, expected a file: remove it, or name another --output_dir")
    for file in sorted(old, key=lambda file: (file.name != "config.json", file)):
        file.unlink()
    for folder in inner:
        if folder.is_dir():  # an empty folder would be read as part of the model
            folder.rmdir()
    for name, target in zip(new, targets):
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(stage / name, target)
