"""Measure the planning of optimizer steps for hundreds of ranks, on one machine and without a model."""

import contextlib
import math
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from benchmark.length_mix import FINETUNE, length_mix

from llava_ds.data.heaviest import heaviest
from llava_ds.data.mapped_arrays import Mapped, mapped
from llava_ds.data.packing import plan_by_tokens
from llava_ds.data.sample_order import SampleOrder
from llava_ds.data.step_plan import Packing, StepPlan, largest_share
from llava_ds.runtime.main_thread import frozen_gc

STEPS = 20  # steps whose layout is timed
MIXED = 1 << 20  # lengths drawn; larger data repeats them in another order

Row = dict[str, float]


def planning(
    samples: tuple = (1_000_000, 10_000_000, 100_000_000),
    ranks: int = 512,
    per_rank: int = 4,
    tokens: int = 8192,
    order: str = "modality",
) -> None:
    """Measure the index of a data set, the order of an epoch and the layout of steps, for LLaVA-1.5's length mix.

    The ranks of a machine open the index in turn; the first one computes the order, the others map it. --tokens 0: pack
    by count. private: memory not backed by a file.
    """
    rows = [measure_planning(each, ranks, per_rank, tokens, order) for each in samples]
    show(f"Planning, on each of {ranks} ranks of {per_rank} samples, {order}", rows)


def show(title: str, rows: list[Row]) -> None:
    """Print a table, and the growth exponent of each column from the first row to the last."""
    names = list(rows[0])
    print(f"\n{title}\n\n| {' | '.join(names)} |\n|{' --- |' * len(names)}")
    for row in rows:
        print("|", " | ".join(f"{row[name]:,.{4 if row[name] < 1e4 else 12}g}" for name in names), "|")
    first, last = rows[0], rows[-1]
    if factor := math.log(last[names[0]] / first[names[0]]):
        grown = [f"{math.log(last[n] / first[n]) / factor:.1f}" if first[n] and last[n] else "" for n in names[1:]]
        print("| *growth* |", " | ".join(grown), "|", flush=True)


def in_a_process(act: Callable[..., object], *args: object) -> object:
    """Call a function in a fresh process, which holds no memory of earlier measurements, and return its value."""
    context = get_context("fork")
    answers = context.Queue()
    process = context.Process(target=lambda: answers.put(act(*args)))
    process.start()
    found = answers.get(timeout=3600)
    process.join()
    return found


def anonymous_bytes() -> int:
    """Return this process's memory that is not backed by a file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@contextlib.contextmanager
def largest_anonymous() -> Iterator[list[int]]:
    """Track the largest anonymous_bytes(), sampled every few milliseconds."""
    largest, over = [anonymous_bytes()], threading.Event()

    def look() -> None:
        while not over.wait(0.005):
            largest[0] = max(largest[0], anonymous_bytes())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield largest
    finally:
        over.set()
        thread.join()


def write_index(folder: Path, num_samples: int) -> Mapped:
    """Write or map an index of synthetic samples; a sixth have no images, as in LLaVA-1.5's mix."""

    def make() -> Mapped:
        rng = np.random.default_rng(0)
        mix = length_mix(FINETUNE, min(num_samples, MIXED), seed=0).tokens.astype(np.int32)
        lengths = np.concatenate([rng.permutation(mix) for _ in range(-(-num_samples // len(mix)))])[:num_samples]
        signs = np.where(rng.random(num_samples, np.float32) < 1 / 6, -1, 1).astype(np.int32)
        return Mapped({"lengths": lengths, "num_targets": lengths // 6 + 1, "words": lengths // 2 * signs}, {})

    return mapped(folder, make)


def plan_as_rank(folder: Path, num_samples: int, packing: Packing, how: str, searches: bool) -> Row:
    """Open the index, make or map an epoch's order, and lay out the first steps. searches: include rank 0's search."""
    before, began, used = anonymous_bytes(), time.perf_counter(), time.thread_time()
    arrays = {name: np.asarray(array) for name, array in write_index(folder, num_samples).arrays.items()}
    opened = time.perf_counter() - began
    by = arrays["words" if how.startswith("modality") else "lengths"]
    order = SampleOrder(num_samples, packing.batch_size, 0, how, by, packing.micro_batch_size, 1, folder=folder)
    lengths, none = arrays["lengths"], np.zeros(num_samples, np.int32)
    sizes = lengths, arrays["num_targets"], none, none
    dataset = SimpleNamespace(
        lengths=lengths, sizes=sizes, wait_for=lambda _: None, is_whole=True, packs=plan_by_tokens,
        summed=lambda values, samples: int(values[samples].sum()),
    )  # fmt: skip
    plan = StepPlan(dataset, order, packing, order.steps_per_epoch)
    with largest_anonymous() as largest:
        steps = plan.after(0)
        next(steps)
    first, cpu = time.perf_counter() - began, time.thread_time() - used
    each = []
    with frozen_gc():  # as in a run
        for _ in range(min(STEPS, order.steps_per_epoch - 1)):
            began = time.process_time()
            next(steps)
            each.append(time.process_time() - began)
    row = {"open": opened, "first": first, "cpu": cpu, "step": float(np.median(each)), "private": largest[0] - before}
    if searches:
        began = time.perf_counter()
        largest_share(order, arrays["lengths"], packing.dp)
        heaviest(plan, 0)
        row["heaviest"] = time.perf_counter() - began
    return row


def measure_planning(num_samples: int, world_size: int, per_rank: int, tokens: int, how: str) -> Row:
    """Measure planning on the first rank of a machine and on another one."""
    packing = Packing(world_size, per_rank, 1, tokens or None, pair_cost=2e-5)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "index")
        in_a_process(lambda: len(write_index(folder, num_samples).arrays))
        maker, other = (in_a_process(plan_as_rank, folder, num_samples, packing, how, first) for first in (True, False))
        mapped_bytes = sum(file.stat().st_size for file in Path(parent).rglob("*.npy"))
    return {
        "samples": num_samples,
        "ms to open the index": 1e3 * other["open"],
        "s to the first step, first rank": maker["first"],
        "CPU s to it, first rank": maker["cpu"],
        "s to it, other ranks": other["first"],
        "CPU ms per step": 1e3 * other["step"],
        "s for the largest step and the heaviest micro-batch, rank 0": maker["heaviest"],
        "private MB, first rank while it sorts": maker["private"] / 1e6,
        "private MB, other ranks": other["private"] / 1e6,
        "mapped bytes per sample, once per machine": mapped_bytes / num_samples,
    }
