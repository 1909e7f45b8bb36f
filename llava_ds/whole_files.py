"""Files that are there whole or not at all."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, content: str | Callable[[Path], object], shared: bool = False) -> None:
    """Write a file anew, in one rename: whoever reads it, after a kill too, finds all of the old one or of the new one.

    content: its text, or what writes it to a path that it is given; shared: whether other processes may write the same
    file at the same time. Nothing is flushed to the disk. Raises OSError and what content raises, with the old file as
    it was.
    """
    # One name for all starts of a run, so that the next overwrites what a kill has left.
    mark = f".{os.getpid()}" if shared else ""
    scratch = path.with_name(f".{path.name}{mark}.tmp")
    try:
        if isinstance(content, str):
            scratch.write_text(content, encoding="utf-8")
        else:
            content(scratch)
        os.replace(scratch, path)
    except BaseException:
        with contextlib.suppress(OSError):  # of a folder that is not there, or can't be written to
            scratch.unlink()
        raise
