"""Marks for threads that wait for the device or for other ranks. The watchdog reads them.

With NCCL, a rank waits for a collective not when it joins it, but at the next read from the device, in C code that
spins. Neither the Python line nor processor time distinguishes such a wait from work.
"""

import contextlib
import threading
from collections.abc import Iterator

QUEUE = "room in the device's queue"
_MARK, _PROGRESS = "llava_ds_waits_for", "llava_ds_progress"  # attributes of the thread


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Mark this thread as waiting for the device or another rank within the block. what: shown in messages."""
    thread = threading.current_thread()
    before = waits_for(thread)
    setattr(thread, _MARK, what)
    try:
        yield
    finally:
        setattr(thread, _MARK, before)


def queuing() -> contextlib.AbstractContextManager[None]:
    """Mark this thread as queuing work for the device. If it then hangs, the GPU's queue is probably full."""
    return waiting(QUEUE)


def note_progress() -> None:
    """Record progress of the processes that this thread waits for."""
    thread = threading.current_thread()
    setattr(thread, _PROGRESS, noted_progress(thread) + 1)


def noted_progress(thread: threading.Thread) -> int:
    """Return the number of times a thread called note_progress."""
    return getattr(thread, _PROGRESS, 0)


def waits_for(thread: threading.Thread) -> str:
    """Return the innermost mark of a thread; "" for none."""
    return getattr(thread, _MARK, "")
