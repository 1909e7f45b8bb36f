"""Plans: every sample once, as many micro-batches on every rank, the bound kept, the load balanced."""

import itertools
import random

import pytest

from llava_ds.data.packing import plan_by_count, plan_by_tokens, plans_across_epochs


def check_places_all_once(plan: list[list[list[int]]], samples: list[int], world_size: int) -> None:
    assert len(plan) == world_size
    assert len({len(rank) for rank in plan}) == 1  # ZeRO-3 needs the same number of micro-steps everywhere
    placed = [sample for rank in plan for micro in rank for sample in micro]
    assert sorted(placed) == sorted(samples)


def cases() -> list[tuple[list[int], list[int], int]]:
    """(samples, their lengths, ranks): full and short steps, even and very uneven lengths."""
    rng = random.Random(0)
    drawn = []
    for _ in range(200):
        count = rng.randint(1, 40)
        samples = rng.sample(range(1000), count)
        longest = rng.choice([1, 20, 500])
        drawn.append((samples, [rng.randint(1, longest) for _ in samples], rng.choice([1, 2, 3, 8])))
    return drawn


@pytest.mark.parametrize("micro_size", [1, 3])
def test_the_plain_layout_places_every_sample_once_and_keeps_the_size(micro_size):
    for samples, _, world_size in cases():
        num_micro = -(-len(samples) // (micro_size * world_size))
        plan = plan_by_count(samples, world_size, num_micro, micro_size)
        check_places_all_once(plan, samples, world_size)
        filled = [len(micro) for rank in plan for micro in rank]
        assert len(plan[0]) == num_micro
        assert max(filled) <= micro_size and max(filled) - min(filled) <= 1


def test_the_plain_layout_deals_micro_batches_in_the_samples_order():
    assert plan_by_count(list(range(8)), 2, 2, 2) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert plan_by_count([7], 2, 1, 4) == [[[7]], [[]]]


def test_packs_keep_the_bound_and_place_every_sample_once():
    rng = random.Random(1)
    for samples, lengths, world_size in cases():
        bound = rng.choice([20, 60, 600, 10**6])
        plan = plan_by_tokens(samples, lengths, world_size, bound)
        check_places_all_once(plan, samples, world_size)
        tokens = dict(zip(samples, lengths))
        for micro in itertools.chain(*plan):
            assert sum(tokens[sample] for sample in micro) <= bound or len(micro) == 1


def test_packs_are_balanced():
    for samples, lengths, world_size in cases():
        plan = plan_by_tokens(samples, lengths, world_size, max_tokens=600)
        tokens = dict(zip(samples, lengths))
        loads = [[sum(tokens[sample] for sample in micro) for micro in rank] for rank in plan]
        flat = list(itertools.chain(*loads))
        assert max(flat) - min(flat) <= max(lengths)
        # Ranks that compute at the same time carry about the same: packs are dealt heaviest first.
        for together in zip(*loads):
            assert max(together) - min(together) <= max(lengths)
        totals = [sum(rank) for rank in loads]
        assert max(totals) - min(totals) <= max(flat) - min(flat)


def test_no_more_micro_batches_than_the_bound_asks_for_when_lengths_are_even():
    assert [len(rank) for rank in plan_by_tokens(list(range(16)), [10] * 16, 2, 40)] == [2, 2]
    assert [len(rank) for rank in plan_by_tokens(list(range(16)), [10] * 16, 2, 10**6)] == [1, 1]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("lengths", [[5000], [3000] * 16, [4000, 10, 10, 10], [900, 900, 900]])
def test_samples_over_the_bound_make_no_empty_rounds(lengths, world_size):
    """A sample over the bound is a pack of its own, and a rank's empty micro-batch costs as much as a small one."""
    plan = plan_by_tokens(list(range(len(lengths))), lengths, world_size, max_tokens=1000)
    assert len(plan[0]) <= -(-len(lengths) // world_size)


def test_a_plan_follows_from_the_lengths_alone():
    for samples, lengths, world_size in cases()[:20]:
        plan = plan_by_tokens(samples, lengths, world_size, 300)
        assert plan == plan_by_tokens(list(samples), list(lengths), world_size, 300)


# What LLaVA's trainer (transformers 4.37) made of 18 samples in micro-batches of 4, epoch after epoch: sizes by step.
LLAVAS_STEPS = {
    1: [[4], [4], [4], [4], [2], [4], [4], [4], [4], [2]],
    2: [[4, 4], [4, 4], [2, 4], [4, 4], [4, 2], [4, 4]],
    8: [[4, 4, 4, 4, 2], [4, 4, 4], [4, 2]],
}


@pytest.mark.parametrize("num_micro_batches", LLAVAS_STEPS)
def test_steps_go_on_into_the_next_epoch_as_llavas_do(num_micro_batches):
    expected = LLAVAS_STEPS[num_micro_batches]
    epochs = (list(range(18 * e, 18 * e + 18)) for e in itertools.count())
    plans = list(itertools.islice(plans_across_epochs(epochs, 1, num_micro_batches, 4), len(expected)))
    assert [[len(micro) for micro in plan[0]] for plan in plans] == expected
    placed = [sample for plan in plans for micro in plan[0] for sample in micro]
    assert placed == list(range(len(placed)))  # nothing left out on the way


def test_ranks_are_filled_up_from_the_epochs_first_samples():
    plans = list(plans_across_epochs([list(range(18))], 2, 1, 4))
    assert plans[:2] == [[[[0, 1, 2, 3]], [[4, 5, 6, 7]]], [[[8, 9, 10, 11]], [[12, 13, 14, 15]]]]
    assert plans[2:] == [[[[16, 17, 0, 1]], [[2, 3, 4, 5]]]]  # accelerate's BatchSamplerShard gives the same
    [few] = plans_across_epochs([[7, 8, 9]], 2, 1, 4)
    assert few == [[[7, 8, 9, 7]], [[8, 9, 7, 8]]]
