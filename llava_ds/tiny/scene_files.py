"""Write generated scenes to disk as LLaVA JSON and PNG files, atomically."""

import contextlib
import fcntl
import glob
import json
import shutil
import tempfile
from pathlib import Path

from llava_ds.constants import DataError
from llava_ds.data.file_slices import write_errors
from llava_ds.files.reading import read_json

GENERATOR_VERSION = 1  # increment if a seed gives different data, so that older folders are rewritten
RECORD_FILE = "dataset.json"


def write_dataset(folder, *, seed=0, num_pretrain=5760, num_finetune=7200, num_heldout=1200):
    """Write pretrain.json, finetune.json, heldout.json and their images into a folder.

    Counts are numbers of records; num_heldout is rounded up to equally many questions of each kind. A complete data set
    of the same parameters and generator version is kept; any other is replaced. The folder is renamed into place, so it
    is never half written. Concurrent calls wait for the first. Raises DataError if the folder has other content, and
    ConfigError if the disk lacks space.
    """
    folder = Path(folder)
    made_from = {
        "generator_version": GENERATOR_VERSION,
        "seed": seed,
        "num_pretrain": num_pretrain,
        "num_finetune": num_finetune,
        "num_heldout": num_heldout,
    }
    with write_errors(folder.parent, "the generated scenes"):
        _write_once(folder, made_from)


def _write_once(folder, made_from):
    """Implement write_dataset. made_from: version and parameters that are stored with the data."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f".{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in folder.parent.glob(f".{glob.escape(folder.name)}-*"):
            shutil.rmtree(left)  # left by a killed process; the lock excludes live ones
        with contextlib.suppress(FileNotFoundError, DataError):  # missing or damaged
            if read_json(folder / RECORD_FILE, dict) == made_from:
                return
        if folder.exists() and any(folder.iterdir()) and not (folder / RECORD_FILE).is_file():
            raise DataError(f"{folder} holds something other than generated scenes: name a new or empty folder")
        from llava_ds.tiny.scene_splits import write_splits  # only needed to draw images

        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        building = scratch / "new"
        building.mkdir()  # with the usual permissions; mkdtemp's folder is private
        try:
            counts = {name: made_from[name] for name in ("num_pretrain", "num_finetune", "num_heldout")}
            write_splits(building, made_from["seed"], **counts)
            (building / RECORD_FILE).write_text(json.dumps(made_from, indent=1))
            if folder.exists():
                folder.rename(scratch / "old")  # deleting it in place could leave a part after a kill
            building.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
