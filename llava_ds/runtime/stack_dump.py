"""What a process says of itself while its main thread hangs, or the disk does."""

import contextlib
import faulthandler
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from llava_ds.runtime.ranks import printable
from llava_ds.runtime.redact import redact

WRITING_S = 10.0  # for stacks and messages: the disk may be what hangs


def within(seconds: float, write: Callable[[], None]) -> None:
    """Do it, but wait no longer than this: what hangs a run may be the disk that it would be written to."""

    def quietly() -> None:
        with contextlib.suppress(OSError, ValueError, IndexError, StopIteration, KeyError):
            write()

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(seconds)


def say(text: str) -> None:
    """Print, past the buffers that a main thread may hold locked."""
    line = f"\n{printable(redact(text), keep=chr(10))}\n"  # the progress bar leaves its line open
    within(WRITING_S, lambda: os.write(2, line.encode()))


def dump_stacks(path: Path, heading: str, name: str) -> None:
    """Write all threads' stacks to a file under a heading; to the error stream where it can't be written.

    name: of this rank.
    """

    def write() -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w", encoding="utf-8") as file:
                file.write(f"{heading}\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            say(f"{path} can't be written ({error}): the stacks of {name} follow")
            faulthandler.dump_traceback(sys.__stderr__, all_threads=True)

    within(WRITING_S, write)


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Within it no garbage is collected.

    Up to CPython 3.11 that may happen while a frame object of another thread is made, and may let that thread go on,
    whose frame is then gone (see CPython's issue 106883).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
