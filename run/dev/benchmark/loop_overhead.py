"""Cost of the training loop beside the engine that it drives: run/train.py up to its loop, then both in turns.

Started by the deepspeed launcher: loop_overhead.py FILE.json run/train.py FLAGS. The last of --max_steps is trained
as usual, the others are what is repeated.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator

import torch
from benchmark.profiled import own_arguments, run_changed

from llava_ds.batch import Batch
from llava_ds.data.loader import Window
from llava_ds.train import loop
from llava_ds.train.state import TrainState

STEPS, ROUNDS = 2, 5  # of a round; the rounds


def main() -> None:
    def change(report: dict[str, object]) -> None:
        loop.run_steps = measured_before(loop.run_steps, report)

    run_changed(own_arguments(), change)


def measured_before(run_steps: Callable[..., None], report: dict[str, object]) -> Callable[..., None]:
    """The training loop for its last step, after a measurement on the windows before that."""

    def run(engine, windows, state, num_steps, objective, mesh, after_step) -> None:
        repeated = list(itertools.islice(windows, num_steps - 1))

        def ours(batches: Iterator[Window]) -> None:
            run_steps(engine, batches, TrainState(), STEPS, objective, mesh, lambda result: 0.0)

        report.update(measure_overhead(engine, repeated, ours))
        state.step = num_steps - 1
        run_steps(engine, windows, state, num_steps, objective, mesh, after_step)

    return run


def measure_overhead(engine, windows: list[Window], loop: Callable[[Iterator[Window]], None]) -> dict[str, float]:
    """The time of optimizer steps in our loop over that in a bare one over the same batches: medians of alternating
    rounds, in seconds a step, and their ratio.

    windows: prepared, on the device, of equally many micro-batches; they are repeated. Loading data, logging and
    saving are on neither side. The engine trains meanwhile. All ranks call it together.
    """
    batches = [batch for window in windows for batch in window.batches]
    per_step = len(batches) // len(windows)
    times: dict[str, list[float]] = {"bare": [], "loop": []}
    for turn in range(ROUNDS + 1):
        for name in ("bare", "loop") if turn % 2 else ("loop", "bare"):
            _wait()
            started = time.perf_counter()
            if name == "bare":
                _bare(engine, itertools.islice(itertools.cycle(batches), STEPS * per_step), per_step)
            else:
                loop(itertools.cycle(windows))
            _wait()
            if turn:  # the first is warm-up
                times[name].append((time.perf_counter() - started) / STEPS)
    ratios = [ours / theirs for ours, theirs in zip(times["loop"], times["bare"])]
    return {
        "bare_step_s": statistics.median(times["bare"]),
        "loop_step_s": statistics.median(times["loop"]),
        "overhead": statistics.median(ratios) - 1,
        "overhead_least": min(ratios) - 1,
        "overhead_most": max(ratios) - 1,
    }


def _bare(engine, batches: Iterable[Batch], per_step: int) -> None:
    for index, batch in enumerate(batches):
        engine.set_gradient_accumulation_boundary((index + 1) % per_step == 0)
        engine.backward(engine(batch))
        engine.step()


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
