"""Try the export before training, to find out early if nothing could open the exported model."""

import os
import shutil
from pathlib import Path

from llava_ds.constants import ConfigError
from llava_ds.export.export_plan import ExportPlan
from llava_ds.export.output_folder import folder_entries, planned_entries, write_folder
from llava_ds.export.safetensors_shards import num_bytes
from llava_ds.files.model_files import said_by
from llava_ds.model.families.language import read_any_config
from llava_ds.model.open.hf import hf_class
from llava_ds.runtime.scratch import scratch_folder
from llava_ds.tokenizer import read_tokenizer

TRIAL = "export-trial-"  # prefix of trial folders
REMEDY = "or give --export_format llava, for LLaVA's own code"


def try_export(export: ExportPlan, output_dir: Path, *, dry_run: bool = False) -> str:
    """Write the model's folder with holes instead of weights, open it like its users will, and remove it.

    dry_run: True to use the nearest existing parent of output_dir instead of creating it. Returns a line to print.
    Raises ConfigError if tensors would be missing, unknown or misshapen, or if the disk can't be written to or lacks
    space for the model.
    """
    entries = planned_entries(export)
    written = folder_entries(export, entries)
    total = num_bytes(written, export.dtype)
    place = output_dir.absolute()
    if dry_run:
        place = next(folder for folder in (place, *place.parents) if folder.is_dir())
        if not os.access(place, os.W_OK):
            raise ConfigError(f"--output_dir {output_dir} can't be written: no write permission for {place}")
    place.mkdir(parents=True, exist_ok=True)
    _check_room(place, total)
    with scratch_folder(TRIAL, place) as folder:
        write_folder(export, entries, folder, holes=True)
        if export.form == "hf":
            _open_with_transformers(folder)
    what = "transformers opens its names and shapes" if export.form == "hf" else "in LLaVA's format"
    return f"the finished model will have {len(written)} tensors, {total / 1e9:,.3g} GB: {what}"


def _check_room(output_dir: Path, total: int) -> None:
    free = shutil.disk_usage(output_dir).free
    if total > free:
        raise ConfigError(
            f"--output_dir {output_dir}: the finished model takes {total / 1e9:.1f} GB, but only {free / 1e9:.1f} GB "
            "are free there: free disk space, or name another folder"
        )


def _open_with_transformers(folder: Path) -> None:
    where = "the finished model"
    read_tokenizer(folder, where)
    cls = hf_class(read_any_config(folder, where))
    try:
        # Files read in their own dtype are memory-mapped, so holes are never read. The meta device would need the
        # package accelerate.
        _, report = cls.from_pretrained(
            folder,
            dtype="auto",
            local_files_only=True,
            ignore_mismatched_sizes=True,  # the report lists them
            output_loading_info=True,
        )
    except Exception as error:  # a class may raise any error about its configuration
        raise ConfigError(
            f"transformers would not open the finished model ({said_by(error)}): report this, {REMEDY}"
        ) from error
    problems = [
        f"{len(names)} tensors {what}, such as {sorted(map(str, names))[0]}"
        for names, what in (
            (report["missing_keys"], "would be missing"),
            (report["unexpected_keys"], "it does not know"),
            (report["mismatched_keys"], "would have another shape"),
        )
        if names
    ]
    if problems:
        raise ConfigError(
            f"transformers' {cls.__name__} would not open the finished model: {'; '.join(problems)}: "
            f"take another --model_name_or_path, {REMEDY}"
        )
