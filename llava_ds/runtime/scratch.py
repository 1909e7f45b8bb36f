"""Scratch folders among a user's files. A new one removes those that killed processes left."""

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from llava_ds.runtime.output_lock import Process

OTHERS_AGE_S = 24 * 3600  # another machine's folder counts as abandoned after this time without a write
_STAMP = re.compile(r"([0-9a-f]{12})-(\d{1,10})-(\d{1,12})-")


@contextlib.contextmanager
def scratch_folder(prefix: str, parent: Path) -> Iterator[Path]:
    """Create a folder in `parent`, and delete it at the end of the block. Its name begins with the prefix.

    First deletes abandoned folders with this prefix: their process has ended, or nothing was written for a day. Raises
    OSError if the folder can't be created.
    """
    _remove_leftovers(prefix, parent)
    own = Process.current()
    stamp = f"{_machine(own)}-{own.pid}-{int(own.started)}-"
    with tempfile.TemporaryDirectory(prefix=prefix + stamp, dir=parent) as folder:
        yield Path(folder)


def _remove_leftovers(prefix: str, parent: Path) -> None:
    for folder in parent.iterdir():
        if folder.name.startswith(prefix) and folder.is_dir() and not folder.is_symlink():
            with contextlib.suppress(OSError):  # its owner may be deleting it now
                if _is_left(folder, folder.name.removeprefix(prefix)):
                    shutil.rmtree(folder, ignore_errors=True)


def _is_left(folder: Path, rest: str) -> bool:
    """Return True if no process writes to a scratch folder any more. rest: its name without the prefix."""
    own, stamp = Process.current(), _STAMP.match(rest)
    if stamp is not None and stamp[1] == _machine(own):
        return not Process(own.host, own.namespace, int(stamp[2]), float(stamp[3])).is_alive
    written = max(os.lstat(path).st_mtime for path in (folder, *folder.rglob("*")))
    return time.time() - written > OTHERS_AGE_S


def _machine(process: Process) -> str:
    """Return a hash that identifies the PID namespace of a process."""
    return hashlib.sha256((process.namespace or process.host).encode()).hexdigest()[:12]
