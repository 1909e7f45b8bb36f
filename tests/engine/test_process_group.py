"""Checks of a rank that is about to join the process group."""

import json
import os
import resource
import socket
import subprocess
import sys

import pytest
import torch

from llava_ds.constants import ConfigError
from llava_ds.engine import process_group
from llava_ds.engine.process_group import device_index


def test_versions_name_the_source_itself():
    versions = process_group._versions()
    assert set(versions) == {"llava_ds", "python", "torch", "deepspeed", "transformers"}
    assert "source" in versions["llava_ds"]


def test_a_rank_without_a_device_of_its_own(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert device_index(1, 2, started_by_srun=False) == 1
    assert device_index(3, 1, started_by_srun=True) == 0  # --gpus-per-task=1: it sees its own only
    for started_by_srun in (True, False):
        with pytest.raises(
            ConfigError, match=r"LOCAL_RANK is 4, but .* shows 2 GPUs \(CUDA_VISIBLE_DEVICES=0,1\): .*srun"
        ):
            device_index(4, 2, started_by_srun)


def test_gloo_takes_the_interface_that_leads_to_rank_0_where_the_name_misleads(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(process_group, "is_loopback_name", lambda host: False)
    process_group._choose_gloo_interface("127.0.0.1")
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setattr(process_group, "is_loopback_name", lambda host: True)
    monkeypatch.setitem(os.environ, "GLOO_SOCKET_IFNAME", "")  # so that it is put back
    del os.environ["GLOO_SOCKET_IFNAME"]
    process_group._choose_gloo_interface("127.0.0.1")
    loopback = os.environ["GLOO_SOCKET_IFNAME"]
    assert loopback in [name for _, name in socket.if_nameindex()] and loopback.startswith("lo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    with pytest.raises(ConfigError, match=r"GLOO_SOCKET_IFNAME is nope0, but .* has the interfaces .*lo"):
        process_group._choose_gloo_interface("127.0.0.1")


def test_a_taken_port_is_what_the_message_begins_with(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(torch.distributed.DistNetworkError) as error:
            torch.distributed.TCPStore("127.0.0.1", port, 2, is_master=True, wait_for_workers=False)
    said = process_group._missing_ranks_message(error.value)
    assert said.startswith(f"port {port} on {socket.gethostname()} is taken") and "--master_port" in said
    assert "start all machines within" in process_group._missing_ranks_message(RuntimeError("timed out"))


# Each rank prints the descriptors that a group of gloo adds once it was used as ranks.py and stopping.py do.
GROUPS = """
import json, os, sys
import torch.distributed as dist
from llava_ds.engine import process_group

rank, size, most_in_a_mesh, folder = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
import torch
torch.set_num_threads(1)
process_group.MOST_IN_A_MESH = most_in_a_mesh
for mine in range(size - 1):  # one import of torch for all
    if os.fork() == 0:
        rank = mine + 1
        break
process_group.prepare_connections(size)
dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", size), rank=rank, world_size=size)
before = len(os.listdir("/proc/self/fd"))
group = dist.new_group(backend="gloo")
dist.all_gather_object([None] * size, rank, group=group)
dist.barrier(group)
dist.broadcast_object_list([rank], src=0, group=group)
dist.all_reduce(torch.ones(1), group=group)
after = [None] * size
dist.all_gather_object(after, len(os.listdir("/proc/self/fd")) - before, group=group)
if rank == 0:
    print(json.dumps(after), flush=True)
dist.barrier()
os._exit(0)
"""


def _descriptors_of_a_group(folder, size: int, most_in_a_mesh: int) -> list[int]:
    folder.mkdir()
    command = [sys.executable, "-W", "ignore", "-c", GROUPS, "0", str(size), str(most_in_a_mesh), str(folder)]
    env = {name: value for name, value in os.environ.items() if name != "TORCH_GLOO_LAZY_INIT"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
def test_with_many_ranks_a_group_connects_to_a_few_of_them(tmp_path):
    """At 512 ranks three groups of each to each took 1,560 descriptors on rank 0."""
    size = 20
    assert max(_descriptors_of_a_group(tmp_path / "few", size, most_in_a_mesh=64)) >= size - 1
    assert max(_descriptors_of_a_group(tmp_path / "many", size, most_in_a_mesh=8)) <= 4 + 2 * size.bit_length()


def test_the_limit_of_open_files_is_raised_and_one_that_is_too_low_is_refused(monkeypatch):
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "0")
    limits = {"now": (1024, 4096), "set": None}
    monkeypatch.setattr(resource, "getrlimit", lambda what: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda what, pair: limits.update(set=pair))
    process_group.prepare_connections(2)
    assert limits["set"] == (4096, 4096)
    limits.update(now=(1024, resource.RLIM_INFINITY), set=None)
    process_group.prepare_connections(2)
    assert limits["set"] == (process_group.DESCRIPTORS, resource.RLIM_INFINITY)
    limits.update(now=(200_000, 200_000), set=None)
    process_group.prepare_connections(512)
    assert limits["set"] is None
    limits.update(now=(1024, 1024))
    with pytest.raises(ConfigError, match=r"allows a process 1,024 open files .* 512 ranks need up to 3,584.*limits"):
        process_group.prepare_connections(512)
