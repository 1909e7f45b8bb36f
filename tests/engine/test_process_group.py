"""Checks of a rank that is about to join the process group."""

import os
import socket

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
    said = process_group._did_not_meet(error.value)
    assert said.startswith(f"port {port} on {socket.gethostname()} is taken") and "--master_port" in said
    assert "start all machines within" in process_group._did_not_meet(RuntimeError("timed out"))
