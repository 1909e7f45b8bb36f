"""Who computes what: the samples of one optimizer step, laid on ranks and micro-batches.

The plan follows from the samples' lengths alone, so every rank makes the same one and nothing is communicated.
"""

import itertools
from collections.abc import Iterable, Iterator


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
    epochs: Iterable[list[int]], world_size: int, num_micro_batches: int, micro_size: int
) -> Iterator[list[list[list[int]]]]:
    """Step after step of whole micro-batches, which goes on into the next epoch where one ends within it.

    Several ranks' last micro-batches of an epoch are filled up from its first samples; a single rank's stays short.
    epochs: the samples of each, in order; plans as plan_by_count returns them.
    Source: transformers 4.37's Trainer with accelerate 0.21's BatchSamplerShard, under LLaVA.
    """
    taken, step = 0, []
    for samples in epochs:
        size = world_size * micro_size
        if world_size > 1:
            samples = samples + list(itertools.islice(itertools.cycle(samples), -len(samples) % size))
        last = -(-len(samples) // size) - 1
        for i in range(last + 1):
            of_all = samples[i * size : (i + 1) * size]
            step.append([of_all[rank * micro_size : (rank + 1) * micro_size] for rank in range(world_size)])
            taken += 1
            # What is shorter than a step by itself ends one, too, and the count goes on: so it is in transformers.
            if taken % num_micro_batches == 0 or i == last < num_micro_batches:
                yield [list(micro_batches) for micro_batches in zip(*step)]
                step = []


def plan_by_tokens(samples: list[int], lengths: list[int], world_size: int, max_tokens: int) -> list[list[list[int]]]:
    """Balanced packs of at most max_tokens tokens each (a longer sample is a pack of its own).

    lengths: tokens of each of the samples. Returns [rank][micro-batch] -> samples; every rank has the same number of
    micro-batches, as ZeRO-3 needs, and some may be empty. Longest first into the pack with the fewest tokens.
    """
    order = sorted(range(len(samples)), key=lambda i: (-lengths[i], i))
    rounds = max(1, -(-sum(min(length, max_tokens) for length in lengths) // (max_tokens * world_size)))
    while True:
        packs: list[list[int]] = [[] for _ in range(world_size * rounds)]
        fill = [0] * len(packs)
        for i in order:
            target = min(range(len(packs)), key=lambda p: (fill[p], p))
            packs[target].append(i)
            fill[target] += lengths[i]
        if all(tokens <= max_tokens or len(pack) == 1 for tokens, pack in zip(fill, packs)):
            break
        rounds += 1
    # Back to the samples' order within a pack, and packs dealt out heaviest first.
    packs = [sorted(pack) for pack in sorted(packs, key=lambda pack: -sum(lengths[i] for i in pack))]
    return [[[samples[i] for i in packs[r * world_size + rank]] for r in range(rounds)] for rank in range(world_size)]
