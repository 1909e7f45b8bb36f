"""Who computes what: the samples of one optimizer step, laid on ranks and micro-batches.

The plan follows from the samples' lengths alone, so every rank makes the same one and nothing is communicated.
"""

import bisect
import functools
import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

_EVEN_ENOUGH = 0.01  # of a pack: the heaviest and the lightest may differ by this
_EXCHANGES = 2  # of samples, per pack, at most


def plan_by_count(
    samples: list[int], world_size: int, num_micro_batches: int, micro_size: int
) -> list[list[list[int]]]:
    """The plain layout: micro-batches of micro_size samples, dealt to the ranks in the samples' order.

    Returns [rank][micro-batch] -> samples. A last, smaller step leaves some micro-batches short or empty.
    """
    plan = [[[] for _ in range(num_micro_batches)] for _ in range(world_size)]
    # A short step is spread evenly, so that no rank idles while another has all of it.
    slots = world_size * num_micro_batches
    base, extra = divmod(min(len(samples), slots * micro_size), slots)
    first = 0
    for slot in range(slots):
        micro, rank = divmod(slot, world_size)
        size = base + (slot < extra)
        plan[rank][micro] = samples[first : first + size]
        first += size
    return plan


def plans_across_epochs(
    epochs: Iterable[list[int]], world_size: int, num_micro_batches: int, micro_size: int, begun: int = 0
) -> Iterator[list[list[list[int]]]]:
    """Step after step of whole micro-batches, which goes on into the next epoch where one ends within it.

    Several ranks' last micro-batches of an epoch are filled up from its first samples; a single rank's stays short.
    epochs: the samples of each, in order; begun: micro-batches of each rank that earlier steps took from the first one;
    plans as plan_by_count returns them.
    Source: transformers 4.37's Trainer with accelerate 0.21's BatchSamplerShard, under LLaVA.
    """
    taken, step = 0, []
    for samples in epochs:
        size = world_size * micro_size
        if world_size > 1:
            samples = samples + list(itertools.islice(itertools.cycle(samples), -len(samples) % size))
        last = -(-len(samples) // size) - 1
        for i in range(begun, last + 1):
            of_all = samples[i * size : (i + 1) * size]
            step.append([of_all[rank * micro_size : (rank + 1) * micro_size] for rank in range(world_size)])
            taken += 1
            # What is shorter than a step by itself ends one, too, and the count goes on: so it is in transformers.
            if taken % num_micro_batches == 0 or i == last < num_micro_batches:
                yield [list(micro_batches) for micro_batches in zip(*step)]
                step = []
        begun = 0


def plan_by_tokens(
    samples: list[int],
    lengths: Sequence[int],
    world_size: int,
    max_tokens: int,
    costs: Sequence[int] | None = None,
) -> list[list[list[int]]]:
    """Packs of at most max_tokens tokens (a longer sample is one of its own), in few rounds and evened out by cost.

    lengths and costs are of each of the samples, above 0; without costs it is the tokens that are evened out. Returns
    [rank][micro-batch] -> samples, heaviest first: as many on every rank, as ZeRO-3 needs, and empty ones only where
    samples are too few. In a round every rank waits for the slowest: packs of one cost waste nothing, full ones and a
    light last one do.
    """
    lengths = np.asarray(lengths, np.int64)
    costs = lengths if costs is None else np.asarray(costs, np.int64)
    fewest = _whole_rounds(_least_packs(lengths, max_tokens), world_size)
    packs = _even_packs(lengths, costs, fewest, max_tokens)
    if packs is None:
        full = _best_fit(lengths, max_tokens)
        most = _whole_rounds(len(full), world_size)
        # One round more than is possible by arithmetic is often found where best fit needs two.
        for num_packs in sorted({min(fewest + world_size, most), most} - {fewest}):
            packs = packs or _even_packs(lengths, costs, num_packs, max_tokens)
        packs = packs or _filled_up(full, lengths, costs, most, max_tokens)
    # What is heaviest runs out of memory, if anything does: at once, and not in an hour.
    cost_of = costs.tolist()
    packs = sorted(packs, key=lambda pack: -sum([cost_of[i] for i in pack]))
    packs = [[samples[i] for i in pack] for pack in packs]
    return [packs[rank::world_size] for rank in range(world_size)]


def _whole_rounds(num_packs: int, world_size: int) -> int:
    return max(1, -(-num_packs // world_size)) * world_size


def _least_packs(lengths: np.ndarray, max_tokens: int) -> int:
    """Packs that are needed at the very least."""
    own = lengths > max_tokens
    total = int(lengths[~own].sum())
    halves = int((2 * lengths > max_tokens).sum())  # no two of them go together
    return max(halves, int(own.sum()) - (-total // max_tokens))


def _even_packs(lengths: np.ndarray, costs: np.ndarray, num_packs: int, max_tokens: int) -> list[list[int]] | None:
    """Positions of the samples in packs of nearly one cost; None if these don't keep the bound."""
    count = len(lengths)
    packs, loads = _spread(costs, num_packs)
    mean, by_tokens = sum(loads) / num_packs, costs is lengths
    slack = min(_EVEN_ENOUGH * mean, max_tokens - mean) if by_tokens else _EVEN_ENOUGH * mean
    _even(packs, loads, count, max(0, int(slack)), 0)
    places = [[entry % count for entry in pack] for pack in packs]
    if not by_tokens:
        tokens = lengths.tolist()
        loads = [sum([tokens[i] for i in pack]) for pack in places]
        if max(loads) > max_tokens:  # packs of one cost are not of one length
            packs = [sorted([i - tokens[i] * count for i in pack]) for pack in places]
            _even(packs, loads, count, 0, max_tokens)
            places = [[entry % count for entry in pack] for pack in packs]
    return places if all(load <= max_tokens or len(pack) < 2 for load, pack in zip(loads, places)) else None


def _entries(weights: np.ndarray) -> np.ndarray:
    """Weight and position of every sample as one number, rising from the heaviest: quick to sort, find and move.

    entry // count is the weight below zero, entry % count the position.
    """
    count = len(weights)
    return np.sort(np.arange(count) - weights * count)


def _spread(weights: np.ndarray, num_packs: int) -> tuple[list[list[int]], list[int]]:
    """The heaviest first, each into the lightest pack. Returns packs of entries, and the weight of each."""
    entries = _entries(weights)
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    heap = list(range(num_packs))  # weight * num_packs + pack
    steps = -(entries // max(1, len(weights))) * num_packs
    for entry, step in zip(entries.tolist(), steps.tolist()):
        lightest = heap[0]
        packs[lightest % num_packs].append(entry)
        heapq.heapreplace(heap, lightest + step)
    loads = [0] * num_packs
    for load in heap:
        loads[load % num_packs] = load // num_packs
    return packs, loads


def _best_fit(lengths: np.ndarray, max_tokens: int) -> list[list[int]]:
    """Positions of the samples in packs: the longest first, each into the fullest that has room."""
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
    """num_packs packs out of fewer ones: the heaviest split in two, again and again, then all evened out by cost.

    packs: positions of the samples, within max_tokens tokens, and so are the returned ones. Empty ones are added where
    every pack has come down to one sample.
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
    within = functools.partial(_exchange_within, tokens=lengths.tolist(), max_tokens=max_tokens)
    _even(filled, loads, count, int(_EVEN_ENOUGH * sum(loads) / len(loads)), 0, within)
    return [[entry % count for entry in pack] for pack in filled] + [[] for _ in range(num_packs - len(filled))]


def _even(
    packs: list[list[int]],
    loads: list[int],
    count: int,
    slack: int,
    bound: int,
    exchange: Callable[[list[int], list[int], int, int, int], tuple[int, int]] | None = None,
) -> None:
    """Exchange samples of the heaviest packs for lighter ones of the lightest, in place.

    Until they are no more than slack apart, or none is above bound, or nothing helps. packs of entries; loads: their
    weights; count: samples; exchange: _exchange or one like it. None becomes heavier than the heaviest was, and what is
    alone in a heavy one stays so.
    """
    exchange = exchange or _exchange
    ranked = sorted(zip(loads, range(len(packs))))
    for _ in range(_EXCHANGES * len(packs)):
        (heavy, h), (light, p) = ranked[-1], ranked[0]
        if heavy - light <= slack or heavy <= bound:
            break
        del ranked[-1]
        entry, other = exchange(packs[h], packs[p], heavy - light, slack, count) if len(packs[h]) > 1 else (0, 0)
        if not entry:  # the next one may have something to give
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
    """An entry of the heavy pack and one of the light one, or 0 for none, whose exchange halves what they are apart.

    As nearly as there are two, or well within slack. (0, 0) if none bring them nearer to each other.
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
    """As _exchange, among what leaves both packs within max_tokens: slower, as it looks at every two.

    tokens: of each of the samples.
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
