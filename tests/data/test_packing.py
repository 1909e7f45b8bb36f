"""Plans: every sample once, as many micro-batches on every rank, the bound kept, the load balanced."""

import itertools
import random

import numpy as np
import pytest
from benchmark.length_mix import FINETUNE, length_mix

from llava_ds.data import packing
from llava_ds.data.packing import plans_across_epochs, sample_costs
from llava_ds.data.step_plan import plan_by_count


def plan_by_tokens(samples, lengths, dp, max_tokens, costs=None):
    """The plan of samples that share nothing, evened out by tokens unless there are costs."""
    return packing.plan_by_tokens(samples, lengths, dp, max_tokens, lengths if costs is None else costs)


def check_places_all_once(plan: list[list[list[int]]], samples: list[int], dp: int) -> None:
    assert len(plan) == dp
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
    for samples, _, dp in cases():
        num_micro = -(-len(samples) // (micro_size * dp))
        plan = plan_by_count(samples, dp, num_micro, micro_size)
        check_places_all_once(plan, samples, dp)
        filled = [len(micro) for rank in plan for micro in rank]
        assert len(plan[0]) == num_micro
        assert max(filled) <= micro_size and max(filled) - min(filled) <= 1


def test_the_plain_layout_deals_micro_batches_in_the_samples_order():
    assert plan_by_count(list(range(8)), 2, 2, 2) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert plan_by_count([7], 2, 1, 4) == [[[7]], [[]]]


def test_packs_keep_the_bound_and_place_every_sample_once():
    rng = random.Random(1)
    for samples, lengths, dp in cases():
        bound = rng.choice([20, 60, 600, 10**6])
        plan = plan_by_tokens(samples, lengths, dp, bound)
        check_places_all_once(plan, samples, dp)
        tokens = dict(zip(samples, lengths))
        for micro in itertools.chain(*plan):
            assert sum(tokens[sample] for sample in micro) <= bound or len(micro) == 1


def test_packs_are_balanced():
    for samples, lengths, dp in cases():
        plan = plan_by_tokens(samples, lengths, dp, max_tokens=600)
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


@pytest.mark.parametrize("dp", [1, 2, 3])
@pytest.mark.parametrize("lengths", [[5000], [3000] * 16, [4000, 10, 10, 10], [900, 900, 900]])
def test_samples_over_the_bound_make_no_empty_rounds(lengths, dp):
    """A sample over the bound is a pack of its own, and a rank's empty micro-batch costs as much as a small one."""
    plan = plan_by_tokens(list(range(len(lengths))), lengths, dp, max_tokens=1000)
    assert len(plan[0]) <= -(-len(lengths) // dp)


def test_a_plan_follows_from_the_lengths_alone():
    for samples, lengths, dp in cases()[:20]:
        plan = plan_by_tokens(samples, lengths, dp, 300)
        assert plan == plan_by_tokens(list(samples), list(lengths), dp, 300)


def loads(plan: list[list[list[int]]], weights: list[int]) -> list[list[int]]:
    """[rank][micro-batch] -> the sum of its samples' weights, where the samples are 0, 1, 2, ..."""
    return [[sum(weights[sample] for sample in micro) for micro in rank] for rank in plan]


COSTS = (0.07, 7.5, 0.01)  # of a supervised token, a tile and a pair of tiles, in tokens


def sizes_of(count: int, seed: int, images: float) -> list[np.ndarray]:
    """Tokens, supervised tokens, tiles and pairs of tiles of texts, and of images whose tiles take 16 tokens each."""
    draw = np.random.default_rng(seed)
    tiles = draw.integers(1, 14, count) * (draw.random(count) < images)
    texts = draw.integers(20, 220, count)
    return [texts + 16 * tiles, (texts * draw.random(count)).astype(int), tiles, tiles**2]


def test_a_sample_costs_the_sum_of_its_parts():
    tokens, *others = sizes_of(500, 0, 0.5)
    others[0][0] = others[1][0] = others[2][0] = 0  # a sample without work beside its tokens: the unit is one token's
    costs = sample_costs(tokens, others, 1e-3, COSTS)
    parts = [tokens, 1e-3 * tokens.astype(float) ** 2, *(cost * each for cost, each in zip(COSTS, others))]
    assert np.abs(costs - sum(parts)).max() <= 2
    for place in range(3):  # each part counts
        more = [each + 50 * (i == place) * (np.arange(500) == 7) for i, each in enumerate(others)]
        assert sample_costs(tokens, more, 1e-3, COSTS)[7] - costs[7] == pytest.approx(50 * COSTS[place], abs=1)


def test_equal_shares_of_targets_without_images_cost_as_before():
    tokens = np.random.default_rng(1).integers(1, 300, 400) * 7
    before = sample_costs(tokens, (), 1e-3, COSTS)
    for share in (0, 2, 7):
        others = [tokens // 7 * share, 0 * tokens, 0 * tokens]
        assert np.array_equal(sample_costs(tokens, others, 1e-3, COSTS), before)
    assert np.array_equal(sample_costs(tokens, sizes_of(400, 2, 1)[1:], 1e-3, (0.0, 0.0, 0.0)), before)
    assert len(sample_costs(tokens[:0], [tokens[:0]] * 3, 1e-3, COSTS)) == 0


@pytest.mark.parametrize("bound", [1000, 4000])
@pytest.mark.parametrize("dp", [2, 4])
def test_packs_of_images_and_texts_are_even_in_all_their_work(dp, bound):
    spreads = {"lengths": [], "work": []}
    for seed in range(10):
        sizes = sizes_of(64 * dp, seed, 0.5)
        work = sizes[0] + 1e-3 * sizes[0] ** 2 + sum(cost * each for cost, each in zip(COSTS, sizes[1:]))
        for name, others in (("lengths", ()), ("work", sizes[1:])):
            costs = sample_costs(sizes[0], others, 1e-3, COSTS)
            plan = plan_by_tokens(list(range(64 * dp)), sizes[0], dp, bound, costs)
            check_places_all_once(plan, list(range(64 * dp)), dp)
            assert max(itertools.chain(*loads(plan, sizes[0]))) <= bound
            of_round = np.array(loads(plan, work))
            spreads[name].append(of_round.max(0).sum() / of_round.mean(0).sum())
    most = {name: max(found) - 1 for name, found in spreads.items()}
    assert most["work"] < 0.02 and most["work"] < 0.6 * most["lengths"], most


def best_fit_decreasing(lengths: list[int], bound: int) -> int:
    """How many packs it takes."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append(min(fitting, default=bound) - length)
    return len(rooms)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("image_tokens", [144, 576])
@pytest.mark.parametrize(("count", "dp"), [(512, 1), (1024, 1), (512, 2), (2048, 8)])
def test_packs_of_a_large_step_are_full_and_of_one_cost(count, dp, image_tokens, seed):
    lengths = length_mix(FINETUNE, count, seed, image_tokens).tokens.tolist()
    costs = [int(length + 2e-5 * length**2) for length in lengths]
    bound = 8192
    plan = plan_by_tokens(list(range(count)), lengths, dp, bound, costs)
    check_places_all_once(plan, list(range(count)), dp)
    tokens, work = loads(plan, lengths), loads(plan, costs)
    assert max(itertools.chain(*tokens)) <= bound
    packs = dp * len(plan[0])
    fewest = -(-sum(lengths) // bound)  # if samples could be cut up
    assert packs <= dp * -(-(fewest + 1) // dp)
    # Whole rounds may leave more room, by arithmetic: what counts is that nobody waits.
    assert sum(lengths) / (packs * bound) > 0.97 or packs == dp * -(-fewest // dp)
    assert sum(map(sum, work)) / (dp * sum(map(max, zip(*work)))) > 0.99


def test_never_more_rounds_than_best_fit_decreasing_needs():
    rng = random.Random(2)
    for _ in range(300):
        bound, dp = rng.choice([100, 1000]), rng.choice([1, 2, 3, 8])
        lengths = [
            rng.randint(1, rng.choice([bound // 9, bound // 2, bound, 2 * bound])) for _ in range(rng.randint(1, 60))
        ]
        plan = plan_by_tokens(list(range(len(lengths))), lengths, dp, bound)
        assert len(plan[0]) <= -(-best_fit_decreasing(lengths, bound) // dp)
        assert all(
            tokens <= bound or len(micro) == 1
            for rank, r in zip(plan, loads(plan, lengths))
            for micro, tokens in zip(rank, r)
        )


@pytest.mark.parametrize("dp", [1, 2, 8])
@pytest.mark.parametrize(
    "lengths",
    [[700] * 128, [1] * 128, [8192] * 9, [8192, *[1] * 40], [60_000, *[700] * 60], [1], [], [4097] * 16, [4096] * 32],
    ids=["equal", "tiny", "full", "one full", "one huge", "one", "none", "over half", "half"],
)
def test_hostile_lengths(lengths, dp):
    samples = list(range(len(lengths)))
    costs = [length + length**2 // 1000 for length in lengths]
    for weights in (None, costs):
        plan = plan_by_tokens(samples, lengths, dp, 8192, weights)
        check_places_all_once(plan, samples, dp)
        tokens = loads(plan, lengths)
        for rank, sums in zip(plan, tokens):
            assert all(total <= 8192 or len(micro) == 1 for micro, total in zip(rank, sums))
        if len(samples) >= dp * len(plan[0]):
            assert min(itertools.chain(*tokens)) > 0  # an empty micro-batch costs a whole round of communication
        assert len(plan[0]) == max(1, -(-best_fit_decreasing(lengths, 8192) // dp))


@pytest.mark.parametrize("pair_cost", [0, 2e-5])
@pytest.mark.parametrize(("count", "dp", "balance"), [(128, 8, 0.96), (128, 16, 0.925), (64, 8, 0.925), (256, 8, 0.98)])
def test_packs_of_a_few_samples_leave_no_rank_without_any(count, dp, balance, pair_cost):
    """LLaVA's samples under a bound of one context: about three a pack, so that packs of one cost are seldom found."""
    more_than_best_fit = 0
    for seed in range(30):
        lengths = length_mix(FINETUNE, count, seed).tokens.tolist()
        costs = [int(length + pair_cost * length**2) for length in lengths] if pair_cost else lengths
        plan = plan_by_tokens(list(range(count)), lengths, dp, 2048, costs if pair_cost else None)
        check_places_all_once(plan, list(range(count)), dp)
        assert count >= dp * len(plan[0])
        assert all(itertools.chain(*plan))
        assert max(itertools.chain(*loads(plan, lengths))) <= 2048
        assert plan == plan_by_tokens(list(range(count)), lengths, dp, 2048, costs if pair_cost else None)
        work = loads(plan, costs)
        assert sum(map(sum, work)) / (dp * sum(map(max, zip(*work)))) > balance
        more_than_best_fit += dp * len(plan[0]) > best_fit_decreasing(lengths, 2048)
    assert more_than_best_fit > 10  # there, full packs would have left some empty


def test_no_empty_micro_batch_where_there_are_samples_for_all():
    rng = random.Random(3)
    for _ in range(500):
        bound, dp = rng.choice([100, 1000]), rng.choice([2, 3, 8])
        longest = rng.choice([bound // 2, bound, 2 * bound])
        lengths = [rng.randint(1, longest) for _ in range(rng.randint(1, 60))]
        costs = [rng.randint(1, 1000) for _ in lengths]  # of no relation to the lengths
        for weights in (None, costs):
            plan = plan_by_tokens(list(range(len(lengths))), lengths, dp, bound, weights)
            check_places_all_once(plan, list(range(len(lengths))), dp)
            packs = list(itertools.chain(*plan))
            assert sum(map(bool, packs)) == min(len(packs), len(lengths))
            assert all(len(pack) == 1 or sum(lengths[i] for i in pack) <= bound for pack in packs)


def test_heaviest_micro_batches_come_first_and_go_by_cost():
    for samples, lengths, dp in cases():
        costs = [length + length**2 // 50 for length in lengths]
        plan = plan_by_tokens(list(range(len(samples))), lengths, dp, 100, costs)
        for rank in loads(plan, costs):
            assert rank == sorted(rank, reverse=True)
    # Two samples of 100 tokens cost as much as thirteen of 50 where pairs weigh heavily.
    lengths = [100, 100, *[50] * 13]
    plan = plan_by_tokens(list(range(15)), lengths, 2, 10**6, [length + length**2 for length in lengths])
    first, second = (sum(lengths[i] + lengths[i] ** 2 for i in rank[0]) for rank in plan)
    assert abs(first - second) <= 2550


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
