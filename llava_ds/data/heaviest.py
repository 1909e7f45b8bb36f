"""The heaviest micro-batch that remains of a run, for a trial before the first step."""

import itertools
import math
from collections.abc import Iterable
from functools import partial

import numpy as np

from llava_ds.data.step_plan import StepLayout, StepPlan

# Up to this many remaining samples (with packs; by count), the heaviest micro-batch is found exactly: packing takes
# about 3 us per sample, an order 0.2 to 0.7 us.
PLANNED_SAMPLES, SCANNED_SAMPLES = 2_000_000, 100_000_000


def heaviest(plan: StepPlan, done: int) -> list[int]:
    """Return the samples of a micro-batch with as many tokens as the heaviest remaining one on any rank.

    This is the first such micro-batch itself ([] if no step remains). If finding it would take long, return samples
    with at least as many tokens as any micro-batch: the longest ones, or a pack of _most_tokens() or slightly more.
    While the data are being encoded, only the shards that the next step needs are considered.
    """
    packing, lengths = plan.packing, plan.dataset.lengths
    if not plan.dataset.is_whole:
        if done >= plan.num_steps:
            return []
        plan.step(done + 1)  # waits until the step's lengths are known
        return plan.dataset.heaviest_known(packing.micro_batch_size, packing.tokens_per_micro_batch)
    left = (plan.num_steps - done) * plan.batch_size
    if packing.tokens_per_micro_batch is not None:
        if left > PLANNED_SAMPLES:
            return pack_of(lengths, _most_tokens(plan, done))
    elif left > SCANNED_SAMPLES:
        number = min(packing.micro_batch_size, len(lengths))
        longest = np.argpartition(lengths, -number)[-number:]
        longest = longest[np.argsort(-lengths[longest])]  # a micro-batch may have the first of them twice
        return np.resize(longest, packing.micro_batch_size).tolist()
    elif not packing.ends_epochs_within_steps(len(lengths)):
        return _heaviest_of(plan, itertools.islice(plan.after(_heaviest_step(plan, done)), min(1, left)))
    return _heaviest_of(plan, plan.after(done))


def most_worked(plan: StepPlan, done: int, tried: list[int]) -> list[int]:
    """Return the samples of the remaining micro-batch with the most work (most_work), or [] if that is `tried`.

    Memory grows with the tokens in the layers and with the tiles in a trained tower, so the trial runs both the pack
    with the most tokens and the pack with the most work. Also returns [] if packs are not balanced by work, while the
    data are being encoded, and if laying out all steps would take long.
    """
    packing, left = plan.packing, (plan.num_steps - done) * plan.batch_size
    if packing.tokens_per_micro_batch is None or not any(packing.other_costs) or left > PLANNED_SAMPLES:
        return []
    if not plan.dataset.is_whole:
        return []
    work = most_work(plan)
    micro_batches = (micro for layout in plan.after(done) for rank in layout.of_ranks for micro in rank)
    found = max(micro_batches, key=partial(plan.dataset.summed, work), default=[])
    return [] if found == tried else found


def _heaviest_of(plan: StepPlan, layouts: Iterable[StepLayout]) -> list[int]:
    micro_batches = (micro for layout in layouts for rank in layout.of_ranks for micro in rank)
    return max(micro_batches, key=partial(_tokens, plan), default=[])


def _tokens(plan: StepPlan, samples: list[int]) -> int:
    return plan.dataset.summed(plan.dataset.lengths, samples)


def _heaviest_step(plan: StepPlan, done: int) -> int:
    """Return the number of steps before the first step with the heaviest micro-batch. Without packs only."""
    packing, lengths = plan.packing, plan.dataset.lengths
    unit, per_step = plan.batch_size, 1
    if packing.across_epochs:
        unit, per_step = packing.dp * packing.micro_batch_size, packing.num_micro_batches
    found, most = done, -1
    for first, rows in plan.order.scan(unit, done * per_step, plan.num_steps * per_step):
        if rows.shape[1] == unit:
            by_unit = lengths[rows].reshape(len(rows), -1, packing.micro_batch_size).sum(2).max(1)
            step = (first + int(by_unit.argmax())) // per_step
            tokens = int(by_unit.max())
        else:  # the last samples of an epoch
            step = first // per_step
            tokens = _tokens(plan, _heaviest_of(plan, [plan.step(step + 1)]))
        if tokens > most:
            found, most = step, tokens
    return found


def most_work(plan: StepPlan) -> np.ndarray:
    """Upper bound of each sample's cost in any step, (samples,) int64 (packing.sample_costs)."""
    from llava_ds.data.packing import other_work

    tokens, *others = plan.dataset.sizes
    tokens = tokens.astype(np.int64)
    attention = (plan.packing.pair_cost * tokens**2).astype(np.int64)
    return tokens + attention + np.ceil(other_work(others, plan.packing.other_costs)).astype(np.int64)


def _most_tokens(plan: StepPlan, done: int) -> int:
    """Compute an upper bound of the tokens in any remaining pack.

    plan_by_tokens adds a sample to the lightest pack, so that pack costs at most the mean before. No exchange makes
    the heaviest pack heavier, so a pack costs at most the mean plus one sample. A sample costs at least its
    number of tokens, and at most most_work.
    """
    packing, longest = plan.packing, int(plan.dataset.lengths.max())
    work = most_work(plan)
    if (plan.num_steps - done) * plan.batch_size > SCANNED_SAMPLES:
        step_cost = plan.batch_size * int(work.max())
    else:
        scan = plan.order.scan(plan.batch_size, done, plan.num_steps)
        step_cost = max(int(work[rows].sum(1).max()) for _, rows in scan)
    evened = math.ceil(step_cost / packing.dp) + int(work.max())
    return max(longest, min(packing.tokens_per_micro_batch, evened))


def pack_of(lengths: np.ndarray, num_tokens: int) -> list[int]:
    """Choose the longest samples that add up to num_tokens, or slightly more; all samples if they have fewer tokens."""
    left = np.bincount(lengths)  # number of samples of each length
    taken = np.zeros_like(left)
    for length in np.flatnonzero(left)[::-1].tolist():
        taken[length] = min(left[length], num_tokens // length)
        num_tokens -= length * int(taken[length])
    left -= taken
    if num_tokens > 0 and left[num_tokens:].any():  # close a remaining gap with the shortest sample that fills it
        taken[num_tokens + int(np.argmax(left[num_tokens:] > 0))] += 1
    wanted = np.flatnonzero(taken)
    return [int(i) for length in wanted for i in np.flatnonzero(lengths == length)[: taken[length]]]
