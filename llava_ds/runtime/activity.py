"""Whether a process gets on though its main thread stays at one line: in a long call, or waiting for its workers."""

import contextlib

import psutil

LEAST_CPU = 0.05  # of a core: what the watchdog itself takes stays below
LEAST_BYTES = 1_000_000  # read or written between two looks: likewise


class Activity:
    """What this process and those that it started have used so far: processor time, and bytes of files."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._before = self._used()

    def goes_on(self, elapsed_s: float) -> bool:
        """Whether more was used since the last look, elapsed_s ago, than by a process that only waits."""
        now = self._used()
        cpu_s, size = (new - old for new, old in zip(now, self._before))
        self._before = now
        return cpu_s > LEAST_CPU * elapsed_s or size > LEAST_BYTES

    def _used(self) -> tuple[float, int]:
        cpu_s, size = 0.0, 0
        with contextlib.suppress(psutil.Error):
            for process in (self._process, *self._process.children(recursive=True)):
                with contextlib.suppress(psutil.Error, OSError, AttributeError):  # gone, or not counted here
                    times = process.cpu_times()
                    cpu_s += times.user + times.system
                    counted = process.io_counters()
                    size += max(counted.read_chars, counted.read_bytes) + counted.write_chars
        return cpu_s, size
