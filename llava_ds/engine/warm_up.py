"""The heaviest micro-batch goes first: forward and backward of it with weight zero, before the first step.

What does not fit then fails in the first minute and not after hours. Where its loss is finite its gradients are exact
zeros, no optimizer step is taken, random states are given back and what it left in the engine is cleared: the run's
numbers are those of a run without it, bit for bit.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID, DeepSpeedZeroOptimizer

from llava_ds.batch import Batch
from llava_ds.data.collate import LoadedSample, collate
from llava_ds.data.step_plan import StepPlan

STEPS_LOOKED_AT = 20  # for whether a step has several micro-batches


@dataclass(frozen=True)
class Heaviest:
    """The micro-batch with the most tokens that is still to come, the same on every rank.

    samples: of the data set, by number; accumulates: whether steps have several micro-batches, so that it meets the
    gradients of others.
    """

    batch: Batch
    samples: list[int]
    accumulates: bool


def heaviest_micro_batch(plan: StepPlan, done: int, device: torch.device) -> Heaviest:
    """The heaviest micro-batch that is left on any rank when `done` steps are done, with its images, on the device."""
    samples = plan.heaviest(done)
    loaded = [sample for sample in map(plan.dataset.__getitem__, samples) if isinstance(sample, LoadedSample)]
    layouts = itertools.islice(plan.after(done), STEPS_LOOKED_AT)
    accumulates = any(len(layout.of_ranks[0]) > 1 for layout in layouts)
    return Heaviest(collate(loaded, plan.dataset.image_options).to(device), samples, accumulates)


def rehearse(engine, heaviest: Heaviest, held_bytes: int = 0) -> None:
    """Forward and backward of the heaviest micro-batch, twice where it would meet gradients of others, then nothing.

    held_bytes: device memory to hold meanwhile, for what the run will keep and is not there yet (missing_states).
    All ranks call it together.
    """
    with weightless(engine, held_bytes):
        passes = 2 if heaviest.accumulates else 1
        for i in range(passes):
            loss_sum = engine(heaviest.batch)
            engine.set_gradient_accumulation_boundary(i == passes - 1)
            engine.backward(loss_sum * 0, scale_wrt_gas=False)


@contextmanager
def weightless(engine, held_bytes: int = 0) -> Iterator[None]:
    """Within it, micro-batches leave nothing behind: their losses have to be multiplied by zero.

    held_bytes: device memory that is held meanwhile.
    """
    on_gpu = engine.device.type == "cuda"
    engine.train()
    with torch.random.fork_rng(devices=[engine.device] if on_gpu else []):
        held = torch.empty(held_bytes if on_gpu else 0, dtype=torch.uint8, device=engine.device)
        yield
        del held
    _forget_gradients(engine)


def _forget_gradients(engine) -> None:
    """As DeepSpeed 0.19's own optimizers forget a step that they skip for an overflow.

    All of it is zeros; what would stay are the memory, and stage 2's count of micro-batches, which decides whether
    gradients are copied or added.
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


def missing_states(engine, num_moments: int) -> int:
    """Bytes on the device of optimizer states that only the first step makes: torch's optimizers at stage 0.

    num_moments: fp32 numbers that the optimizer keeps for a parameter.
    """
    optimizer = engine.basic_optimizer
    return sum(
        num_moments * p.numel() * p.element_size()
        for group in optimizer.param_groups
        for p in group["params"]
        if p.device.type == engine.device.type and not optimizer.state.get(p)
    )
