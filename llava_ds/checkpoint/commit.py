"""Commit a checkpoint: it exists when its folder has a manifest and every file matches the manifest.

All ranks write to a temporary folder; each flushes and hashes its own files. When all files are on the disk, rank 0
writes the manifest and renames the folder. Whatever kills a rank at any moment, the newest complete checkpoint is the
previous one or the new one. Nothing is deleted before a newer one is complete.
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
    """No checkpoint was made, on any rank. The text names the ranks, the files and the remedy."""


def begin(output_dir: Path, step: int, ranks: Ranks) -> Path:
    """Create an empty temporary folder for the checkpoint of a step. Raises SaveFailed on all ranks.

    Removes folders of unfinished saves, because their space may be needed.
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

    written: this rank's files, as paths relative to the folder; problem: the reason why some are missing. Returns the
    final path. If a rank has a problem, removes the folder and raises SaveFailed on every rank.
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
    """Keep only the newest checkpoints, on rank 0; None keeps all.

    best: a checkpoint to keep in exchange for the oldest kept one; the newest one is always kept.
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
    """Return the step in a folder's name, links resolved; None for other names."""
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
    """Restore a checkpoint that a newer save of the same step had moved away before it was killed."""
    for path in _leftovers(output_dir, _REPLACED):
        if not (final := path.with_suffix("")).exists():
            path.rename(final)


def _leftovers(output_dir: Path, suffix: str) -> list[Path]:
    """List the leftover folders of killed saves."""
    return [path for path in output_dir.glob(f"checkpoint-*{suffix}") if _NAME.fullmatch(path.stem)]


def _publish(scratch: Path, final: Path, files: dict[str, Entry]) -> None:
    """Write the manifest and rename the folder, on rank 0."""
    for path in sorted(scratch.rglob("*")):  # DeepSpeed copied files there
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
        final.rename(replaced)  # if a kill follows, recover() brings it back
    scratch.rename(final)
    flush(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)  # the next save removes the rest


def digest(step: int, files: dict[str, Entry]) -> str:
    """Hash the entries of a manifest."""
    return hashlib.sha256(json.dumps([step, files], sort_keys=True).encode()).hexdigest()


def _delete(path: Path) -> None:
    """Remove a checkpoint: after the rename it no longer counts as one."""
    try:
        away = path.with_suffix(_DELETED)
        path.rename(away)
        shutil.rmtree(away)
    except OSError as error:
        print(f"WARNING: could not completely delete {described(path, error)}", flush=True)


def _act_on_first(scratch: Path, act: Callable[[], None], ranks: Ranks) -> None:
    """Let rank 0 act on files, and raise its error on every rank."""
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
    """Gather every rank's value. Raises SaveFailed on all ranks if one of them has a problem."""
    found = gather((socket.gethostname(), problem, value), ranks)
    met = [f"rank {rank} on {host}: {text}" for rank, (host, text, _) in enumerate(found) if text is not None]
    if met:
        raise SaveFailed("; ".join(met[:3]) + (f"; and {len(met) - 3} more ranks" if len(met) > 3 else ""))
    return [value for _, _, value in found]
