"""Marks on a thread that waits for the device or for other ranks, read by the watchdog.

Under NCCL a rank does not wait where it joins a collective, but at the next read from the device: in C, where CUDA
spins. Neither the Python line nor processor time distinguishes such a wait from work.
"""

import contextlib
import threading
from collections.abc import Iterator

QUEUE = "room in the device's queue"
_MARK, _PROGRESS = "llava_ds_waits_for", "llava_ds_progress"  # attributes of the thread


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Mark this thread as waiting for something from the device or another rank."""
    thread = threading.current_thread()
    before = waits_for(thread)
    setattr(thread, _MARK, what)
    try:
        yield
    finally:
        setattr(thread, _MARK, before)


def queuing() -> contextlib.AbstractContextManager[None]:
    """Mark this thread as queuing work for the device: if it hangs on a GPU, the queue is probably full."""
    return waiting(QUEUE)


def note_progress() -> None:
    """Record that the other processes that this thread waits for have made progress."""
    thread = threading.current_thread()
    setattr(thread, _PROGRESS, noted_progress(thread) + 1)


def noted_progress(thread: threading.Thread) -> int:
    """Return the number of times a thread called note_progress."""
    return getattr(thread, _PROGRESS, 0)


def waits_for(thread: threading.Thread) -> str:
    """Return the innermost mark of a thread; "" for none."""
    return getattr(thread, _MARK, "")
