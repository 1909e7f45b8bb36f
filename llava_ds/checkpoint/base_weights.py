"""Hash a run's initial weights: a resumed run reads frozen parameters from these files, not from its checkpoint."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from llava_ds.config.arguments import Arguments
from llava_ds.config.model_flags import tower_folders
from llava_ds.constants import ConfigError, DataError
from llava_ds.files.reading import FileState, move_aside, read_json, state_of, why_not_regular
from llava_ds.files.writing import run_folder, sha256, write_whole
from llava_ds.model.open.model_plan import own_sources
from llava_ds.model.open.names import value_head_file
from llava_ds.model.open.weights import weight_files

HASHES_FILE = "weight_hashes.json"  # in a run's folder
HASHING_THREADS = 8

Hashes = dict[str, dict[str, str]]  # maps flags to {file name: SHA-256}


class _Known(FileState):
    """A weight file's state when it was hashed, and its hash."""

    sha256: str


def weight_hashes(args: Arguments, output_dir: Path, checkpoint: Path | None) -> Hashes:
    """Hash every weight file in the folders named by flags, on rank 0.

    Hashes are stored in output_dir, except in a dry run, and reused for a file whose path, stamp and sampled blocks are
    unchanged. Returns {} if no checkpoint is resumed or saved. checkpoint: the checkpoint to resume from, None for a
    fresh start. Raises ConfigError if it belongs to a run with other initial weights.
    """
    if checkpoint is None and (args.training.dry_run or args.training.save_strategy == "no"):
        return {}
    folders = {name: getattr(args.model, name) for name in ("model_name_or_path", "model_base")}
    towers = tower_folders(args.model.vision_tower)
    # Separate keys, because files of the two towers may have the same names.
    folders |= dict(zip(("vision_tower", "vision_tower (the second)"), towers))
    files = {name: _files(Path(folder)) for name, folder in folders.items() if folder is not None}
    for name, folder in args.own_models.items():
        files[name] = [*_files(folder), *filter(None, [value_head_file(folder)])]
    for source in own_sources(args.model).values():
        files.setdefault(source.flag.removeprefix("--"), []).append(Path(source.path))
    note = run_folder(output_dir) / HASHES_FILE
    known = _read_hashes(note)
    paths = {path: str(path.resolve()) for group in files.values() for path in group}
    seen = {place: state_of(path) for path, place in paths.items()}
    new = [path for path, place in paths.items() if not seen[place].items() <= known.get(place, {}).items()]
    with ThreadPoolExecutor(min(HASHING_THREADS, os.cpu_count() or 1)) as pool:
        hashed = {paths[path]: digest for path, digest in zip(new, pool.map(sha256, new))}
    digests = {place: hashed.get(place) or known[place]["sha256"] for place in seen}
    if hashed and not args.training.dry_run:
        note.parent.mkdir(parents=True, exist_ok=True)
        if (problem := why_not_regular(note)) is not None:
            print(f"WARNING: {note} can't be used ({problem}): it is now {move_aside(note).name}", flush=True)
        content = {place: {**seen[place], "sha256": digest} for place, digest in digests.items()}
        write_whole(note, json.dumps(content, indent=1))
    found = {name: {path.name: digests[paths[path]] for path in group} for name, group in files.items()}
    if checkpoint is not None:
        _compare(checkpoint, found)
    return found


def _read_hashes(note: Path) -> dict[str, _Known]:
    """Read the hashes that an earlier start stored; {} if their file is missing, damaged or not a regular file."""
    try:
        return read_json(note, dict[str, _Known])
    except (FileNotFoundError, DataError):
        return {}


def _compare(checkpoint: Path, found: Hashes) -> None:
    from llava_ds.checkpoint.trainer_file import read_trainer

    saved: Hashes = read_trainer(checkpoint).get("weights", {})
    lines = [
        f"  --{name}: {file} {'is missing' if file not in found[name] else 'has changed'}"
        for name, files in saved.items()
        if name in found
        for file, digest in files.items()
        if found[name].get(file) != digest
    ]
    if lines:
        raise ConfigError(
            f"{checkpoint} belongs to a run that started from other weights, and a resume reads frozen weights from "
            "these files:\n" + "\n".join(lines) + "\nrestore the old files, or start again with --resume never"
        )


def _files(folder: Path) -> list[Path]:
    """List a folder's weight files; for an adapter's or a projector's folder, all candidates."""
    try:
        return weight_files(folder)
    except DataError:
        return sorted(path for pattern in ("*.safetensors", "*.bin") for path in folder.glob(pattern))
