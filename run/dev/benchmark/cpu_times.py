"""Processor time of every optimizer step, of all ranks and threads: steadier than seconds where others work, too."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path


class CpuTimes:
    """A process's clock: tick() when training begins and after every step, then write()."""

    def __init__(self) -> None:
        self._ticks: list[float] = []

    def tick(self) -> None:
        self._ticks.append(time.process_time())

    def write(self, folder: Path) -> None:
        """Write this rank's file."""
        steps = [after - before for before, after in zip(self._ticks, self._ticks[1:])]
        (folder / f"cpu-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(steps), encoding="utf-8")


def counted(run_steps: Callable[..., None], folder: Path) -> Callable[..., None]:
    """The loop of run/train.py with such a clock."""

    def run(*before: object) -> None:
        *before, after_step = before
        times = CpuTimes()

        def after(result) -> object:
            found = after_step(result)
            times.tick()
            return found

        times.tick()
        run_steps(*before, after)
        times.write(folder)

    return run


def read_cpu_times(folder: Path) -> list[float]:
    """Seconds of every step, of all ranks together."""
    ranks = [json.loads(file.read_text()) for file in sorted(folder.glob("cpu-*.json"))]
    return [sum(steps) for steps in zip(*ranks, strict=True)]
