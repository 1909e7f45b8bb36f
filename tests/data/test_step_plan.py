"""The heaviest micro-batch that is to come, exactly or by a bound, equals or surpasses that of every layout."""

import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest

from llava_ds.data import heaviest as heaviest_room
from llava_ds.data.heaviest import heaviest, most_work, most_worked, pack_of
from llava_ds.data.packing import plan_by_tokens
from llava_ds.data.sample_order import SampleOrder
from llava_ds.data.step_plan import Packing, StepPlan, largest_share
from llava_ds.extensions.base import Axis

HOWS = ("random", "file", "modality", "modality_auto", "length", "varlen", "bucket")


def some_plan(draw: random.Random, by_tokens: bool) -> StepPlan:
    number, dp, micro, nm = draw.randint(1, 300), draw.choice([1, 2, 5]), draw.choice([1, 2, 4]), draw.choice([1, 2, 3])
    lengths = np.array([draw.randint(1, draw.choice([5, 60, 300])) for _ in range(number)], np.int32)
    how = draw.choice(HOWS)
    signed = np.where([how.startswith("modality") and draw.random() < 0.4 for _ in lengths], -lengths, lengths)
    bound = draw.choice([20, 100, 300, 700, 10**6]) if by_tokens else None
    across = not by_tokens and draw.random() < 0.5
    beside = draw.choice([(0.0, 0.0, 0.0), (0.3, 9.0, 0.01)])
    packing = Packing(dp, micro, nm, bound, across, pair_cost=draw.choice([0, 1e-3, 0.02]), other_costs=beside)
    order = SampleOrder(number, packing.batch_size, draw.randint(0, 9), how, signed, micro, nm)
    return StepPlan(data_of(lengths, draw.random()), order, packing, num_steps=draw.randint(1, 12))


def data_of(lengths: np.ndarray, images: float = 0.0) -> SimpleNamespace:
    """Data of these lengths; a share of the samples has tiles."""
    draw = np.random.default_rng(len(lengths))
    tiles = draw.integers(1, 14, len(lengths)) * (draw.random(len(lengths)) < images)
    sizes = lengths, draw.integers(0, lengths + 1), tiles, tiles**2
    return SimpleNamespace(sizes=sizes, **of_lengths(lengths))


def of_lengths(lengths: np.ndarray) -> dict[str, object]:
    def summed(values: np.ndarray, samples: list[int]) -> int:
        return int(values[samples].sum()) if samples else 0

    own = {"packs": plan_by_tokens, "summed": summed, "wait_for": lambda samples: None}
    return {"lengths": lengths, "is_whole": True, **own}


def walked(plan: StepPlan, done: int) -> list[int]:
    """The first of the heaviest micro-batches, by laying out every step."""
    micro_batches = (micro for layout in plan.after(done) for rank in layout.of_ranks for micro in rank)
    return max(micro_batches, key=lambda micro: sum(plan.dataset.lengths[i] for i in micro), default=[])


@pytest.mark.parametrize("by_tokens", [False, True])
def test_the_heaviest_micro_batch_is_the_first_of_all_that_are_laid_out(by_tokens):
    draw = random.Random(1)
    for _ in range(100):
        plan = some_plan(draw, by_tokens)
        for done in {0, plan.num_steps // 2, plan.num_steps}:
            assert heaviest(plan, done) == walked(plan, done), plan


def test_the_micro_batch_of_the_most_work_is_tried_beside_the_longest():
    draw, others = random.Random(4), 0
    for _ in range(100):
        plan = some_plan(draw, by_tokens=True)
        work, longest = most_work(plan), heaviest(plan, 0)
        found = most_worked(plan, 0, longest)
        every = [micro for layout in plan.after(0) for rank in layout.of_ranks for micro in rank]
        if any(plan.packing.other_costs):
            assert work[found or longest].sum() == max(work[micro].sum() for micro in every)
        others += bool(found)
        assert not found or found in every
        assert most_worked(plan, plan.num_steps, []) == []
    assert others > 20


@pytest.mark.parametrize("scans", [True, False])
@pytest.mark.parametrize("by_tokens", [False, True])
def test_no_micro_batch_of_large_data_surpasses_the_bound(by_tokens, scans, monkeypatch):
    monkeypatch.setattr(heaviest_room, "PLANNED_SAMPLES", 0)
    monkeypatch.setattr(heaviest_room, "SCANNED_SAMPLES", 10**6 if scans else 0)
    draw, close = random.Random(2), 0
    for _ in range(200):
        plan = some_plan(draw, by_tokens)
        tokens = plan.dataset.lengths[heaviest(plan, 0)].sum()
        most = plan.dataset.lengths[walked(plan, 0)].sum()
        assert tokens >= most, plan
        close += tokens <= 1.3 * most
        if by_tokens:  # no more than the gap's shortest sample above what memory was planned for
            longest = plan.dataset.lengths.max()
            assert tokens <= max(plan.packing.tokens_per_micro_batch, longest) + longest
    assert not scans or close > 80


def test_finding_the_heaviest_of_large_data_lays_out_no_epoch(monkeypatch):
    laid_out = []
    one = Packing.lay_out
    monkeypatch.setattr(Packing, "lay_out", lambda self, *args: laid_out.append(1) or one(self, *args))
    lengths = np.random.default_rng(0).integers(10, 2000, 2_100_000).astype(np.int32)
    dataset = data_of(lengths)
    for bound in (8192, None):
        packing = Packing(64, 16, 1, bound)
        order = SampleOrder(len(lengths), packing.batch_size, 0, "random", lengths, 16)
        plan = StepPlan(dataset, order, packing, order.steps_per_epoch)
        tokens = int(lengths[heaviest(plan, 0)].sum())
        assert tokens == 8192 if bound else 16 * 1005 < tokens < 16 * 1999
    assert len(laid_out) < 5


def test_a_pack_of_a_number_of_tokens():
    draw = random.Random(3)
    for _ in range(200):
        lengths = np.array([draw.randint(1, 40) for _ in range(draw.randint(1, 50))], np.int32)
        wanted = draw.randint(1, 600)
        pack = pack_of(lengths, wanted)
        total = int(lengths[pack].sum())
        assert len(set(pack)) == len(pack)
        assert wanted <= total < wanted + lengths.max() if lengths.sum() >= wanted else len(pack) == len(lengths)


@pytest.mark.parametrize("how", HOWS)
def test_the_largest_share_is_that_of_the_largest_step(how):
    lengths = np.random.default_rng(0).integers(1, 90, 331).astype(np.int32)
    order = SampleOrder(331, 12, 4, how, lengths, 3)
    steps = itertools.islice(order.steps(), order.steps_per_epoch)
    most = max(int(lengths[step].sum()) for step in steps)
    assert largest_share(order, lengths, 5) == -(-most // 5) + lengths.max()


def test_ranks_that_share_samples_have_the_same_micro_batches():
    order = SampleOrder(8, 8, seed=1)
    dataset = SimpleNamespace(**of_lengths(np.full(8, 10)))
    plan = StepPlan(dataset, order, Packing(2, 2, 2, None, axes=(Axis("sp", "sp_size", 2, 1, False),)), num_steps=1)
    of_dp = plan.step(1).of_ranks
    assert [plan.of_rank(1, rank) for rank in range(4)] == [of_dp[0], of_dp[0], of_dp[1], of_dp[1]]
    assert plan.of_ranks(1) == of_dp[0] + of_dp[1] and plan.of_ranks(1, [3, 2]) == of_dp[1]
