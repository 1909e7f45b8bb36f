"""run/train.py up to its loop, which is then measured beside the bare engine.

Started by the deepspeed launcher: loop_overhead.py FILE.json run/train.py FLAGS. The last of --max_steps is trained
as usual, the others are what is repeated.
"""

import itertools
import sys
from collections.abc import Callable
from types import ModuleType

from benchmark.bench_loop import measure_loop_overhead
from benchmark.profiled import run_changed

STEPS, ROUNDS = 2, 5


def main(argv: list[str]) -> None:
    def change(train: ModuleType, report: dict[str, object]) -> None:
        train.train = measured_before(train.train, report)

    run_changed(argv, change)


def measured_before(train: Callable[..., None], report: dict[str, object]) -> Callable[..., None]:
    """The training loop for its last step, after a measurement on the windows before that."""

    def run(engine, windows, state, num_steps, reduction, ranks, after_step) -> None:
        repeated = list(itertools.islice(windows, num_steps - 1))
        report.update(measure_loop_overhead(engine, repeated, ranks, num_steps=STEPS, rounds=ROUNDS))
        state.step = num_steps - 1
        train(engine, windows, state, num_steps, reduction, ranks, after_step)

    return run


if __name__ == "__main__":
    # The launcher puts its own --local_rank first; the environment says it, too.
    main([token for token in sys.argv[1:] if not token.startswith("--local_rank=")])
