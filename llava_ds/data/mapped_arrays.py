"""Arrays in files that all processes of a machine map, so that memory holds them once.

A folder of arrays is published by one rename, like a generation of the cache. The folder's name encodes everything that
the arrays depend on, so its contents never change and any process may write it.
"""

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llava_ds.data.cache import cache_scratch, put_in_place
from llava_ds.runtime.ranks import print_first

FACTS = "facts.json"
UNUSED_S = 30 * 24 * 3600.0  # arrays that weren't opened for this long are deleted


@dataclass(frozen=True)
class Mapped:
    """Read-only arrays by name, and JSON facts about them."""

    arrays: dict[str, np.ndarray]
    facts: dict[str, object]


def mapped(folder: Path, make: Callable[[], Mapped]) -> Mapped:
    """Map the arrays of a folder. If it is missing, one process creates it while the others wait.

    If the folder can't be written, every process keeps its own arrays in memory, and a message says so.
    """
    found = _opened(folder)
    if found is not None:
        return found
    made = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder):
            if _opened(folder) is None:
                made = make()
                _write(folder, made)
    except OSError as error:
        print_first(f"{folder}: can't be written ({error.strerror}): every process keeps arrays of its own in memory")
    return _opened(folder) or made or make()


def remove_unused(parent: Path) -> None:
    """Delete folders of arrays that nobody opened for a month."""
    for folder in parent.glob("*/"):
        with contextlib.suppress(OSError):  # another process may be deleting it now
            if time.time() - (folder / FACTS).stat().st_mtime > UNUSED_S:
                shutil.rmtree(folder)


def _opened(folder: Path) -> Mapped | None:
    """Map the arrays of a folder; None if it is missing or truncated."""
    try:
        facts = json.loads((folder / FACTS).read_bytes())
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in facts["arrays"]}
    except (OSError, EOFError, ValueError, KeyError, TypeError):
        return None
    with contextlib.suppress(OSError):
        os.utime(folder / FACTS)  # marks the folder as used, for remove_unused
    return Mapped(arrays, facts["facts"])


def _write(folder: Path, made: Mapped) -> None:
    with cache_scratch(folder) as scratch:
        for name, array in made.arrays.items():
            with open(scratch / f"{name}.npy", "wb") as file:
                np.save(file, array)
                file.flush()
                os.fsync(file.fileno())
        facts = {"arrays": sorted(made.arrays), "facts": made.facts}
        (scratch / FACTS).write_text(json.dumps(facts), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)  # if it is truncated
        put_in_place(scratch, folder)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process makes the same folder. On file systems without locks it may be made twice."""
    with open(folder.with_name(f"{folder.name}.lock"), "wb") as lock:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
