"""The first rank of a machine sorts an epoch of a large data set; the other ranks map its order."""

from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from benchmark.length_mix import FINETUNE, length_mix

from llava_ds.data.mapped_arrays import Mapped, mapped
from llava_ds.data.packing import plan_by_tokens
from llava_ds.data.sample_order import SampleOrder
from llava_ds.data.step_plan import Packing, StepPlan

SAMPLES, RANKS = 1_000_000, 512


def anonymous_bytes() -> int:
    """This process's memory that is not backed by a file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def index_of(folder: Path) -> Mapped:
    """Write or map an index of samples; a sixth have no images, as in LLaVA-1.5's mix."""

    def make() -> Mapped:
        lengths = length_mix(FINETUNE, SAMPLES, seed=0).tokens.astype(np.int32)
        signs = np.where(np.random.default_rng(0).random(SAMPLES, np.float32) < 1 / 6, -1, 1).astype(np.int32)
        return Mapped({"lengths": lengths, "num_targets": lengths // 6 + 1, "words": lengths // 2 * signs}, {})

    return mapped(folder, make)


def plan_as_rank(folder: Path) -> int:
    """Open the index and the order, lay out a step, and return the bytes that this process doesn't share."""
    before = anonymous_bytes()
    arrays = {name: np.asarray(array) for name, array in index_of(folder).arrays.items()}
    packing = Packing(RANKS, 4, 1, 8192, pair_cost=2e-5)
    order = SampleOrder(SAMPLES, packing.batch_size, 0, "modality", arrays["words"], 4, 1, folder=folder)
    none = np.zeros(SAMPLES, np.int32)
    dataset = SimpleNamespace(
        lengths=arrays["lengths"], sizes=(arrays["lengths"], arrays["num_targets"], none, none), packs=plan_by_tokens,
        wait_for=lambda _: None, is_whole=True, summed=lambda values, samples: int(values[samples].sum()),
    )  # fmt: skip
    next(StepPlan(dataset, order, packing, order.steps_per_epoch).after(0))
    return anonymous_bytes() - before


def in_a_process(act, *args) -> int:
    """Call a function in a new process, which holds no memory of earlier calls."""
    context = get_context("fork")
    answers = context.Queue()
    process = context.Process(target=lambda: answers.put(act(*args)))
    process.start()
    found = answers.get(timeout=600)
    process.join()
    return found


@pytest.mark.full
def test_other_ranks_map_the_order_that_the_first_one_made(tmp_path):
    folder = tmp_path / "index"
    in_a_process(lambda: len(index_of(folder).arrays))
    _, private = in_a_process(plan_as_rank, folder), in_a_process(plan_as_rank, folder)
    assert private < 5e6
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.npy")) / SAMPLES < 16.1
