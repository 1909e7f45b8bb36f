"""Hundreds of ranks on one machine, in threads or in small processes: packets, files and connections that they take."""

import json
import os
import socket
import threading
import time
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from llava_ds.checkpoint import commit, resume, verification
from llava_ds.checkpoint.commit import TRAINER
from llava_ds.checkpoint.run_identity import RunIdentity
from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.constants import ConfigError
from llava_ds.engine.process_group import prepare_connections
from llava_ds.files.writing import write_file
from llava_ds.runtime import heartbeat, ranks
from llava_ds.runtime.hangs import Beat
from llava_ds.runtime.heartbeat import Peers
from llava_ds.runtime.launchers import free_port
from llava_ds.runtime.ranks import Ranks

RANKS_PER_MACHINE = 8


class Exchange:
    """Exchanges between ranks that are threads, with the results of those in llava_ds/runtime/ranks.py."""

    def __init__(self, world_size: int) -> None:
        self._meeting, self._values = threading.Barrier(world_size), [None] * world_size

    def gather(self, value: object, ranks: Ranks) -> list:
        if ranks.world_size == 1:
            return [value]
        self._values[ranks.rank] = value
        self._meeting.wait()
        found = list(self._values)
        self._meeting.wait()
        return found

    def broadcast(self, ranks: Ranks, compute) -> object:
        return self.gather(compute() if ranks.is_first else None, ranks)[0]

    def run(self, act) -> list[object]:
        """The function's value on each rank."""
        size = len(self._values)
        results = [None] * size

        def one(rank: int) -> None:
            results[rank] = act(Ranks(rank, rank % RANKS_PER_MACHINE, size, torch.device("cpu")))

        threads = [threading.Thread(target=one, args=(rank,), name=str(rank)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


def meet(rank: int, world_size: int, port: int, answers) -> None:
    """Join the group as llava_ds/engine/process_group.py does, use it, and count open files."""
    torch.set_num_threads(1)
    prepare_connections(world_size)
    store = torch.distributed.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0)
    before = len(os.listdir("/proc/self/fd"))
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    for group in [torch.distributed.new_group(backend="gloo") for _ in range(2)]:
        torch.distributed.all_gather_object([None] * world_size, rank, group=group)
        torch.distributed.barrier(group)
        torch.distributed.broadcast_object_list([rank], src=0, group=group)
        torch.distributed.all_reduce(torch.ones(1), group=group)
    torch.distributed.all_reduce(torch.ones(1))
    answers.put((rank, len(os.listdir("/proc/self/fd")) - before))
    answers.close()
    answers.join_thread()
    torch.distributed.barrier()
    time.sleep(0.2)
    os._exit(0)


@pytest.mark.long
def test_connections_grow_with_the_logarithm_of_the_ranks(monkeypatch):
    files = {}
    for lazy in (False, True):
        monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", str(int(lazy)))
        context, port = get_context("fork"), free_port()
        answers = context.Queue()
        processes = [context.Process(target=meet, args=(rank, 24, port, answers)) for rank in range(24)]
        for process in processes:
            process.start()
        files[lazy] = max(count for rank, count in (answers.get(timeout=300) for _ in processes) if rank)
        for process in processes:
            process.join()
    assert files[False] >= 3 * 23 and files[True] <= 36


def burst(world_size: int, monkeypatch) -> tuple[list[int], int]:
    """Packets to each rank of one beat of every rank, and how many were lost."""
    exchange = Exchange(world_size)
    monkeypatch.setattr(heartbeat, "gather", exchange.gather)
    monkeypatch.setattr(heartbeat, "local_ranks", lambda: world_size)  # all on the loopback interface
    monkeypatch.setattr(heartbeat, "process_namespace", lambda: "")
    monkeypatch.setattr(
        socket, "gethostname", lambda: f"node-{int(threading.current_thread().name) // RANKS_PER_MACHINE}"
    )
    peers = exchange.run(Peers)
    try:
        for rank, each in enumerate(peers):
            each.send(Beat(rank, "step", 7, 12.5, 480.0, "loop.py:101 (micro_steps)", True, 3.0, 4.0))
        received = [len(each.heard()) for each in peers]
        lost = sum(len(each.heard_ranks) - 1 - count for each, count in zip(peers, received))
        return received, lost
    finally:
        for each in peers:
            each.close()


def test_heartbeats_of_512_ranks_cost_a_rank_a_few_packets_and_none_is_lost(monkeypatch):
    if int(Path("/proc/sys/net/core/rmem_max").read_text()) < 512 * 1280:
        pytest.skip("this machine's net.core.rmem_max holds fewer packets")
    few, lost = burst(64, monkeypatch)
    assert sum(few) + lost == 64 * 63
    many, lost = burst(512, monkeypatch)
    assert sum(many) + lost < 2 * 64 * 63
    assert max(many) == 511 and lost == 0


def test_a_checkpoint_of_64_ranks_is_committed_refused_and_verified(tmp_path, monkeypatch):
    args = Arguments(ModelArguments(), DataArguments(), TrainingArguments(), frozenset())
    config = {"zero_optimization": {"stage": 3}}
    identity = RunIdentity.of(args, "data", 64, config)
    other = RunIdentity.of(args.replaced(learning_rate=1.0), "data", 64, config)
    exchange = Exchange(64)
    for module in (commit, verification):
        monkeypatch.setattr(module, "gather", exchange.gather)
    monkeypatch.setattr(ranks, "gather", exchange.gather)
    monkeypatch.setattr(resume, "broadcast_from_first", exchange.broadcast)
    monkeypatch.setattr(verification, "local_ranks", lambda: RANKS_PER_MACHINE)

    def save(ranks: Ranks) -> None:
        scratch = commit.begin(tmp_path, 10, ranks)
        names = [f"layout-{ranks.rank}.json", f"random-{ranks.rank}.pt"]
        names += [f"zero_pp_rank_{ranks.rank}_mp_rank_00_{kind}_states.pt" for kind in ("model", "optim")]
        written = {name: write_file(scratch / name, lambda file: file.write(bytes(1000))) for name in names}
        if ranks.is_first:
            text = json.dumps({"step": 10, "identity": asdict(identity)}).encode()
            written[TRAINER] = write_file(scratch / TRAINER, lambda file: file.write(text))
        commit.commit(scratch, written, None, ranks)

    exchange.run(save)
    folder = tmp_path / "checkpoint-10"
    assert len(list(folder.iterdir())) == 4 * 64 + 2  # with the manifest
    with pytest.raises(ConfigError):
        resume.find_resume_point("auto", tmp_path, other)
    found = exchange.run(lambda ranks: resume.find_resume_point("auto", tmp_path, identity, ranks=ranks)[0].path)
    assert set(found) == {folder}
