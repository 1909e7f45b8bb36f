"""What DeepSpeed's operators are compiled with."""

import pytest
from deepspeed import git_version_info
from ds_json import refused, resolve

from llava_ds.ds_config import native

NVME = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "auto"}}


@pytest.fixture
def bare(monkeypatch):
    """A machine without compilers."""
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", None)


def test_what_is_missing_is_named(bare, monkeypatch):
    assert native.missing_tools("cpu", "cpu_adam") == ["g++", "ninja"]
    assert native.missing_tools("cuda", "cpu_adam") == ["nvcc", "g++", "ninja"]
    monkeypatch.setitem(git_version_info.installed_ops, "cpu_adam", True)
    assert native.missing_tools("cuda", "cpu_adam") == []


def test_libaio_is_missed_only_where_a_compiler_could_use_it(monkeypatch):
    monkeypatch.setattr(native.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(native, "_has_libaio", lambda: False)
    assert native.missing_tools("cpu", "async_io") == ["libaio with its headers (libaio-dev, libaio-devel)"]
    assert native.missing_tools("cpu", "cpu_adam") == []


def test_offload_to_nvme_says_what_it_needs(monkeypatch, tmp_path):
    monkeypatch.setattr(
        "llava_ds.ds_config.zero.missing_tools", lambda device, op: ["libaio"] if op == "async_io" else []
    )
    assert refused({"zero_optimization": NVME}) == [
        'offloading to "nvme" reads and writes by an operator that DeepSpeed compiles when it starts, which needs '
        'libaio: install it, or offload to "cpu"'
    ]


def test_the_folder_on_nvme_is_below_the_output_folder_by_itself(monkeypatch):
    monkeypatch.setattr("llava_ds.ds_config.zero.missing_tools", lambda device, op: [])
    section = resolve({"zero_optimization": NVME}).config["zero_optimization"]["offload_param"]
    assert section["nvme_path"].endswith("/out/nvme") and section["nvme_path"].startswith("/")


def test_an_estimate_for_another_machine_asks_nothing_of_this_one(bare):
    raw = {"zero_optimization": {**NVME, "offload_optimizer": {"device": "nvme", "nvme_path": "auto"}}}
    assert resolve(raw, device_type="cuda", here=False).config["optimizer"]["type"] == "AdamW"
    assert any("needs nvcc" in line for line in refused(raw, device_type="cuda"))
