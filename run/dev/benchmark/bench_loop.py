"""What the training loop costs beside the engine that it drives."""

import itertools
import statistics
import time
from collections.abc import Iterable

import torch

from llava_ds.batch import Batch
from llava_ds.data.loader import Window
from llava_ds.runtime.mesh import Mesh
from llava_ds.runtime.ranks import Ranks
from llava_ds.train.loop import run_steps
from llava_ds.train.objectives.sft import SFT
from llava_ds.train.state import TrainState


def measure_loop_overhead(
    engine, windows: list[Window], ranks: Ranks, *, num_steps: int = 10, rounds: int = 7
) -> dict[str, float]:
    """The time of optimizer steps in our loop over that in a bare one over the same batches: medians of alternating
    rounds of num_steps each, in seconds a step, and their ratio.

    windows: prepared, on the device, of equally many micro-batches; they are repeated. Loading data, logging and
    saving are on neither side. The engine trains meanwhile. All ranks call it together.
    """
    batches = [batch for window in windows for batch in window.batches]
    times: dict[str, list[float]] = {"bare": [], "loop": []}
    per_step, mesh = len(batches) // len(windows), Mesh.of(ranks)
    objective = SFT(grad_ranks=mesh.grad_ranks)
    for turn in range(rounds + 1):
        for name in ("bare", "loop") if turn % 2 else ("loop", "bare"):
            _wait(ranks)
            started = time.perf_counter()
            if name == "bare":
                _bare(engine, itertools.islice(itertools.cycle(batches), num_steps * per_step), per_step)
            else:
                run_steps(
                    engine, itertools.cycle(windows), TrainState(), num_steps, objective, mesh, lambda result: 0.0
                )
            _wait(ranks)
            if turn:  # the first is warm-up
                times[name].append((time.perf_counter() - started) / num_steps)
    bare_s, loop_s = (statistics.median(times[name]) for name in ("bare", "loop"))
    ratios = [ours / theirs for ours, theirs in zip(times["loop"], times["bare"])]
    return {
        "bare_step_s": bare_s,
        "loop_step_s": loop_s,
        "overhead": statistics.median(ratios) - 1,
        "overhead_least": min(ratios) - 1,
        "overhead_most": max(ratios) - 1,
    }


def _bare(engine, batches: Iterable[Batch], per_step: int) -> None:
    for index, batch in enumerate(batches):
        engine.set_gradient_accumulation_boundary((index + 1) % per_step == 0)
        loss = engine(batch)
        engine.backward(loss)
        engine.step()


def _wait(ranks: Ranks) -> None:
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)
