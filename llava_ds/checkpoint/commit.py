"""Commit a checkpoint: it exists when its folder has a manifest and every file matches the manifest.

All ranks write to a temporary folder; each flushes and hashes its own files. When all files are on the disk, rank 0
writes the manifest and renames the folder. Whatever kills a rank at any moment, the newest complete checkpoint is the
previous one or the new one. Nothing is deleted before a newer one is complete.
"""

import contextlib
import hashlib
import heapq
import json
import os
import re
import shutil
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from llava_ds.constants import DataError
from llava_ds.files.reading import read_json
from llava_ds.files.writing import Entry, damage, described, flush, flush_and_hash, write_file
from llava_ds.runtime.ranks import Ranks, gather, local_ranks

MANIFEST = "manifest.json"
TRAINER = "trainer.json"
HASHING_THREADS = 8
_WRITER = re.compile(r"(?:rank_|random-|layout-)([0-9]{1,6})")  # in the name of a rank's file
_NAME = re.compile(r"checkpoint-([0-9]{1,18})")
# Suffixes of folders that don't count as checkpoints.
_UNFINISHED, _REPLACED, _DELETED = ".tmp", ".replaced", ".deleted"


class _Entry(TypedDict):
    bytes: Annotated[int, Field(ge=0)]
    sha256: str


class Manifest(TypedDict):
    """sha256: of step and files."""

    step: Annotated[int, Field(ge=0)]
    files: dict[str, _Entry]
    sha256: str


class SaveFailed(Exception):
    """No checkpoint was made, on any rank. The text names the ranks, the files and the remedy."""


def begin(output_dir: Path, step: int, ranks: Ranks) -> Path:
    """Create an empty temporary folder for the checkpoint of a step. Raises SaveFailed on all ranks.

    Folders of unfinished saves are removed, because their space may be needed.
    """
    scratch = output_dir / f"checkpoint-{step}{_UNFINISHED}"

    def make() -> None:
        recover(output_dir)
        for suffix in (_UNFINISHED, _REPLACED, _DELETED):
            for path in _beside(output_dir, suffix):
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

    best: a checkpoint to keep instead of the oldest kept one; the newest one is always kept.
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


def problem_with(checkpoint: Path, hashed: bool = True) -> str | None:
    """Return the reason why a folder is not a complete checkpoint, or None. hashed: read and hash every file."""
    try:
        files = read_manifest(checkpoint)
    except FileNotFoundError:
        return f"it has no {MANIFEST}, so the save did not finish"
    except DataError as error:
        return f"its {MANIFEST} can't be read ({error})"
    found = _first_damage(checkpoint, files, hashed)
    return found and found[1]


def shared_damage(checkpoint: Path, files: dict[str, Entry], ranks: Ranks) -> str | None:
    """Return the same as problem_with for these files; every rank reads and hashes a share. Collective."""
    mine = {name: files[name] for name in shares(files, ranks.world_size)[ranks.rank]}
    found = [each for each in gather(_first_damage(checkpoint, mine), ranks) if each is not None]
    order = list(files)
    return min(found, key=lambda each: order.index(each[0]))[1] if found else None


def shares(files: dict[str, Entry], num_ranks: int) -> list[list[str]]:
    """Divide files over ranks: each gets its own (it reads them when it restores); others are divided by size."""
    shared: list[list[str]] = [[] for _ in range(num_ranks)]
    loads, rest = [0] * num_ranks, []
    for name, entry in files.items():
        writer = _WRITER.search(PurePosixPath(name).name)
        if writer is None or int(writer[1]) >= num_ranks:
            rest.append(name)
        else:
            shared[int(writer[1])].append(name)
            loads[int(writer[1])] += entry["bytes"]
    least = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(least)
    for name in sorted(rest, key=lambda name: -files[name]["bytes"]):
        load, rank = least[0]
        shared[rank].append(name)
        heapq.heapreplace(least, (load + files[name]["bytes"], rank))
    return shared


def read_manifest(checkpoint: Path) -> dict[str, Entry]:
    """Read the file entries of a checkpoint. Raises FileNotFoundError, and DataError for an invalid manifest."""
    if (checkpoint / MANIFEST).is_symlink():
        raise DataError("it is a link")
    manifest = read_json(checkpoint / MANIFEST, Manifest)
    step, files = manifest["step"], manifest["files"]
    if manifest["sha256"] != _digest(step, files):
        raise DataError("it has changed since it was written")
    named = step_in_name(checkpoint)
    if named is not None and named != step:
        raise DataError(f"it belongs to step {step}")
    for name in files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise DataError(f"it names {name[:200]!r}, outside the checkpoint")
    return {name: {"bytes": entry["bytes"], "sha256": entry["sha256"]} for name, entry in files.items()}


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


def newest_whole(
    output_dir: Path, problem_of: Callable[[Path], str | None] = problem_with
) -> tuple[Path | None, list[str]]:
    """Find the newest checkpoint that verifies, with a line for every newer one that does not.

    problem_of: returns the reason why a folder can't be used, or None.
    """
    recover(output_dir)
    refused = []
    for path in checkpoints(output_dir):
        problem = problem_of(path)
        if problem is None:
            return path, refused
        refused.append(f"{path.name} is not used: {problem}")
    return None, refused


def recover(output_dir: Path) -> None:
    """Restore a checkpoint that a newer save of the same step had moved away before it was killed."""
    for path in _beside(output_dir, _REPLACED):
        if not (final := path.with_suffix("")).exists():
            path.rename(final)


def _beside(output_dir: Path, suffix: str) -> list[Path]:
    """List the folders with such a suffix that killed saves left."""
    return [path for path in output_dir.glob(f"checkpoint-*{suffix}") if _NAME.fullmatch(path.stem)]


def _publish(scratch: Path, final: Path, files: dict[str, Entry]) -> None:
    """Write the manifest and rename the folder, on rank 0."""
    for path in sorted(scratch.rglob("*")):  # files that DeepSpeed copied there
        name = path.relative_to(scratch).as_posix()
        if path.is_file() and name not in files:
            files[name] = flush_and_hash(path)
    for name, entry in files.items():
        if (size := (scratch / name).stat().st_size) != entry["bytes"]:
            raise OSError(f"{name} has {size} bytes, but {entry['bytes']} were written")
    step = step_of(final)
    manifest = {"step": step, "files": files, "sha256": _digest(step, files)}
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


def _digest(step: int, files: dict[str, Entry]) -> str:
    return hashlib.sha256(json.dumps([step, files], sort_keys=True).encode()).hexdigest()


def _first_damage(checkpoint: Path, files: dict[str, Entry], hashed: bool = True) -> tuple[str, str] | None:
    """Return the name of the first damaged file, and its damage."""

    def look(item: tuple[str, Entry]) -> tuple[str, str] | None:
        problem = damage(checkpoint, *item, hashed)
        return problem and (item[0], problem)

    with ThreadPoolExecutor(max(1, min(HASHING_THREADS, (os.cpu_count() or 1) // local_ranks()))) as pool:
        found = pool.map(look, files.items())
        first = next((each for each in found if each is not None), None)
        pool.shutdown(wait=False, cancel_futures=True)
    return first


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
