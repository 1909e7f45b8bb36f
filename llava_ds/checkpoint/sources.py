"""Whether the models that a run began with still hold the same weights.

Frozen parameters are in no checkpoint: a resumed run reads them where the run began with them.
"""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from llava_ds.arguments import Arguments
from llava_ds.checkpoint.files import sha256
from llava_ds.checkpoint.identity import TRAINER
from llava_ds.constants import ConfigError, DataError
from llava_ds.model.weight_files import weight_files

REMEMBERED = "weight_hashes.json"  # in a run's folder
HASHING_THREADS = 8

Hashes = dict[str, dict[str, str]]  # SHA-256 by file name, by flag


def weight_hashes(args: Arguments, output_dir: Path, checkpoint: Path | None) -> Hashes:
    """The SHA-256 of every weight file in the folders that the flags name. For rank 0: it reads all of them.

    Files whose place, size and time are as they were are not read again; output_dir remembers them, but for a dry run.
    Raises ConfigError when the checkpoint to go on from (None: a fresh start) is of a run that began with others.
    {} where nothing is compared now or later.
    """
    if checkpoint is None and (args.training.dry_run or args.training.save_strategy == "no"):
        return {}
    note = output_dir / REMEMBERED
    try:
        known = json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}  # not there yet, or a kill cut it short: it is written anew
    folders = {name: getattr(args.model, name) for name in ("model_name_or_path", "model_base", "vision_tower")}
    files = {name: _files(Path(folder)) for name, folder in folders.items() if folder is not None}
    stamps = {path: _stamp(path) for paths in files.values() for path in paths}
    new = [path for path, stamp in stamps.items() if stamp not in known]
    with ThreadPoolExecutor(min(HASHING_THREADS, os.cpu_count() or 1)) as pool:
        hashed = {stamps[path]: digest for path, digest in zip(new, pool.map(sha256, new))}
    digests = {**{stamp: known[stamp] for stamp in stamps.values() if stamp in known}, **hashed}
    if hashed and not args.training.dry_run:
        output_dir.mkdir(parents=True, exist_ok=True)
        note.write_text(json.dumps(digests, indent=1), encoding="utf-8")
    found = {name: {path.name: digests[stamps[path]] for path in paths} for name, paths in files.items()}
    if checkpoint is not None:
        _compare(checkpoint, found)
    return found


def _compare(checkpoint: Path, found: Hashes) -> None:
    saved: Hashes = json.loads((checkpoint / TRAINER).read_text(encoding="utf-8"))["weights"]
    lines = [
        f"  --{name}: {file} {'is gone' if file not in found.get(name, {}) else 'has changed'}"
        for name, files in saved.items()
        for file, digest in files.items()
        if found.get(name, {}).get(file) != digest
    ]
    if lines:
        raise ConfigError(
            f"{checkpoint} is of a run that began with other weights, and those that do not train are read from there "
            "again:\n" + "\n".join(lines) + "\nbring the old files back (or train anew: --resume never)"
        )


def _files(folder: Path) -> list[Path]:
    """The files of a folder that are read as weights; of an adapter's or a projector's folder, all that may be."""
    try:
        return weight_files(folder)
    except DataError:
        return sorted(path for pattern in ("*.safetensors", "*.bin") for path in folder.glob(pattern))


def _stamp(path: Path) -> str:
    stat = path.stat()
    return f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}"
