"""Windows of optimizer steps: all ranks together see the step's samples, each once, whoever decodes them."""

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch
import toys

from llava_ds.batch import Batch
from llava_ds.data import packing
from llava_ds.data.dataset import EncodedDataset
from llava_ds.data.heaviest import heaviest
from llava_ds.data.loader import Counts, Window, windows
from llava_ds.data.packing import plan_by_tokens
from llava_ds.data.sample_order import SampleOrder
from llava_ds.data.step_plan import Packing, StepPlan
from llava_ds.runtime.mesh import Mesh

CPU = torch.device("cpu")
KINDS = "itititiiittti"
LAYOUTS = {
    "by count": {"micro_batch_size": 2, "num_micro_batches": 2, "tokens_per_micro_batch": None},
    "by tokens": {"micro_batch_size": 2, "num_micro_batches": 2, "tokens_per_micro_batch": 260},
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory, tokenizer) -> EncodedDataset:
    folder = tmp_path_factory.mktemp("loader")
    return toys.encoded(**toys.write_data(folder, KINDS), tokenizer=tokenizer, cache_dir=folder / "cache")


def plan_of(dataset: EncodedDataset, packing: Packing, num_steps: int = 0) -> StepPlan:
    return StepPlan(dataset, SampleOrder(len(dataset), packing.batch_size, seed=3), packing, num_steps)


def collect(plan: StepPlan, num_steps: int, rank: int = 0, done: int = 0, workers: int = 0) -> list[Window]:
    plan = dataclasses.replace(plan, num_steps=num_steps)
    return list(windows(plan, Mesh(plan.packing.dp, rank), done=done, num_workers=workers, device=CPU))


def samples_in(batch: Batch, dataset: EncodedDataset) -> list[int]:
    """Which samples a batch holds, told by their ids, for every toy record is another one."""
    known = {tuple(dataset[i].input_ids.clamp(min=0).tolist()): i for i in range(len(dataset))}
    assert len(known) == len(dataset)
    starts = batch.cu_seqlens.tolist()
    ids = batch.input_ids[0].tolist()
    return [known[tuple(ids[a:b])] for a, b in itertools.pairwise(starts) if ids[a:b] != [0]]


def equal(one: Window, other: Window) -> bool:
    same = (one.num_planned, one.counts, one.broken) == (other.num_planned, other.counts, other.broken)
    pairs = [
        (getattr(a, field.name), getattr(b, field.name))
        for a, b in zip(one.batches, other.batches)
        for field in dataclasses.fields(a)
    ]
    return same and all(itertools.starmap(equal_values, pairs))


def equal_values(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal_values(value, other[name]) for name, value in one.items())
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(equal_values, one, other))
    return one == other


@pytest.mark.parametrize("dp", [1, 2])
def test_steps_across_epochs_take_all_samples_in_turn_and_can_be_started_anywhere(dataset, dp):
    packing = Packing(dp, 5, 2, None, across_epochs=True)
    plan = plan_of(dataset, packing)
    assert plan.steps_per_epoch == 1  # of 13 samples: 3 or 2 micro-batches on a rank
    assert plan_of(dataset, dataclasses.replace(packing, across_epochs=False)).steps_per_epoch == 3 - dp
    ranks = [collect(plan, 3, rank) for rank in range(dp)]
    seen = [
        sample for step in zip(*ranks) for batches in zip(*(w.batches for w in step)) for b in batches
        for sample in samples_in(b, dataset)
    ]  # fmt: skip
    epochs = [plan.order.epoch(e).tolist() for e in range(3)]
    if dp == 2:
        epochs = [epoch + epoch[:7] for epoch in epochs]
    drawn = list(itertools.chain(*epochs))
    assert len(seen) >= 26 and seen == drawn[: len(seen)]
    assert [window.num_planned for window in ranks[0]] == ([10, 8, 8] if dp == 1 else [20, 20, 20])
    assert equal(collect(plan, 3, done=2)[0], ranks[0][2])


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_ranks_together_see_each_steps_samples_once(dataset, layout, dp):
    plan = plan_of(dataset, Packing(dp, **LAYOUTS[layout]))
    assert plan.batch_size == 4 * dp
    num_steps = 2 * plan.steps_per_epoch  # the last step of an epoch is a short one
    ranks = [collect(plan, num_steps, rank) for rank in range(dp)]
    expected = list(itertools.islice(plan.order.steps(), num_steps))
    assert [plan.samples(step) for step in range(1, num_steps + 1)] == expected
    assert all(len(made) == num_steps for made in ranks)
    for number, (samples, step) in enumerate(zip(expected, zip(*ranks)), 1):
        assert len({len(window.batches) for window in step}) == 1
        seen = [samples_in(batch, dataset) for window in step for batch in window.batches]
        assert seen == [micro for rank in range(dp) for micro in plan.of_rank(number, rank)]
        assert sorted(itertools.chain(*seen)) == sorted(samples)
        for window in step:
            assert window.num_planned == len(samples) and window.broken == []
            assert [micro.num_targets for micro in window.micro_batches] == [len(b.targets) for b in window.batches]
        sums = Counts(*map(sum, zip(*(window.counts for window in step))))
        lengths = [dataset.lengths[i] for i in samples]
        assert sums == Counts(
            samples=len(samples),
            tokens=sum(lengths),
            targets=sum(dataset.num_targets[i] for i in samples),
            micro_batches=sum(len(batch.targets) > 0 for window in step for batch in window.batches),
            pairs=sum(seen for length in lengths for seen in range(1, length + 1)),
            tiles=sum(KINDS[i] == "i" for i in samples),  # and no blank one of a batch without pictures
        )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_holds_the_same_samples_on_any_number_of_ranks(dataset, layout):
    per_micro = {1: 2, 2: 1}
    steps = {}
    for dp in (1, 2):
        settings = LAYOUTS[layout] | {"num_micro_batches": per_micro[dp]}
        plan = plan_of(dataset, Packing(dp, **settings))
        ranks = [collect(plan, 4, rank) for rank in range(dp)]
        steps[dp] = [
            sorted(i for window in step for batch in window.batches for i in samples_in(batch, dataset))
            for step in zip(*ranks)
        ]
    assert steps[1] == steps[2]


def test_worker_processes_give_the_same_batches(dataset):
    plan = plan_of(dataset, Packing(1, **LAYOUTS["by count"]))
    alone, helped = (collect(plan, 6, workers=workers) for workers in (0, 2))
    assert len(alone) == len(helped) == 6
    assert all(equal(a, b) for a, b in zip(alone, helped))


def test_starting_at_a_step_gives_the_windows_from_there(dataset):
    plan = plan_of(dataset, Packing(2, **LAYOUTS["by count"]))
    whole, part = collect(plan, 6, rank=1), collect(plan, 6, rank=1, done=4)
    assert len(part) == 2 and all(equal(a, b) for a, b in zip(whole[4:], part))


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 9])
@pytest.mark.parametrize("num_samples", [5, 12, 13])
def test_steps_across_epochs_can_be_started_at_any(num_samples, num_micro_batches, dp):
    packing = Packing(dp, 2, num_micro_batches, None, across_epochs=True)
    order = SampleOrder(num_samples, packing.batch_size, seed=3)
    dataset = SimpleNamespace(wait_for=lambda samples: None)
    steps = list(itertools.islice(packing.steps(order, dataset, 0), 12))
    for start in range(12):
        assert list(itertools.islice(packing.steps(order, dataset, start), 12 - start)) == steps[start:]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_before_the_step_to_start_at_is_read(dataset, layout, monkeypatch):
    read = []
    one = EncodedDataset.__getitem__
    monkeypatch.setattr(EncodedDataset, "__getitem__", lambda self, index: read.append(index) or one(self, index))
    plan, start = plan_of(dataset, Packing(1, **LAYOUTS[layout])), 7
    collect(plan, 9, done=start)
    expected = itertools.islice(plan.order.steps(start), 2)
    assert sorted(read) == sorted(itertools.chain.from_iterable(expected))


@pytest.mark.parametrize("settings", [*LAYOUTS.values(), {**LAYOUTS["by count"], "across_epochs": True}], ids=str)
def test_the_heaviest_micro_batch_of_the_steps_that_are_left(dataset, settings):
    plan = plan_of(dataset, Packing(2, **settings, pair_cost=1e-3))
    for done, num_steps in ((0, 1), (1, 8), (7, 8)):
        ranks = [collect(plan, num_steps, rank, done) for rank in range(2)]
        shown = [samples_in(batch, dataset) for rank in ranks for window in rank for batch in window.batches]
        tokens = [sum(dataset.lengths[i] for i in samples) for samples in shown]
        found = heaviest(dataclasses.replace(plan, num_steps=num_steps), done)
        assert sum(dataset.lengths[i] for i in found) == max(tokens)
        assert sorted(found) in [sorted(samples) for samples in shown]
    assert heaviest(dataclasses.replace(plan, num_steps=3), 3) == []


@pytest.mark.parametrize("workers", [0, 2])
def test_every_step_is_planned_once(dataset, workers, monkeypatch):
    planned = []
    monkeypatch.setattr(packing, "plan_by_tokens", lambda *args: planned.append(args[0]) or plan_by_tokens(*args))
    plan = plan_of(dataset, Packing(1, **LAYOUTS["by tokens"]))
    collect(plan, 5, workers=workers)
    assert planned == list(itertools.islice(plan.order.steps(), 5))


def test_loading_leaves_the_global_generator_alone(dataset):
    """A resumed run restores the generator and makes its windows anew: drawing from it would change what follows."""
    before = torch.get_rng_state()
    collect(plan_of(dataset, Packing(1, **LAYOUTS["by count"])), 2)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_broken_image_is_left_out_on_its_rank_and_counted(tmp_path, tokenizer, layout, workers):
    data = toys.encoded(**toys.write_data(tmp_path, KINDS), tokenizer=tokenizer, cache_dir=tmp_path / "cache")
    (tmp_path / "images" / "4.png").write_bytes(b"no picture")
    whole = toys.encoded(**toys.write_data(tmp_path / "w", KINDS), tokenizer=tokenizer, cache_dir=tmp_path / "cache")
    plans = [plan_of(d, Packing(2, **LAYOUTS[layout])) for d in (data, whole)]
    num_steps = 2 * plans[0].steps_per_epoch
    ranks, intact = ([collect(plan, num_steps, rank, workers=workers) for rank in range(2)] for plan in plans)
    times_met = 0
    for step, wanted in zip(zip(*ranks), zip(*intact)):
        met = [broken for window in step for broken in window.broken]
        times_met += len(met)
        assert all(broken.id == "s4" and "4.png" in broken.reason for broken in met)
        assert step[0].num_planned == step[1].num_planned == sum(window.counts[0] for window in wanted)
        assert sum(window.counts[0] for window in step) == step[0].num_planned - len(met)
        for window, all_of_it in zip(step, wanted):
            assert len(window.batches) == len(all_of_it.batches)
            kept = [[i for i in samples_in(b, whole) if i != 4] for b in all_of_it.batches]
            assert [samples_in(b, whole) for b in window.batches] == kept
            assert window.counts[2] == sum(len(batch.targets) for batch in window.batches)
    assert times_met == 2  # once an epoch
