"""The order of samples follows from the seed and the step's number alone, and is LLaVA's where LLaVA has one."""

import dataclasses
import itertools
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from llava_ds.data import permutations, sample_order
from llava_ds.data.length_orders import (
    by_length,
    by_length_bucket,
    by_length_next,
    by_modality_length,
    by_varying_length,
)
from llava_ds.data.sample_order import SampleOrder

WAYS = ("random", "file", "modality", "modality_auto", "length", "varlen", "bucket")
GOLDENS = Path(__file__).parent / "goldens"


def order_of(num_samples: int, batch_size: int, how: str = "random", seed: int = 1, micro: int = 1) -> SampleOrder:
    drawn = torch.randint(1, 40, (num_samples,), generator=torch.Generator().manual_seed(9)).tolist()
    lengths = [-n if how.startswith("modality") and i % 3 == 0 else n for i, n in enumerate(drawn)]
    return SampleOrder(num_samples, batch_size, seed, how, lengths, micro)


def grouped(how: str, lengths: list[int], micro: int, num_micro_batches: int, generator: torch.Generator) -> np.ndarray:
    """What an epoch's order is made by."""
    if how == "varlen":
        return by_varying_length(lengths, micro * num_micro_batches, 1, generator)
    if how == "length":
        return by_length_next(lengths, micro, num_micro_batches, generator)
    group = by_length if how == "modality" else by_length_next
    return by_modality_length(lengths, micro, num_micro_batches, generator, group)


def take(order: SampleOrder, count: int, start_step: int = 0) -> list[list[int]]:
    return list(itertools.islice(order.steps(start_step), count))


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize(("num_samples", "batch_size"), [(12, 4), (13, 4), (3, 8), (1, 1), (100, 8)])
def test_every_epoch_is_a_permutation_in_steps_of_the_batch_size(num_samples, batch_size, how):
    order = order_of(num_samples, batch_size, how)
    steps = take(order, 3 * order.steps_per_epoch)
    for epoch in range(3):
        mine = steps[epoch * order.steps_per_epoch : (epoch + 1) * order.steps_per_epoch]
        assert sorted(itertools.chain(*mine)) == list(range(num_samples))
        assert all(len(step) == batch_size for step in mine[:-1]) and 1 <= len(mine[-1]) <= batch_size
        assert list(itertools.chain(*mine)) == order.epoch(epoch).tolist()


@pytest.mark.parametrize("how", [how for how in WAYS if how != "file"])
def test_epochs_and_seeds_differ(how):
    orders = {tuple(order_of(50, 4, how, seed).epoch(epoch).tolist()) for seed in (0, 100) for epoch in range(4)}
    assert len(orders) == 8


def test_without_shuffling_the_order_is_the_files():
    assert take(order_of(5, 2, "file"), 4) == [[0, 1], [2, 3], [4], [0, 1]]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("start_step", [1, 3, 4, 5, 9, 23])
def test_starting_at_a_step_equals_skipping_to_it(start_step, how):
    order = order_of(13, 4, how)
    assert take(order, 6, start_step) == take(order, start_step + 6)[start_step:]


@pytest.mark.parametrize("kinds", ["mixed", "pictures", "text"])
@pytest.mark.parametrize("how", ["modality", "modality_auto", "length", "varlen"])
@pytest.mark.parametrize(("num_samples", "batch_size"), [(29, 4), (24, 4), (3, 8)])
def test_a_later_epoch_is_drawn_as_if_all_before_it_had_been_made(num_samples, batch_size, how, kinds):
    lengths = [
        i % 7 + 1 if kinds == "pictures" or (kinds == "mixed" and i % 3) else -(i % 5) - 1 for i in range(num_samples)
    ]
    lengths = lengths if how.startswith("modality") else [abs(length) for length in lengths]
    order = SampleOrder(num_samples, batch_size, 5, how, lengths, 2)
    generator = torch.Generator().manual_seed(5)
    for epoch in range(4):
        torch.empty((), dtype=torch.int64).random_(generator=generator)  # the data loader's
        assert np.array_equal(order.epoch(epoch), grouped(how, lengths, 2, batch_size // 2, generator))


@pytest.mark.parametrize("how", WAYS)
def test_the_order_does_not_depend_on_the_global_generator(how):
    torch.manual_seed(1)
    one = take(order_of(13, 4, how), 5)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert take(order_of(13, 4, how), 5) == one
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("row", json.loads((GOLDENS / "sampler.json").read_text()))
def test_grouped_orders_are_llavas(row):
    """Made by LLaVA's own functions under torch.manual_seed(row's seed): mixed kinds, one kind, uneven last steps."""
    group = {"modality": by_modality_length, "length": by_length}[row["how"]]
    generator = torch.Generator().manual_seed(row["seed"])
    assert group(row["lengths"], row["batch_size"], row["world_size"], generator).tolist() == row["order"]


@pytest.mark.parametrize("row", json.loads((GOLDENS / "sampler_next.json").read_text()))
def test_orders_of_the_next_sampler_are_its_own(row):
    """Made by LLaVA-NeXT's own functions and transformers', two epochs behind the data loader's own draw."""
    how, micro, ranks, accumulation = row["how"], row["micro"], row["ranks"], row["accumulation"]
    order = SampleOrder(
        len(row["lengths"]), micro * ranks * accumulation, row["seed"], how, row["lengths"], micro, accumulation
    )
    assert [order.epoch(epoch).tolist() for epoch in range(2)] == row["epochs"]


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_a_step_of_the_modality_order_holds_one_kind(micro):
    order = order_of(200, 8, "modality", micro=micro)
    kinds = [{order.lengths[i] > 0 for i in step} for step in take(order, order.steps_per_epoch)]
    assert all(len(kind) == 1 for kind in kinds[:-2])  # what is left of both kinds is mixed


def test_a_step_of_the_bucket_order_has_nearly_one_length():
    lengths = torch.randint(1, 2000, (6400,), generator=torch.Generator().manual_seed(0)).tolist()
    steps = torch.tensor(by_length_bucket(lengths, 16, torch.Generator().manual_seed(0))).view(-1, 16)
    spread = torch.tensor(lengths)[steps]
    assert (spread.max(1).values - spread.min(1).values).float().mean() < 2000 / 16
    firsts = spread[:, 0]
    assert not torch.equal(firsts, firsts.sort().values)  # in random order


@pytest.mark.parametrize("how", ["random", "file", "modality", "bucket"])  # LLaVA-NeXT's depend on it
def test_a_steps_samples_do_not_depend_on_how_it_is_laid_out(how):
    """More ranks with fewer micro-batches or smaller ones: the same samples in every step."""
    laid_out = [[sorted(step) for step in take(order_of(50, 8, how, micro=micro), 14)] for micro in (8, 4, 2, 1)]
    assert all(steps == laid_out[0] for steps in laid_out)


@pytest.mark.parametrize("how", ["random", "modality", "modality_auto", "length", "varlen"])
def test_a_seed_gives_the_order_of_torchs_loader_in_one_process(how):
    """As LLaVA's Trainer has it: torch's global generator seeded once, a DataLoader, a new pass over it every epoch."""
    order = order_of(50, 8, how, seed=42, micro=4)

    class Grouped(torch.utils.data.Sampler):
        def __iter__(self):
            return iter(grouped(how, order.lengths, 4, 2, torch.default_generator))

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(42)
        samples = range(50)
        sampler = torch.utils.data.RandomSampler(samples) if how == "random" else Grouped()
        loader = torch.utils.data.DataLoader(samples, batch_size=4, sampler=sampler)
        theirs = [torch.cat(list(loader)).tolist() for _ in range(3)]
    assert [order.epoch(epoch).tolist() for epoch in range(3)] == theirs


def cut(indices: list[int], size: int) -> list[list[int]]:
    return [indices[i : i + size] for i in range(0, len(indices), size)]


def even_chunks(indices: list[int], lengths: list[int], num_chunks: int) -> list[list[int]]:
    """LLaVA's split_to_even_chunks, step by step."""
    if len(indices) % num_chunks:
        return [indices[i::num_chunks] for i in range(num_chunks)]
    size = len(indices) // num_chunks
    chunks: list[list[int]] = [[] for _ in range(num_chunks)]
    totals = [0.0] * num_chunks
    for index in indices:
        shortest = totals.index(min(totals))
        chunks[shortest].append(index)
        totals[shortest] = math.inf if len(chunks[shortest]) == size else totals[shortest] + lengths[index]
    return chunks


def evened(order: list[int], lengths: list[int], micro: int, num_micro: int) -> list[list[int]]:
    steps = [sorted(step, key=lambda i: -lengths[i]) for step in cut(order, micro * num_micro)]
    return [list(itertools.chain(*even_chunks(step, lengths, num_micro))) for step in steps]


def slow_length(lengths, micro, num_micro, generator):
    order = torch.randperm(len(lengths), generator=generator).tolist()
    return list(itertools.chain(*evened(order, lengths, micro, num_micro)))


def slow_next(lengths, micro, num_micro, generator):
    order = torch.randperm(len(lengths), generator=generator).tolist()
    together = micro * num_micro * max(1, min(len(lengths) // (4 * micro * num_micro), 50))
    parts = [sorted(part, key=lambda i: -lengths[i]) for part in cut(order, together)]
    longest = max(parts, key=lambda part: lengths[part[0]])
    parts[0][0], longest[0] = longest[0], parts[0][0]
    steps = evened(list(itertools.chain(*parts)), lengths, micro, num_micro)
    return list(itertools.chain(*(steps[i] for i in torch.randperm(len(steps), generator=generator))))


def slow_varying(lengths, step_size, accumulation, generator):
    places = torch.randperm(len(lengths), generator=generator).tolist()
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    mixed = [sorted(part, key=lambda i: -places[i]) for part in cut(longest_first, 8 * step_size * accumulation)]
    groups = cut(list(itertools.chain(*mixed)), step_size * accumulation)
    return list(itertools.chain(*(groups[i] for i in torch.randperm(len(groups), generator=generator))))


def slow_modality(lengths, micro, num_micro, generator, group):
    kinds = [[i for i, n in enumerate(lengths) if n > 0], [i for i, n in enumerate(lengths) if n <= 0]]
    if not all(kinds):
        return group(lengths, micro, num_micro, generator)
    steps, rest = [], []
    for indices in kinds:
        own = group([abs(lengths[i]) for i in indices], micro, num_micro, generator)
        mine = cut([indices[i] for i in own], micro * num_micro)
        rest += mine.pop()
        steps += mine
    shuffled = [steps[i] for i in torch.randperm(len(steps), generator=generator)]
    return [*itertools.chain(*shuffled), *sorted(rest)]


def slow_bucket(lengths, batch_size, generator):
    order = torch.randperm(len(lengths), generator=generator).tolist()
    whole = len(order) - len(order) % batch_size
    buckets = [sorted(part, key=lambda i: lengths[i]) for part in cut(order[:whole], 64 * batch_size)]
    steps = [step for bucket in buckets for step in cut(bucket, batch_size)]
    shuffled = [steps[i] for i in torch.randperm(len(steps), generator=generator)]
    return [*itertools.chain(*shuffled), *order[whole:]]


def test_orders_equal_those_of_a_slow_reference(monkeypatch):
    """Random sizes, lengths with ties and zeros, seeds and layouts; sorting in parts of different sizes."""
    draw = random.Random(0)
    for _ in range(120):
        monkeypatch.setattr(permutations, "SORTED_TOGETHER", draw.choice([32, 500, 1 << 20]))
        number, micro, num_micro = draw.randint(1, 1500), draw.choice([1, 2, 3, 8, 16]), draw.choice([1, 2, 3, 8, 96])
        lengths = [draw.randint(draw.choice([0, 1]), draw.choice([3, 3000])) for _ in range(number)]
        share = draw.choice([0, 0, 0.05, 0.5, 1])
        signed = [-n if draw.random() < share else n for n in lengths]
        seed, accumulation, size = draw.randint(0, 99), draw.choice([1, 2]), micro * num_micro
        pairs = [
            (by_length(signed, micro, num_micro, seeded(seed)), slow_length(signed, micro, num_micro, seeded(seed))),
            (by_length_next(signed, micro, num_micro, seeded(seed)), slow_next(signed, micro, num_micro, seeded(seed))),
            (
                by_varying_length(lengths, size, accumulation, seeded(seed)),
                slow_varying(lengths, size, accumulation, seeded(seed)),
            ),
            (by_length_bucket(lengths, size, seeded(seed)), slow_bucket(lengths, size, seeded(seed))),
        ]
        for group, slow in ((by_length, slow_length), (by_length_next, slow_next)):
            found = by_modality_length(signed, micro, num_micro, seeded(seed), group)
            pairs.append((found, slow_modality(signed, micro, num_micro, seeded(seed), slow)))
        assert all(found.tolist() == expected for found, expected in pairs), (number, micro, num_micro, seed, share)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize(("unit", "together"), [(8, 1 << 20), (8, 16), (6, 7), (60, 8)])
def test_scanning_gives_the_units_of_all_epochs(how, unit, together, monkeypatch):
    monkeypatch.setattr(permutations, "SORTED_TOGETHER", together)
    order = order_of(50, 8, how)
    per_epoch = math.ceil(50 / unit)
    expected = [part for epoch in range(3) for part in cut(order.epoch(epoch).tolist(), unit)]
    for first, last in ((0, 3 * per_epoch), (1, 2 * per_epoch - 1), (2, 2)):
        found = list(order.scan(unit, first, last))
        assert [number for number, _ in found] == [
            first + sum(len(rows) for _, rows in found[:i]) for i in range(len(found))
        ]
        assert [row.tolist() for _, rows in found for row in rows] == expected[first:last]


@pytest.mark.parametrize("how", WAYS)
def test_a_large_order_is_made_once_for_all_processes(how, tmp_path, monkeypatch):
    monkeypatch.setattr(sample_order, "SHARED_SAMPLES", 50)
    alone, made = order_of(50, 8, how), []
    order = dataclasses.replace(alone, folder=tmp_path / "index")
    once = SampleOrder._made
    monkeypatch.setattr(SampleOrder, "_made", lambda self, epoch: made.append(epoch) or once(self, epoch))
    for epoch in (0, 1, 0, 1):
        found = order.epoch(epoch)
        assert isinstance(found.base, np.memmap) and found.dtype == np.int32
        assert np.array_equal(found, once(alone, epoch))
    assert made == [0, 1]
    for other in ({"seed": 2}, {"batch_size": 4}, {"micro_batch_size": 2}, {"accumulation": 2}, {"how": "bucket"}):
        changed = dataclasses.replace(order, **other)
        if changed != order:
            assert np.array_equal(changed.epoch(0), once(dataclasses.replace(changed, folder=None), 0))
    assert made[2:] == [0] * (len(made) - 2) and len(made) in (6, 7)
