"""Verify a checkpoint's files against its manifest. The ranks can divide the files among them."""

import heapq
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from llava_ds.checkpoint.commit import MANIFEST, checkpoints, digest, recover, step_in_name
from llava_ds.constants import DataError
from llava_ds.files.reading import read_json
from llava_ds.files.writing import Entry, damage
from llava_ds.runtime.ranks import Ranks, gather, local_ranks

HASHING_THREADS = 8
_WRITER = re.compile(r"(?:rank_|random-|layout-)([0-9]{1,6})")  # in the names of files that one rank writes


class _Entry(TypedDict):
    bytes: Annotated[int, Field(ge=0)]
    sha256: str


class Manifest(TypedDict):
    """Schema of a manifest. sha256: digest of step and files."""

    step: Annotated[int, Field(ge=0)]
    files: dict[str, _Entry]
    sha256: str


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
    """Return the first damage in a checkpoint's files, or None. Every rank reads and hashes a share. Collective."""
    mine = {name: files[name] for name in shares(files, ranks.world_size)[ranks.rank]}
    found = [each for each in gather(_first_damage(checkpoint, mine), ranks) if each is not None]
    order = list(files)
    return min(found, key=lambda each: order.index(each[0]))[1] if found else None


def shares(files: dict[str, Entry], num_ranks: int) -> list[list[str]]:
    """Divide files over ranks: a rank gets the files it wrote, because it will load them; others go by size."""
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
    """Read a manifest's file entries. Raises FileNotFoundError if it is missing, and DataError if it is invalid."""
    if (checkpoint / MANIFEST).is_symlink():
        raise DataError("it is a link")
    manifest = read_json(checkpoint / MANIFEST, Manifest)
    step, files = manifest["step"], manifest["files"]
    if manifest["sha256"] != digest(step, files):
        raise DataError("it has changed since it was written")
    named = step_in_name(checkpoint)
    if named is not None and named != step:
        raise DataError(f"it belongs to step {step}")
    for name in files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise DataError(f"it names {name[:200]!r}, outside the checkpoint")
    return {name: {"bytes": entry["bytes"], "sha256": entry["sha256"]} for name, entry in files.items()}


def newest_whole(
    output_dir: Path, problem_of: Callable[[Path], str | None] = problem_with
) -> tuple[Path | None, list[str]]:
    """Return the newest usable checkpoint (None if there is none), and a line about each newer one.

    problem_of: maps a folder to the reason why it can't be used, or None.
    """
    recover(output_dir)
    refused = []
    for path in checkpoints(output_dir):
        problem = problem_of(path)
        if problem is None:
            return path, refused
        refused.append(f"{path.name} is not used: {problem}")
    return None, refused


def _first_damage(checkpoint: Path, files: dict[str, Entry], hashed: bool = True) -> tuple[str, str] | None:
    """Return the name of the first damaged file and a description of the damage; None if all files are intact."""

    def look(item: tuple[str, Entry]) -> tuple[str, str] | None:
        problem = damage(checkpoint, *item, hashed)
        return problem and (item[0], problem)

    with ThreadPoolExecutor(max(1, min(HASHING_THREADS, (os.cpu_count() or 1) // local_ranks()))) as pool:
        found = pool.map(look, files.items())
        first = next((each for each in found if each is not None), None)
        pool.shutdown(wait=False, cancel_futures=True)
    return first
