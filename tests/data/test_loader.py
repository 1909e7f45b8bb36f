"""Windows of optimizer steps: all ranks together see the step's samples, each once, whoever decodes them."""

import dataclasses
import itertools
import multiprocessing
from pathlib import Path

import pytest
import torch
import toys

from llava_ds.batch import Batch
from llava_ds.constants import DataError
from llava_ds.data.dataset import EncodedDataset, PictureOptions, open_encoded
from llava_ds.data.encode import EncodingOptions
from llava_ds.data.loader import Layout, Window, windows
from llava_ds.data.sampler import step_samples, steps_per_epoch

CPU = torch.device("cpu")
P = (toys.IMAGE_SIZE // toys.PATCH_SIZE) ** 2  # features per picture
KINDS = "itititiiittti"
LAYOUTS = {
    "by count": {"micro_batch_size": 2, "num_micro_batches": 2, "tokens_per_micro_batch": None},
    "by tokens": {"micro_batch_size": 2, "num_micro_batches": 2, "tokens_per_micro_batch": 260},
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory, tokenizer) -> EncodedDataset:
    folder = tmp_path_factory.mktemp("loader")
    return open_encoded(
        **toys.write_data(folder, KINDS),
        tokenizer=tokenizer,
        encoding=EncodingOptions("v1", 512),
        pictures=PictureOptions(toys.IMAGE_SIZE, (0.5, 0.5, 0.5), "square", 10**6, P),
        cache_dir=str(folder / "cache"),
    )


def collect(dataset: EncodedDataset, layout: Layout, num_steps: int, start_step: int = 0, workers: int = 0):
    made = windows(dataset, layout, seed=3, start_step=start_step, num_steps=num_steps, num_workers=workers, device=CPU)
    return list(made)


def samples_in(batch: Batch, dataset: EncodedDataset) -> list[int]:
    """Which samples a batch holds, told by their ids, for every toy record is another one."""
    known = {tuple(dataset[i].input_ids.clamp(min=0).tolist()): i for i in range(len(dataset))}
    assert len(known) == len(dataset)
    starts = batch.cu_seqlens.tolist()
    ids = batch.input_ids[0].tolist()
    return [known[tuple(ids[a:b])] for a, b in itertools.pairwise(starts) if ids[a:b] != [0]]


def equal(one: Window, other: Window) -> bool:
    same = dataclasses.replace(one, batches=[], data_wait_s=0) == dataclasses.replace(other, batches=[], data_wait_s=0)
    pairs = [
        (getattr(a, field.name), getattr(b, field.name))
        for a, b in zip(one.batches, other.batches)
        for field in dataclasses.fields(a)
    ]
    return same and all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_ranks_together_see_each_steps_samples_once(dataset, layout, world_size):
    layouts = [Layout(rank, world_size, **LAYOUTS[layout]) for rank in range(world_size)]
    batch_size = layouts[0].batch_size
    assert batch_size == 4 * world_size
    num_steps = 2 * steps_per_epoch(len(dataset), batch_size)  # the last step of an epoch is a short one
    ranks = [collect(dataset, one, num_steps) for one in layouts]
    expected = list(itertools.islice(step_samples(len(dataset), batch_size, 3), num_steps))
    assert all(len(made) == num_steps for made in ranks)
    for samples, step in zip(expected, zip(*ranks)):
        assert len({len(window.batches) for window in step}) == 1
        seen = [samples_in(batch, dataset) for window in step for batch in window.batches]
        assert sorted(itertools.chain(*seen)) == sorted(samples)
        for window in step:
            assert window.num_samples_all_ranks == len(samples)
            assert window.num_tokens_all_ranks == sum(dataset.lengths[i] for i in samples)
            assert window.num_targets_all_ranks == sum(sum(other.num_targets) for other in step)
            assert window.num_targets == [len(batch.targets) for batch in window.batches]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_holds_the_same_samples_on_any_number_of_ranks(dataset, layout):
    per_micro = {1: 2, 2: 1}
    steps = {}
    for world_size in (1, 2):
        settings = LAYOUTS[layout] | {"num_micro_batches": per_micro[world_size]}
        ranks = [collect(dataset, Layout(rank, world_size, **settings), 4) for rank in range(world_size)]
        steps[world_size] = [
            sorted(i for window in step for batch in window.batches for i in samples_in(batch, dataset))
            for step in zip(*ranks)
        ]
    assert steps[1] == steps[2]


def test_worker_processes_give_the_same_batches(dataset):
    layout = Layout(0, 1, **LAYOUTS["by count"])
    alone, helped = (collect(dataset, layout, 6, workers=workers) for workers in (0, 2))
    assert len(alone) == len(helped) == 6
    assert all(equal(a, b) for a, b in zip(alone, helped))


def test_starting_at_a_step_gives_the_windows_from_there(dataset):
    layout = Layout(1, 2, **LAYOUTS["by count"])
    whole, part = collect(dataset, layout, 6), collect(dataset, layout, 6, start_step=4)
    assert len(part) == 2 and all(equal(a, b) for a, b in zip(whole[4:], part))


def test_loading_leaves_the_global_generator_alone(dataset):
    """A resumed run restores the generator and makes its windows anew: drawing from it would change what follows."""
    before = torch.get_rng_state()
    collect(dataset, Layout(0, 1, **LAYOUTS["by count"]), 2)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_picture_is_one_clear_line(tmp_path, tokenizer, workers):
    broken = open_encoded(
        **toys.write_data(tmp_path, "ii"),
        tokenizer=tokenizer,
        encoding=EncodingOptions("v1", 512),
        pictures=PictureOptions(toys.IMAGE_SIZE, (0.5, 0.5, 0.5), "square", 10**6, P),
        cache_dir=str(tmp_path / "cache"),
    )
    path = Path(tmp_path / "images" / "1.png")
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(DataError) as caught:
        collect(broken, Layout(0, 1, **LAYOUTS["by count"]), 1, workers=workers)
    for worker in multiprocessing.active_children():  # collected as garbage, torch's loader would wait 5 s for it
        worker.terminate()
        worker.join()
    message = str(caught.value)
    assert message.startswith(f"{path} can't be read as a picture (") and message.endswith("replace it or leave it out")
    assert "Traceback" not in message and "\n" not in message
