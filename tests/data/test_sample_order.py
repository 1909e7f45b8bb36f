"""The order of samples follows from the seed and the step's number alone, and is LLaVA's where LLaVA has one."""

import itertools
import json
from pathlib import Path

import pytest
import torch

from llava_ds.data.sample_order import (
    SampleOrder,
    by_length,
    by_length_bucket,
    by_length_next,
    by_modality_length,
    by_varying_length,
)

WAYS = ("random", "file", "modality", "modality_auto", "length", "varlen", "bucket")
GOLDENS = Path(__file__).parent / "goldens"


def order_of(num_samples: int, batch_size: int, how: str = "random", seed: int = 1, micro: int = 1) -> SampleOrder:
    drawn = torch.randint(1, 40, (num_samples,), generator=torch.Generator().manual_seed(9)).tolist()
    lengths = [-n if how.startswith("modality") and i % 3 == 0 else n for i, n in enumerate(drawn)]
    return SampleOrder(num_samples, batch_size, seed, how, lengths, micro)


def grouped(how: str, lengths: list[int], micro: int, num_micro_batches: int, generator: torch.Generator) -> list[int]:
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
        assert list(itertools.chain(*mine)) == order.epoch(epoch)


@pytest.mark.parametrize("how", [how for how in WAYS if how != "file"])
def test_epochs_and_seeds_differ(how):
    orders = {tuple(order_of(50, 4, how, seed).epoch(epoch)) for seed in (0, 100) for epoch in range(4)}
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
        assert order.epoch(epoch) == grouped(how, lengths, 2, batch_size // 2, generator)


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
    assert group(row["lengths"], row["batch_size"], row["world_size"], generator) == row["order"]


@pytest.mark.parametrize("row", json.loads((GOLDENS / "sampler_next.json").read_text()))
def test_orders_of_the_next_sampler_are_its_own(row):
    """Made by LLaVA-NeXT's own functions and transformers', two epochs behind the data loader's own draw."""
    how, micro, ranks, accumulation = row["how"], row["micro"], row["ranks"], row["accumulation"]
    order = SampleOrder(
        len(row["lengths"]), micro * ranks * accumulation, row["seed"], how, row["lengths"], micro, accumulation
    )
    assert [order.epoch(epoch) for epoch in range(2)] == row["epochs"]


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
    assert [order.epoch(epoch) for epoch in range(3)] == theirs
