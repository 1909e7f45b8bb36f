"""Measure the index of a data set at scale: memory of a rank, opening, orders, planning and the heaviest micro-batch.

    python run/dev/measure_index.py --num_samples 10000000 --ranks 512 --order modality

Synthetic lengths of LLaVA-1.5's mix lie in an index as the preflight writes it. Simulated ranks of one machine
(--processes) open it in turn, take the order of an epoch, and plan steps for --ranks ranks. private: memory of a
rank that is not of a file, above that of an interpreter with the imports; what it maps lies in the page cache, once for
a machine. --old measures the lists that a rank held before (to 10 M samples).
"""

import argparse
import itertools
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from benchmark.length_mix import FINETUNE, length_mix

from llava_ds.data.mapped_arrays import Mapped, mapped
from llava_ds.data.sample_order import SampleOrder
from llava_ds.data.step_plan import Packing, StepPlan, largest_share
from llava_ds.runtime.main_thread import older_objects_passed_over

MIXED = 1 << 20  # lengths drawn, and repeated in another order for larger data
MB = 1e6


@dataclass(frozen=True)
class Setting:
    """The run that ranks simulate."""

    folder: Path
    num_samples: int
    ranks: int
    per_rank: int
    how: str
    tokens: int | None
    num_steps: int


def private_bytes() -> tuple[int, int]:
    """Memory of this process that is not of a file, and the peak of all that was resident, files included."""
    found = {}
    for file in ("smaps_rollup", "status"):
        for line in Path(f"/proc/self/{file}").read_text().splitlines():
            name, _, rest = line.partition(":")
            if rest.endswith("kB"):
                found[name] = int(rest.split()[0]) * 1024
    return found["Anonymous"], found["VmHWM"]


def written(folder: Path, num_samples: int) -> None:
    """Write an index of synthetic samples; a sixth has no images, as in LLaVA-1.5's mix."""

    def make() -> Mapped:
        rng = np.random.default_rng(0)
        mix = length_mix(FINETUNE, min(num_samples, MIXED), seed=0).tokens.astype(np.int32)
        lengths = np.concatenate([rng.permutation(mix) for _ in range(-(-num_samples // len(mix)))])[:num_samples]
        signs = np.where(rng.random(num_samples, np.float32) < 1 / 6, -1, 1).astype(np.int32)
        return Mapped({"lengths": lengths, "num_targets": lengths // 6 + 1, "words": lengths // 2 * signs}, {})

    mapped(folder, make)


def opened(setting: Setting, as_lists: bool) -> StepPlan:
    """Open the plan of the run as a rank does. as_lists: with lists, as a rank had them before."""
    arrays = {name: np.asarray(each) for name, each in mapped(setting.folder, dict).arrays.items()}
    if as_lists:
        arrays = {name: array.tolist() for name, array in arrays.items()}
    words = arrays["words"] if setting.how.startswith("modality") else arrays["lengths"]
    packing = Packing(setting.ranks, setting.per_rank, 1, setting.tokens, pair_cost=2e-5)
    order = SampleOrder(
        setting.num_samples, packing.batch_size, 0, setting.how, words, setting.per_rank, folder=setting.folder
    )
    own = {name: arrays[name] for name in ("lengths", "num_targets")}
    dataset = SimpleNamespace(**own, wait_for=lambda _: None, is_streamed=False)
    return StepPlan(dataset, order, packing, order.steps_per_epoch)


def rank(setting: Setting, as_lists: bool) -> dict[str, float]:
    """Seconds and bytes of one rank."""
    np.zeros(1).sum()
    private, peak = private_bytes()
    row, started, used = {}, time.perf_counter(), time.process_time()

    def note(name: str) -> None:
        nonlocal started, used
        row[f"{name} s"], started = time.perf_counter() - started, time.perf_counter()
        row[f"{name} CPU s"], used = time.process_time() - used, time.process_time()

    plan = opened(setting, as_lists)
    note("open")
    order = plan.order.epoch(0)
    order = order.tolist() if as_lists else order
    note("order")
    if not as_lists:
        steps, times, began = plan.after(0), [], time.process_time()
        with older_objects_passed_over():  # as in a run
            for _ in itertools.islice(steps, setting.num_steps):
                times.append(time.process_time() - began)
                began = time.process_time()
        row["step ms"], row["slowest step ms"] = statistics.median(times) * 1e3, max(times[1:]) * 1e3
    after, highest = private_bytes()
    row["private B/sample"] = (after - private) / setting.num_samples
    row["private MB"] = (after - private) / MB
    row["peak MB"] = (highest - peak) / MB
    del order
    return row


def first_rank_only(setting: Setting) -> dict[str, float]:
    """Seconds of what rank 0 alone computes, for all."""
    plan, row = opened(setting, False), {}
    for name, act in (
        ("largest share s", lambda: largest_share(plan.order, plan.dataset.lengths, setting.ranks)),
        ("heaviest micro-batch s", lambda: plan.heaviest(0)),
    ):
        started = time.perf_counter()
        act()
        row[name] = time.perf_counter() - started
    return row


def in_process(act: Callable, *args) -> dict[str, float]:
    """The value of a function in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(act, args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_samples", type=int, default=10_000_000)
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--per_rank", type=int, default=8, help="samples of a rank in a step")
    parser.add_argument("--order", default="random")
    parser.add_argument("--tokens", type=int, help="--tokens_per_micro_batch; absent: by count")
    parser.add_argument("--num_steps", type=int, default=30, help="steps planned")
    parser.add_argument("--processes", type=int, default=3, help="ranks of this machine that are simulated")
    parser.add_argument("--old", action="store_true")
    parser.add_argument("--folder", help="for the files, 16 bytes a sample; absent: a temporary one")
    args = parser.parse_args()
    outer = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        folder = outer / "index"
        in_process(written, folder, args.num_samples)
        setting = Setting(folder, args.num_samples, args.ranks, args.per_rank, args.order, args.tokens, args.num_steps)
        files = [path for path in outer.rglob("*.npy")]
        print(f"{args.num_samples:,} samples, {args.ranks} ranks of {args.per_rank} samples, order {args.order}")
        print(f"index on disk: {sum(os.stat(path).st_size for path in files) / args.num_samples:.1f} B/sample")
        for number in range(args.processes):
            print(f"rank {number}:", _rounded(in_process(rank, setting, False)), flush=True)
        print("rank 0 alone:", _rounded(in_process(first_rank_only, setting)), flush=True)
        if args.old:
            print("lists, as before:", _rounded(in_process(rank, setting, True)), flush=True)
    finally:
        shutil.rmtree(outer)


def _rounded(row: dict[str, float]) -> str:
    return json.dumps({name: round(value, 3) for name, value in row.items()})


if __name__ == "__main__":
    main()
