"""Lay out the samples of one optimizer step on ranks and micro-batches.

The plan depends on the samples' sizes alone, so every rank computes the same one without communication.

A local search balances the packs, because every round takes as long as its slowest rank. Without it (heaviest sample
first into the lightest pack, best fit if that exceeds the bound), steps take 1 % longer at the median: 0 % if most
packs hold one sample, up to 6.5 % with one pack of 8,192 tokens per rank. Measured for 128 to 2,048 samples of
LLaVA-1.5's mix of lengths, 8 to 64 ranks and bounds of 2,048 to 16,384 tokens (run/dev/measure.py packing --plain).
"""

import bisect
import functools
import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from llava_ds.data.spreading import spread

_EVEN_ENOUGH = 0.01  # allowed difference between the heaviest and the lightest pack, relative to the mean
_EXCHANGES = 2  # maximum number of exchanges per pack


def plans_across_epochs(
    epochs: Iterable[Sequence[int]], dp: int, num_micro_batches: int, micro_size: int, begun: int = 0
) -> Iterator[list[list[list[int]]]]:
    """Yield plans of steps that continue into the next epoch when an epoch ends within a step.

    On several ranks, an epoch's last micro-batches are filled with its first samples. On one rank, they stay smaller.
    epochs: samples in order, per epoch; begun: micro-batches per rank that earlier steps took from the first epoch.
    Plans are as in step_plan.plan_by_count.

    Source: transformers 4.37's Trainer with accelerate 0.21's BatchSamplerShard, as used by LLaVA.
    """
    taken, step = 0, []
    for samples in epochs:
        size, samples = dp * micro_size, np.asarray(samples)
        last = -(-len(samples) // size) - 1
        for i in range(begun, last + 1):
            of_all = samples[i * size : (i + 1) * size].tolist()
            if dp > 1 and len(of_all) < size:
                of_all = np.take(samples, range(i * size, (i + 1) * size), mode="wrap").tolist()
            step.append([of_all[rank * micro_size : (rank + 1) * micro_size] for rank in range(dp)])
            taken += 1
            # The end of an epoch shorter than a step also ends the step. The count continues, as in transformers.
            if taken % num_micro_batches == 0 or i == last < num_micro_batches:
                yield [list(micro_batches) for micro_batches in zip(*step)]
                step = []
        begun = 0


def sample_costs(
    tokens: np.ndarray, others: Sequence[np.ndarray], pair_cost: float, other_costs: Sequence[float]
) -> np.ndarray:
    """Compute each sample's cost, (samples,) int64: its total work in units of one token.

    others: supervised tokens, tiles and pairs of tiles of each sample, or empty. A sample of L tokens costs
    L + pair_cost L**2 (matrices and attention) and other_costs times the others (output layer and tower), both in
    units of one token's matrices. The unit includes the work that every sample has per token, so that samples without
    images and with equal shares of supervised tokens cost L + pair_cost L**2.
    """
    costs = tokens + (pair_cost * tokens**2).astype(np.int64)
    if not len(others) or not any(other_costs) or not len(tokens):
        return costs
    beside = other_work(others, other_costs)
    common = (beside / tokens).min()
    return costs + ((beside - common * tokens) / (1 + common)).astype(np.int64)


def other_work(others: Sequence[np.ndarray], other_costs: Sequence[float]) -> np.ndarray:
    """Work of each sample in the output layer and the tower, in tokens. others, other_costs: as in sample_costs."""
    return sum(cost * np.asarray(each) for cost, each in zip(other_costs, others, strict=True))


def plan_by_tokens(
    samples: Sequence[int], lengths: Sequence[int], dp: int, max_tokens: int, costs: Sequence[int]
) -> list[list[list[int]]]:
    """Pack samples into packs of at most max_tokens tokens in few rounds, balanced by cost.

    lengths, costs: length and cost of each sample, above 0. A sample longer than max_tokens gets its own pack. Returns
    [rank][micro-batch] -> samples, heaviest first. ZeRO-3 needs equally many packs on every rank, so empty packs are
    added if there are too few samples.
    """
    lengths, costs = np.asarray(lengths, np.int64), np.asarray(costs, np.int64)
    fewest = _whole_rounds(_least_packs(lengths, max_tokens), dp)
    packs = _balance_packs(lengths, costs, fewest, max_tokens)
    if packs is None:
        full = _best_fit(lengths, max_tokens)
        most = _whole_rounds(len(full), dp)
        # One round more than the arithmetic minimum often suffices when best fit needs two more.
        for num_packs in sorted({min(fewest + dp, most), most} - {fewest}):
            packs = packs or _balance_packs(lengths, costs, num_packs, max_tokens)
        packs = packs or _filled_up(full, lengths, costs, most, max_tokens)
    # Run the heaviest pack first: if memory does not suffice, the run fails at once, not after an hour.
    sizes, places = _joined(packs)
    heaviest_first = np.argsort(-_sums(sizes, costs[places]), kind="stable").tolist()
    packs = _parts(sizes, np.asarray(samples, np.int64)[places])
    packs = [packs[i] for i in heaviest_first]
    return [packs[rank::dp] for rank in range(dp)]


def _joined(packs: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of samples of each pack, and all packs end to end."""
    return np.fromiter(map(len, packs), np.int64), np.fromiter(itertools.chain.from_iterable(packs), np.int64)


def _parts(sizes: np.ndarray, joined: np.ndarray) -> list[list[int]]:
    """Split `joined` into lists of these sizes."""
    values, ends = joined.tolist(), np.cumsum(sizes).tolist()
    return [values[begin:end] for begin, end in zip([0, *ends], ends)]


def _sums(sizes: np.ndarray, joined: np.ndarray) -> np.ndarray:
    """Split `joined` into parts of these sizes, and return the sum of each part."""
    ends = np.cumsum(sizes)
    sums = np.concatenate([[0], np.cumsum(joined)])
    return sums[ends] - sums[ends - sizes]


def _whole_rounds(num_packs: int, dp: int) -> int:
    return max(1, -(-num_packs // dp)) * dp


def _least_packs(lengths: np.ndarray, max_tokens: int) -> int:
    """Compute a lower bound of the number of packs."""
    own = lengths > max_tokens
    total = int(lengths[~own].sum())
    halves = int((2 * lengths > max_tokens).sum())  # no two of them fit together
    return max(halves, int(own.sum()) - (-total // max_tokens))


def _balance_packs(lengths: np.ndarray, costs: np.ndarray, num_packs: int, max_tokens: int) -> list[list[int]] | None:
    """Distribute sample positions over packs of nearly equal cost. Returns None if a pack then exceeds max_tokens."""
    count = max(1, len(lengths))
    packs, loads = _spread(costs, num_packs)
    _balance(packs, loads, count, int(_EVEN_ENOUGH * sum(loads) / num_packs), 0)
    sizes, entries = _joined(packs)
    places = entries % count
    tokens = _sums(sizes, lengths[places])
    if tokens.max() > max_tokens:  # packs of equal cost may differ in length
        packs = [sorted(pack) for pack in _parts(sizes, places - lengths[places] * count)]
        _balance(packs, tokens.tolist(), count, 0, max_tokens)
        sizes, entries = _joined(packs)
        places = entries % count
        tokens = _sums(sizes, lengths[places])
    if not ((tokens <= max_tokens) | (sizes < 2)).all():
        return None
    packs, by_length = _parts(sizes, places), np.argsort(lengths, kind="stable")
    if (np.diff(costs[by_length]) >= 0).all():  # packs of equal length are of nearly equal cost
        return packs
    return _balance_within(packs, lengths, costs, max_tokens)


def _balance_within(packs: list[list[int]], lengths: np.ndarray, costs: np.ndarray, max_tokens: int) -> list[list[int]]:
    """Balance packs of sample positions by cost. Packs within max_tokens tokens stay within it."""
    count, cost_of = len(lengths), costs.tolist()
    entries = [sorted([i - cost_of[i] * count for i in pack]) for pack in packs]
    loads = [sum([cost_of[i] for i in pack]) for pack in packs]
    within = functools.partial(_exchange_within, tokens=lengths.tolist(), max_tokens=max_tokens)
    _balance(entries, loads, count, int(_EVEN_ENOUGH * sum(loads) / len(loads)), 0, within)
    return [[entry % count for entry in pack] for pack in entries]


def _entries(weights: np.ndarray) -> np.ndarray:
    """Encode weight and position of each sample as one number, heaviest first: quick to sort, find and move.

    entry // count is the negative weight, entry % count the position.
    """
    count = len(weights)
    return np.sort(np.arange(count) - weights * count)


def _spread(weights: np.ndarray, num_packs: int) -> tuple[list[list[int]], list[int]]:
    """Put the heaviest samples first, each into the lightest pack. Returns packs of entries, and the packs' weights."""
    entries = _entries(weights)
    heaviest_first = -(entries // max(1, len(weights)))
    pack_of = spread(heaviest_first[None], num_packs)[0]
    by_pack, sizes = np.argsort(pack_of, kind="stable"), np.bincount(pack_of, minlength=num_packs)
    return _parts(sizes, entries[by_pack]), _sums(sizes, heaviest_first[by_pack]).tolist()


def _best_fit(lengths: np.ndarray, max_tokens: int) -> list[list[int]]:
    """Pack sample positions by best fit: the longest first, each into the fullest pack with room."""
    packs: list[list[int]] = []
    count = len(lengths)
    rooms: list[int] = []  # room * count + pack, sorted
    for entry in _entries(lengths).tolist():
        length = -(entry // count)
        found = bisect.bisect_left(rooms, length * count)
        if found < len(rooms):
            room = rooms.pop(found) - length * count
        else:
            room = max(0, max_tokens - length) * count + len(packs)
            packs.append([])
        packs[room % count].append(entry % count)
        bisect.insort(rooms, room)
    return packs


def _filled_up(
    packs: list[list[int]], lengths: np.ndarray, costs: np.ndarray, num_packs: int, max_tokens: int
) -> list[list[int]]:
    """Split the heaviest pack in two until there are num_packs, then balance them by cost.

    packs: sample positions. Packs within max_tokens tokens stay within it. Empty packs are added once every pack is
    down to one sample.
    """
    count, cost_of = len(lengths), costs.tolist()
    filled = [sorted([i - cost_of[i] * count for i in pack]) for pack in packs]  # entries
    loads = [sum([cost_of[i] for i in pack]) for pack in packs]
    heap = [(-load, p) for p, load in enumerate(loads) if len(filled[p]) > 1]
    heapq.heapify(heap)
    while heap and len(filled) < num_packs:
        p = heapq.heappop(heap)[1]
        halves: list[list[int]] = [[], []]
        sums = [0, 0]
        for entry in filled[p]:
            lighter = sums[1] < sums[0]
            halves[lighter].append(entry)
            sums[lighter] -= entry // count
        filled[p], loads[p] = halves[0], sums[0]
        filled.append(halves[1])
        loads.append(sums[1])
        for half in (p, len(filled) - 1):
            if len(filled[half]) > 1:
                heapq.heappush(heap, (-loads[half], half))
    evened = _balance_within([[entry % count for entry in pack] for pack in filled], lengths, costs, max_tokens)
    return evened + [[] for _ in range(num_packs - len(filled))]


def _balance(
    packs: list[list[int]],
    loads: list[int],
    count: int,
    slack: int,
    bound: int,
    exchange: Callable[[list[int], list[int], int, int, int], tuple[int, int]] | None = None,
) -> None:
    """Exchange samples of the heaviest pack for lighter samples of the lightest pack, in place.

    Ends when the packs differ by at most slack, when none is above bound, or when no exchange helps. packs: lists of
    entries; loads: weight of each pack; count: number of samples; exchange: a function like _exchange (the default). No
    pack becomes heavier than the heaviest was, and a heavy pack of one sample is left unchanged.
    """
    exchange = exchange or _exchange
    ranked = sorted(zip(loads, range(len(packs))))
    for _ in range(_EXCHANGES * len(packs)):
        (heavy, h), (light, p) = ranked[-1], ranked[0]
        if heavy - light <= slack or heavy <= bound:
            break
        del ranked[-1]
        entry, other = exchange(packs[h], packs[p], heavy - light, slack, count) if len(packs[h]) > 1 else (0, 0)
        if not entry:  # try the next heaviest
            continue
        packs[h].remove(entry)
        bisect.insort(packs[p], entry)
        if other:
            packs[p].remove(other)
            bisect.insort(packs[h], other)
        moved = other // count - entry // count
        loads[h], loads[p] = heavy - moved, light + moved
        del ranked[0]
        bisect.insort(ranked, (loads[h], h))
        bisect.insort(ranked, (loads[p], p))


def _exchange(heavy: list[int], light: list[int], apart: int, slack: int, count: int) -> tuple[int, int]:
    """Find an entry of the heavy pack and one of the light pack (0: none) whose exchange best evens the two packs.

    Stops early at a pair well within slack. Returns (0, 0) if no exchange helps. apart: difference of the packs'
    weights.
    """
    half = apart * count // 2
    best, found = half - count, (0, 0)
    for entry in heavy:
        wanted = entry + half
        k = bisect.bisect_left(light, wanted)
        other = light[k] if k < len(light) else 0
        if abs(other - wanted) < best:
            best, found = abs(other - wanted), (entry, other)
        if k and wanted - light[k - 1] < best:
            best, found = wanted - light[k - 1], (entry, light[k - 1])
        if best <= slack * count // 4:
            break
    return found


def _exchange_within(
    heavy: list[int], light: list[int], apart: int, slack: int, count: int, tokens: list[int], max_tokens: int
) -> tuple[int, int]:
    """Like _exchange, but only with pairs that leave both packs within max_tokens. Slower: tries every pair.

    tokens: number of tokens of each sample.
    """
    heavy_room, light_room = (max_tokens - sum([tokens[entry % count] for entry in pack]) for pack in (heavy, light))
    half = apart * count // 2
    best, found = half - count, (0, 0)
    for entry in heavy:
        for other in (0, *light):
            off = abs(other - entry - half)
            if off < best:
                grows = tokens[entry % count] - (tokens[other % count] if other else 0)
                if -heavy_room <= grows <= light_room:
                    best, found = off, (entry, other)
        if best <= slack * count // 4:
            break
    return found
