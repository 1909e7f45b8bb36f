"""Warm-up of the largest micro-batch: forward and backward with weight zero, before the first step.

If the micro-batch doesn't fit into memory, the run then fails in its first minute, not after hours. The run's numbers
are bit-equal with and without warm-up: if the loss is finite, all gradients are exactly zero; no optimizer step is
taken, random states are restored, and the engine's buffers are cleared.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID, DeepSpeedZeroOptimizer
from torch import nn

from llava_ds.batch import Batch
from llava_ds.data.heaviest import heaviest, most_worked
from llava_ds.data.loader import micro_batches
from llava_ds.data.step_plan import StepPlan
from llava_ds.engine.ds_config.resolve import ResolvedConfig
from llava_ds.engine.runner import Runner
from llava_ds.model.heads import SUMMED, Head
from llava_ds.model.llava import LlavaModel
from llava_ds.runtime.mesh import Mesh
from llava_ds.runtime.ranks import Ranks, broadcast_from_first

STEPS_LOOKED_AT = 20  # number of steps to search for one with several micro-batches


@dataclass(frozen=True)
class LargestMicroBatch:
    """The remaining micro-batch with the most tokens, the same on every rank (see data/heaviest.py).

    samples: indices of its samples in the data set; accumulates: True if steps accumulate the gradients of several
    micro-batches; probe: the objective's probe; most_worked: the micro-batch with the most work, None if it is `batch`.
    """

    batch: Batch
    samples: list[int]
    accumulates: bool
    probe: Head = SUMMED
    most_worked: Batch | None = None

    def summed(self, engine, batch: Batch) -> torch.Tensor:
        """Run forward, and return the sum of all numbers that the probe computes, a float32 scalar."""
        found = engine(batch, self.probe)
        return sum(each.sum() for each in (found if isinstance(found, tuple) else (found,))).float()


@dataclass(frozen=True)
class NewEngine:
    """An engine before its first step. Every method is collective.

    parts: model parts with layers to checkpoint, by name; moments: fp32 optimizer states per trained weight;
    watch: context manager that explains out-of-memory errors of the largest micro-batch; find: returns the largest
    micro-batch, None if no step is left.
    """

    resolved: ResolvedConfig
    model: LlavaModel
    runner: Runner
    parts: Mapping[str, nn.Module]
    moments: float
    ranks: Ranks
    watch: Callable[[LargestMicroBatch], AbstractContextManager]
    find: Callable[[], LargestMicroBatch | None]

    @functools.cached_property
    def largest(self) -> LargestMicroBatch | None:
        """The largest remaining micro-batch; slow to build."""
        return self.find()

    def warm_up(self) -> None:
        """Try the largest micro-batch; on a CPU, only if an extension has already loaded it."""
        on_gpu = self.ranks.device.type == "cuda"
        if (on_gpu or "largest" in vars(self)) and self.largest is not None:
            with self.watch(self.largest):
                warm_up(self.runner, self.largest, missing_state_bytes(self.runner.engine, self.moments))


def largest_micro_batch(plan: StepPlan, done: int, probe: Head, ranks: Ranks, mesh: Mesh) -> LargestMicroBatch:
    """Load the largest micro-batch of any rank after `done` steps, with its images, onto the device.

    Collective; only rank 0 searches for it.
    """
    samples = broadcast_from_first(ranks, lambda: heaviest(plan, done))
    other = broadcast_from_first(ranks, lambda: most_worked(plan, done, samples))
    batch, *others = (
        micro.batch for micro in micro_batches(plan.dataset, [samples, *[other] * bool(other)], 0, ranks.device, mesh)
    )
    layouts = itertools.islice(plan.after(done), STEPS_LOOKED_AT)
    accumulates = any(len(layout.of_ranks[0]) > 1 for layout in layouts)
    return LargestMicroBatch(batch, samples, accumulates, probe, *others)


def warm_up(runner: Runner, largest: LargestMicroBatch, held_bytes: int = 0) -> None:
    """Run forward and backward of the largest micro-batch, twice if steps accumulate, and discard the gradients.

    held_bytes: device memory to reserve meanwhile, for states that the run will allocate later (missing_state_bytes).
    Collective.
    """
    with discard_gradients(runner.engine, held_bytes):
        for batch in filter(None, (largest.batch, largest.most_worked)):
            runner.warm_up(batch, largest.summed, largest.accumulates)


@contextmanager
def discard_gradients(engine, held_bytes: int = 0) -> Iterator[None]:
    """At the end of this context, restore random states and clear the gradients of backward_with_weight_zero.

    held_bytes: device memory to reserve meanwhile.
    """
    on_gpu = engine.device.type == "cuda"
    engine.train()
    with torch.random.fork_rng(devices=[engine.device] if on_gpu else []):
        held = torch.empty(held_bytes if on_gpu else 0, dtype=torch.uint8, device=engine.device)
        yield
        del held
    _clear_gradients(engine)


def _clear_gradients(engine) -> None:
    """Clear gradients in the way DeepSpeed 0.19.8's optimizers do after a step that they skip for an overflow.

    All gradients are zeros, but their memory would stay allocated. Stage 2 would also keep its count of micro-batches,
    by which it decides whether to copy or to add gradients.
    """
    engine.zero_grad()
    optimizer = engine.optimizer
    optimizer.zero_grad()
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        optimizer.micro_step_id = INITIAL_MICRO_STEP_ID
        optimizer.all_grad_tensors.update(dict.fromkeys(optimizer.all_grad_tensors))
    if isinstance(optimizer, (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)):
        optimizer.averaged_gradients.update(dict.fromkeys(optimizer.averaged_gradients))
        optimizer.reset_cpu_buffers()


def missing_state_bytes(engine, num_moments: float) -> int:
    """Return the device bytes of optimizer states that the first step will allocate (torch's optimizers at stage 0).

    num_moments: fp32 numbers that the optimizer keeps per parameter.
    """
    optimizer = engine.basic_optimizer
    return sum(
        int(num_moments * p.numel() * p.element_size())
        for group in optimizer.param_groups
        for p in group["params"]
        if p.device.type == engine.device.type and not optimizer.state.get(p)
    )
