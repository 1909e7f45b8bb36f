"""Inspect the main thread from the watchdog's thread: its current line, its progress, and all threads' stacks."""

import contextlib
import faulthandler
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import psutil

from llava_ds.runtime.output import printable
from llava_ds.runtime.redact import redact
from llava_ds.runtime.waiting import QUEUE, waits_for

OURS = f"{Path(__file__).resolve().parents[1]}{os.sep}"  # the package's folder, to find the innermost frame of our code
WRITING_S = 10.0  # maximum time to write stacks or a message, because the disk itself may hang
LEAST_CPU = 0.05  # minimum fraction of a core that counts as activity; the watchdog itself uses less
LEAST_BYTES = 1_000_000  # minimum bytes between two calls that count as activity; the watchdog itself transfers less


class Activity:
    """Measures processor time and file traffic of this process and its children.

    on_gpu: True to ignore this process's own processor time, because CUDA and NCCL spin while waiting.
    """

    def __init__(self, on_gpu: bool = False) -> None:
        self._process, self._on_gpu = psutil.Process(), on_gpu
        self._before = self._used()

    def goes_on(self, elapsed_s: float) -> bool:
        """Return True if this process and its children did more than an idle process since the last call.

        They then make progress even if the main thread stays at one line, in a long call or waiting for workers.
        elapsed_s: seconds since the last call.
        """
        now = self._used()
        cpu_s, size = (new - old for new, old in zip(now, self._before))
        self._before = now
        return cpu_s > LEAST_CPU * elapsed_s or size > LEAST_BYTES

    def _used(self) -> tuple[float, int]:
        cpu_s, size = 0.0, 0
        with contextlib.suppress(psutil.Error):
            for process in (self._process, *self._process.children(recursive=True)):
                with contextlib.suppress(psutil.Error, OSError, AttributeError):  # it ended, or is hidden here
                    if not (self._on_gpu and process is self._process):
                        times = process.cpu_times()
                        cpu_s += times.user + times.system
                    counted = process.io_counters()
                    size += max(counted.read_chars, counted.read_bytes) + counted.write_chars
        return cpu_s, size


class Sight(NamedTuple):
    """The state of a thread at one moment.

    where: its innermost line, and the innermost line of our code. waits: True if it is in a collective or marked as
    waiting. queues: True if it is queuing work for the device. key: position of every frame; differs after progress.
    """

    where: str = ""
    waits: bool = False
    queues: bool = False
    key: tuple = ()


def look_at(frame: FrameType | None, thread: threading.Thread) -> Sight:
    """Return the state of a thread. frame: its innermost frame, or None."""
    if frame is None:
        return Sight()
    mark = waits_for(thread)
    innermost, key, own = frame, [], None
    while frame is not None:
        key.append((id(frame.f_code), frame.f_lasti))
        is_ours = frame.f_code.co_filename.startswith(OURS) or frame.f_globals.get("__name__") == "__main__"
        if own is None and is_ours:
            own = frame
        frame = frame.f_back
    file = innermost.f_code.co_filename
    in_collective = f"torch{os.sep}distributed{os.sep}" in file or (
        # DeepSpeed waits for its asynchronous work in methods of this name.
        f"{os.sep}deepspeed{os.sep}" in file and innermost.f_code.co_name == "wait"
    )
    lines = [_line(each) for each in (own, innermost) if each is not None]
    where = " in ".join(dict.fromkeys(reversed(lines)))
    marked = mark not in ("", QUEUE)
    return Sight(f"{where} for {mark}" if marked else where, in_collective or marked, mark == QUEUE, tuple(key))


def _line(frame: FrameType) -> str:
    parts = Path(frame.f_code.co_filename).parts
    return f"{'/'.join(parts[-2:])}:{frame.f_lineno} ({frame.f_code.co_name})"


def within(seconds: float, write: Callable[[], None]) -> None:
    """Call `write` in a thread, and wait for it at most `seconds`, because the disk may hang."""

    def quietly() -> None:
        with contextlib.suppress(OSError, ValueError, IndexError, StopIteration, KeyError):
            write()

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(seconds)


def say(text: str) -> None:
    """Print to stderr without Python's buffers, whose lock the main thread may hold."""
    line = f"\n{printable(redact(text), keep=chr(10))}\n"  # the progress bar has not ended its line
    within(WRITING_S, lambda: os.write(2, line.encode()))


def dump_stacks(path: Path, heading: str, name: str) -> None:
    """Write all threads' stacks to a file under a heading; to stderr if the file can't be written.

    name: this rank's name in the message.
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
    """Disable garbage collection within the block.

    Up to CPython 3.11, a collection during sys._current_frames() may let another thread run and free the frame that is
    being read (CPython issue 106883).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def frozen_gc(collect: bool = True) -> Iterator[None]:
    """Exclude all existing objects from garbage collection within the block.

    Libraries create about 300,000 objects. Each full collection takes 0.1 s to traverse them, in forked processes too.
    collect: collect garbage first; otherwise existing garbage stays in memory until the end of the block.
    """
    if collect:
        gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
