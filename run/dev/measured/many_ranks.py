"""The parts of a run that don't compute, at hundreds of ranks, on one machine and without a model."""

import contextlib
import json
import math
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from benchmark.length_mix import FINETUNE, length_mix

from llava_ds.checkpoint import commit, resume
from llava_ds.checkpoint.run_identity import RunIdentity
from llava_ds.checkpoint.trainer_file import TRAINER
from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.constants import ConfigError
from llava_ds.data.mapped_arrays import Mapped, mapped
from llava_ds.data.sample_order import SampleOrder
from llava_ds.data.step_plan import Packing, StepPlan, largest_share
from llava_ds.engine.process_group import prepare_connections
from llava_ds.files.writing import write_file
from llava_ds.runtime import heartbeat
from llava_ds.runtime import ranks as runtime_ranks
from llava_ds.runtime.heartbeat import Beat, Peers
from llava_ds.runtime.main_thread import older_objects_passed_over
from llava_ds.runtime.ranks import Ranks

RANKS_PER_MACHINE = 8
FILE_BYTES = 200_000  # of the states that a rank writes: what is measured is the number of files
STEPS = 20  # whose layout is timed
MIXED = 1 << 20  # lengths drawn, and repeated in another order for larger data
RANKS = (64, 128, 256, 512)

Row = dict[str, float]


def meeting(processes: tuple = (8, 16, 32)) -> None:
    """Start-up of real processes over gloo, with torch's store and three groups, and their open files."""
    for lazy, how in ((False, "each to each"), (True, "as above 64 ranks")):
        show(f"Processes that meet, connected {how}", [measure_meeting(each, lazy) for each in processes])


def heartbeats(ranks: tuple = RANKS) -> None:
    """Heartbeats of all ranks in one process, through one real socket a rank."""
    show("Heartbeats, all in one burst", [measure_heartbeats(each) for each in ranks])


def checkpoint(ranks: tuple = RANKS) -> None:
    """A checkpoint of which every rank, a thread here, writes, hashes, commits and verifies its files."""
    show("A checkpoint, every rank a thread", [measure_checkpoint(each) for each in ranks])


def planning(
    samples: tuple = (1_000_000, 10_000_000, 100_000_000),
    ranks: int = 512,
    per_rank: int = 4,
    tokens: int = 8192,
    order: str = "modality",
) -> None:
    """The index of a data set, the order of an epoch and the layout of steps, of LLaVA-1.5's mix of lengths.

    Ranks of one machine open the index in turn; the first one makes the order, the others map it. --tokens 0: by count.
    private: memory that is not of a file.
    """
    rows = [measure_planning(each, ranks, per_rank, tokens, order) for each in samples]
    show(f"Planning, on each of {ranks} ranks of {per_rank} samples, {order}", rows)


def show(title: str, rows: list[Row]) -> None:
    """Print a table, and the exponent of each column's growth from the first row to the last."""
    names = list(rows[0])
    print(f"\n{title}\n\n| {' | '.join(names)} |\n|{' --- |' * len(names)}")
    for row in rows:
        print("|", " | ".join(f"{row[name]:,.{4 if row[name] < 1e4 else 12}g}" for name in names), "|")
    first, last = rows[0], rows[-1]
    if factor := math.log(last[names[0]] / first[names[0]]):
        grown = [f"{math.log(last[n] / first[n]) / factor:.1f}" if first[n] and last[n] else "" for n in names[1:]]
        print("| *growth* |", " | ".join(grown), "|", flush=True)


class Exchange:
    """Exchanges between ranks that are threads, with the results of those in llava_ds/runtime/ranks.py."""

    def __init__(self, world_size: int) -> None:
        self._meeting, self._values = threading.Barrier(world_size), [None] * world_size

    def gather(self, value: object, ranks: Ranks) -> list:
        """The values of all ranks."""
        if ranks.world_size == 1:
            return [value]
        self._values[ranks.rank] = value
        self._meeting.wait()
        found = list(self._values)
        self._meeting.wait()
        return found

    def broadcast(self, ranks: Ranks, compute: Callable[[], object]) -> object:
        """Rank 0's value."""
        return self.gather(compute() if ranks.is_first else None, ranks)[0]

    def run(self, world_size: int, act: Callable[[Ranks], object]) -> list[object]:
        """The function's value on each rank."""
        results: list[object] = [None] * world_size

        def one(rank: int) -> None:
            results[rank] = act(Ranks(rank, rank % RANKS_PER_MACHINE, world_size, torch.device("cpu")))

        threads = [threading.Thread(target=one, args=(rank,), name=str(rank)) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


def meet(rank: int, world_size: int, port: int, answers) -> None:
    """Join the group as llava_ds/engine/process_group.py does, use it, and count open files."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    prepare_connections(world_size)
    store = torch.distributed.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0)
    before = len(os.listdir("/proc/self/fd"))
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    groups = [torch.distributed.new_group(backend="gloo") for _ in range(2)]
    for group in groups:
        torch.distributed.all_gather_object([None] * world_size, rank, group=group)
        torch.distributed.barrier(group)
        torch.distributed.broadcast_object_list([rank], src=0, group=group)
        torch.distributed.all_reduce(torch.ones(1), group=group)
    torch.distributed.all_reduce(torch.ones(1))
    answers.put((rank, len(os.listdir("/proc/self/fd")) - before, time.perf_counter() - began))
    torch.distributed.barrier()
    time.sleep(0.2)
    os._exit(0)


def measure_meeting(world_size: int, lazy: bool) -> Row:
    """Start-up of real processes. lazy: gloo connects ranks when they first exchange something."""
    context = get_context("fork")
    answers = context.Queue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with mock.patch.dict(os.environ, {"TORCH_GLOO_LAZY_INIT": str(int(lazy))}):
        processes = [context.Process(target=meet, args=(rank, world_size, port, answers)) for rank in range(world_size)]
        for process in processes:
            process.start()
        found = sorted(answers.get(timeout=300) for _ in processes)
        for process in processes:
            process.join()
    return {
        "ranks": world_size,
        "open files of rank 0, beside the store": found[0][1],
        "most of the others": max(each[1] for each in found[1:]),
        "seconds": max(each[2] for each in found),
    }


@contextlib.contextmanager
def connected(world_size: int) -> Iterator[list[Peers]]:
    """The Peers of all ranks, RANKS_PER_MACHINE on a machine."""
    exchange = Exchange(world_size)

    def machine() -> str:
        return f"node-{int(threading.current_thread().name) // RANKS_PER_MACHINE}"

    with (
        mock.patch.object(heartbeat, "gather", exchange.gather),
        mock.patch.object(heartbeat, "local_ranks", lambda: world_size),  # all on the loopback interface
        mock.patch.object(heartbeat, "process_namespace", lambda: ""),
        mock.patch.object(socket, "gethostname", machine),
    ):
        peers = exchange.run(world_size, Peers)
    yield peers
    for each in peers:
        each.close()


def measure_heartbeats(world_size: int) -> Row:
    """One beat of every rank, in a burst: packets, those that were lost, and the work of the busiest rank."""
    with connected(world_size) as peers:
        seconds, lost = [], 0
        for rank, each in enumerate(peers):
            began = time.process_time()
            each.send(Beat(rank, "step", 7, 12.5, 480.0, "loop.py:101 (micro_steps)", True, 3.0, 4.0))
            seconds.append(time.process_time() - began)
        received = []
        for each in peers:
            began = time.process_time()
            received.append(len(each.heard()))
            seconds[each.rank] += time.process_time() - began
            lost += len(each.heard_ranks) - 1 - received[-1]
    return {
        "ranks": world_size,
        "packets per second, all": sum(received) + lost,
        "most to one rank": max(received),
        "lost of a burst": lost,
        "ms per second, busiest rank": 1e3 * max(seconds),
        "ms per second, median": 1e3 * float(np.median(seconds)),
    }


def measure_checkpoint(world_size: int) -> Row:
    """A checkpoint with the files of all ranks: written and committed, refused for a changed flag, and verified."""
    args = Arguments(ModelArguments(), DataArguments(), TrainingArguments(), frozenset())
    config = {"zero_optimization": {"stage": 3}}
    identity = RunIdentity.of(args, "data", world_size, config)
    other = RunIdentity.of(args.replaced(learning_rate=1.0), "data", world_size, config)
    exchange = Exchange(world_size)
    content = bytes(FILE_BYTES)
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(commit, "gather", exchange.gather),
        mock.patch.object(runtime_ranks, "gather", exchange.gather),
        mock.patch.object(resume, "broadcast_from_first", exchange.broadcast),
        mock.patch.object(commit, "local_ranks", lambda: RANKS_PER_MACHINE),
    ):
        output_dir = Path(folder)

        def save(ranks: Ranks) -> None:
            scratch = commit.begin(output_dir, 10, ranks)
            names = [f"layout-{ranks.rank}.json", f"random-{ranks.rank}.pt"]
            names += [f"zero_pp_rank_{ranks.rank}_mp_rank_00_{kind}_states.pt" for kind in ("model", "optim")]
            written = {name: write_file(scratch / name, lambda file: file.write(content)) for name in names}
            if ranks.is_first:
                text = json.dumps({"step": 10, "identity": asdict(identity)}).encode()
                written[TRAINER] = write_file(scratch / TRAINER, lambda file: file.write(text))
            commit.commit(scratch, written, None, ranks)

        def find(ranks: Ranks) -> Path | None:
            return resume.find_resume_point("auto", output_dir, identity, ranks=ranks)[0].path

        times = [time.process_time()]
        exchange.run(world_size, save)
        times.append(time.process_time())
        with contextlib.suppress(ConfigError):
            resume.find_resume_point("auto", output_dir, other)
        times.append(time.process_time())
        found = exchange.run(world_size, find)
        times.append(time.process_time())
        assert set(found) == {output_dir / "checkpoint-10"}
        manifest = (output_dir / "checkpoint-10" / commit.MANIFEST).stat().st_size
    saved, refused, verified = np.diff(times)
    return {
        "ranks": world_size,
        "files": 4 * world_size + 1,
        "manifest MB": manifest / 1e6,
        "CPU ms per rank to write and commit": 1e3 * saved / world_size,
        "CPU ms of rank 0 to refuse a changed flag": 1e3 * refused,
        "CPU ms per rank to verify": 1e3 * verified / world_size,
    }


def in_a_process(act: Callable[..., object], *args: object) -> object:
    """The value of a function in a process of its own, whose memory holds nothing that another one read or made."""
    context = get_context("fork")
    answers = context.Queue()
    process = context.Process(target=lambda: answers.put(act(*args)))
    process.start()
    found = answers.get(timeout=3600)
    process.join()
    return found


def anonymous_bytes() -> int:
    """The memory of this process that is not of a file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@contextlib.contextmanager
def largest_anonymous() -> Iterator[list[int]]:
    """The largest anonymous_bytes(), looked at every few milliseconds."""
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
    """Write or map an index of synthetic samples; a sixth has no images, as in LLaVA-1.5's mix."""

    def make() -> Mapped:
        rng = np.random.default_rng(0)
        mix = length_mix(FINETUNE, min(num_samples, MIXED), seed=0).tokens.astype(np.int32)
        lengths = np.concatenate([rng.permutation(mix) for _ in range(-(-num_samples // len(mix)))])[:num_samples]
        signs = np.where(rng.random(num_samples, np.float32) < 1 / 6, -1, 1).astype(np.int32)
        return Mapped({"lengths": lengths, "num_targets": lengths // 6 + 1, "words": lengths // 2 * signs}, {})

    return mapped(folder, make)


def plan_as_rank(folder: Path, num_samples: int, packing: Packing, how: str, heaviest: bool) -> Row:
    """Open the index, make or map the order of an epoch, and lay out its first steps. heaviest: what rank 0 seeks."""
    before, began, used = anonymous_bytes(), time.perf_counter(), time.thread_time()
    arrays = {name: np.asarray(array) for name, array in write_index(folder, num_samples).arrays.items()}
    opened = time.perf_counter() - began
    by = arrays["words" if how.startswith("modality") else "lengths"]
    order = SampleOrder(num_samples, packing.batch_size, 0, how, by, packing.micro_batch_size, 1, folder=folder)
    own = {name: arrays[name] for name in ("lengths", "num_targets")}
    dataset = SimpleNamespace(**own, wait_for=lambda _: None, is_whole=True)
    plan = StepPlan(dataset, order, packing, order.steps_per_epoch)
    with largest_anonymous() as largest:
        steps = plan.after(0)
        next(steps)
    first, cpu = time.perf_counter() - began, time.thread_time() - used
    each = []
    with older_objects_passed_over():  # as in a run
        for _ in range(min(STEPS, order.steps_per_epoch - 1)):
            began = time.process_time()
            next(steps)
            each.append(time.process_time() - began)
    row = {"open": opened, "first": first, "cpu": cpu, "step": float(np.median(each)), "private": largest[0] - before}
    if heaviest:
        began = time.perf_counter()
        largest_share(order, arrays["lengths"], packing.dp)
        plan.heaviest(0)
        row["heaviest"] = time.perf_counter() - began
    return row


def measure_planning(num_samples: int, world_size: int, per_rank: int, tokens: int, how: str) -> Row:
    """Plan on the first rank of a machine, and on another one."""
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
