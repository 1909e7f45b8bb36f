"""Commit a checkpoint. A checkpoint is complete if its folder has a manifest and every file matches the manifest.

All ranks write to a temporary folder, and each rank flushes and hashes its own files. When all files are on the disk,
rank 0 writes the manifest and renames the folder. A complete checkpoint is deleted only after a newer one is complete,
so a rank that is killed at any moment leaves the previous or the new checkpoint complete.
"""

import contextlib
import hashlib
import json
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

from llava_ds.files.writing import Entry, described, flush, flush_and_hash, write_file
from llava_ds.runtime.ranks import Ranks, gather

MANIFEST = "manifest.json"
TRAINER = "trainer.json"
_NAME = re.compile(r"checkpoint-([0-9]{1,18})")
# Suffixes of folders that don't count as checkpoints.
_UNFINISHED, _REPLACED, _DELETED = ".tmp", ".replaced", ".deleted"


class SaveFailed(Exception):
    """Raised on all ranks if a checkpoint could not be saved. The message names ranks and files."""


def begin(output_dir: Path, step: int, ranks: Ranks) -> Path:
    """Create an empty temporary folder for the checkpoint of a step. Raises SaveFailed on all ranks if it can't.

    Removes the folders of unfinished saves to free their disk space.
    """
    scratch = output_dir / f"checkpoint-{step}{_UNFINISHED}"

    def make() -> None:
        recover(output_dir)
        for suffix in (_UNFINISHED, _REPLACED, _DELETED):
            for path in _leftovers(output_dir, suffix):
                shutil.rmtree(path, ignore_errors=True)
        scratch.mkdir(parents=True)

    _act_on_first(scratch, make, ranks)
    return scratch


def commit(scratch: Path, written: dict[str, Entry], problem: str | None, ranks: Ranks) -> Path:
    """Turn the folder into a checkpoint, after every rank has written its part. Collective.

    written: this rank's files by path relative to the folder; problem: the reason why some are missing, or None.
    Returns the final path. If a rank has a problem, the folder is removed and all ranks raise SaveFailed.
    """
    final = scratch.with_suffix("")
    try:
        parts = _gather_values(problem, ranks, written)
        files = {name: entry for part in parts for name, entry in part.items()}
        assert len(files) == sum(map(len, parts)), "two ranks wrote a file of the same name"
        _act_on_first(scratch, lambda: _publish(scratch, final, files), ranks)
    except SaveFailed:
        if ranks.is_first:
            shutil.rmtree(scratch, ignore_errors=True)
        raise
    return final


def keep_newest(output_dir: Path, limit: int | None, best: Path | None = None) -> None:
    """Delete all but the newest `limit` checkpoints (None: delete none). Only rank 0 calls it.

    best: a checkpoint to keep instead of the oldest of these. The newest checkpoint is always kept.
    """
    found = checkpoints(output_dir)
    if limit is None:
        return
    kept = found[:limit]
    if best in found and best not in kept:
        kept = [*found[: max(1, limit - 1)], best]
    for path in found:
        if path not in kept:
            _delete(path)


def step_in_name(checkpoint: Path) -> int | None:
    """Return the step in a checkpoint folder's name, after resolving links; None for other names."""
    named = _NAME.fullmatch(checkpoint.resolve().name)
    return None if named is None else int(named[1])


def checkpoints(output_dir: Path) -> list[Path]:
    """List the folders with a checkpoint's name, newest step first."""
    found = [path for path in output_dir.glob("checkpoint-*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """Return the optimizer step in a checkpoint folder's name."""
    return int(_NAME.fullmatch(checkpoint.name)[1])


def recover(output_dir: Path) -> None:
    """Restore a checkpoint that a second save of the same step renamed before it was killed."""
    for path in _leftovers(output_dir, _REPLACED):
        if not (final := path.with_suffix("")).exists():
            path.rename(final)


def _leftovers(output_dir: Path, suffix: str) -> list[Path]:
    """List the checkpoint folders with this suffix that killed saves left behind."""
    return [path for path in output_dir.glob(f"checkpoint-*{suffix}") if _NAME.fullmatch(path.stem)]


def _publish(scratch: Path, final: Path, files: dict[str, Entry]) -> None:
    """Write the manifest and rename the folder, on rank 0."""
    for path in sorted(scratch.rglob("*")):  # files that DeepSpeed copied
        name = path.relative_to(scratch).as_posix()
        if path.is_file() and name not in files:
            files[name] = flush_and_hash(path)
    for name, entry in files.items():
        if (size := (scratch / name).stat().st_size) != entry["bytes"]:
            raise OSError(f"{name} has {size} bytes, but {entry['bytes']} were written")
    step = step_of(final)
    manifest = {"step": step, "files": files, "sha256": digest(step, files)}
    content = json.dumps(manifest, indent=1).encode()
    write_file(scratch / MANIFEST, lambda file: file.write(content))
    for folder in {parent for name in files for parent in (scratch / name).parents if parent.is_relative_to(scratch)}:
        flush(folder)
    replaced = final.with_suffix(_REPLACED)
    if final.exists():
        final.rename(replaced)  # recover() undoes this after a kill
    scratch.rename(final)
    flush(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)  # the next save retries after an error


def digest(step: int, files: dict[str, Entry]) -> str:
    """Return the SHA-256 of a manifest's step and files."""
    return hashlib.sha256(json.dumps([step, files], sort_keys=True).encode()).hexdigest()


def _delete(path: Path) -> None:
    """Delete a checkpoint. It is renamed first, so that a partly deleted folder does not count as a checkpoint."""
    try:
        away = path.with_suffix(_DELETED)
        path.rename(away)
        shutil.rmtree(away)
    except OSError as error:
        print(f"WARNING: could not completely delete {described(path, error)}", flush=True)


def _act_on_first(scratch: Path, act: Callable[[], None], ranks: Ranks) -> None:
    """Call `act` on rank 0. Raises SaveFailed on every rank if it raises OSError."""
    problem = None
    if ranks.is_first:
        try:
            act()
        except OSError as error:
            problem = described(_relative(error.filename, scratch), error)
    _gather_values(problem, ranks)


def _relative(path: str | None, scratch: Path) -> str:
    with contextlib.suppress(ValueError, TypeError):
        return str(Path(path).relative_to(scratch.parent))
    return str(path or scratch.name)


def _gather_values(problem: str | None, ranks: Ranks, value: object = None) -> list:
    """Return the values of all ranks. Raises SaveFailed on all ranks if one of them has a problem."""
    found = gather((socket.gethostname(), problem, value), ranks)
    met = [f"rank {rank} on {host}: {text}" for rank, (host, text, _) in enumerate(found) if text is not None]
    if met:
        raise SaveFailed("; ".join(met[:3]) + (f"; and {len(met) - 3} more ranks" if len(met) > 3 else ""))
    return [value for _, _, value in found]
