"""Marks of a thread that waits for the device or for other ranks, for the watchdog, which sees its place only.

Under NCCL a rank does not wait where it joins a collective, but in the first reading of the device after it; in C,
where CUDA spins: no Python line and no use of the processor tells such a wait from work.
"""

import contextlib
import threading
from collections.abc import Iterator

QUEUE = "room in the device's queue"
_MARK, _PROGRESS = "llava_ds_waits_for", "llava_ds_progress"  # attributes of the thread


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Mark this thread as waiting for something that the device or another rank gives."""
    thread = threading.current_thread()
    before = waits_for(thread)
    setattr(thread, _MARK, what)
    try:
        yield
    finally:
        setattr(thread, _MARK, before)


def queuing() -> contextlib.AbstractContextManager[None]:
    """Mark this thread as queuing work for the device: if it stands still on a GPU, the queue is probably full."""
    return waiting(QUEUE)


def note_progress() -> None:
    """Note that what this thread waits for goes on, in other processes."""
    thread = threading.current_thread()
    setattr(thread, _PROGRESS, noted_progress(thread) + 1)


def noted_progress(thread: threading.Thread) -> int:
    """The number of a thread's calls of note_progress."""
    return getattr(thread, _PROGRESS, 0)


def waits_for(thread: threading.Thread) -> str:
    """The innermost mark of a thread; "" for none."""
    return getattr(thread, _MARK, "")
