"""What DeepSpeed's operators are compiled with."""

import pytest
from deepspeed import git_version_info
from ds_json import refused, resolve

from llava_ds.engine.ds_config import native_ops as native
from llava_ds.engine.ds_config import optimizer

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
        "llava_ds.engine.ds_config.native_ops.missing_tools", lambda device, op: ["libaio"] if op == "async_io" else []
    )
    assert refused({"zero_optimization": NVME}) == [
        'offloading to "nvme" uses an operator that DeepSpeed compiles when it starts, and it needs libaio: install '
        'it, or offload to "cpu"'
    ]


def test_a_folder_that_is_wrong_and_a_tool_that_is_missing_are_named_together(monkeypatch):
    monkeypatch.setattr("llava_ds.engine.ds_config.native_ops.missing_tools", lambda device, op: ["libaio"])
    lines = refused({"zero_optimization": {**NVME, "offload_param": {"device": "nvme", "nvme_path": "/dev/null/x"}}})
    assert len(lines) == 2 and "nvme_path /dev/null/x can't be written to" in lines[0] and "needs libaio" in lines[1]


def test_the_folder_on_nvme_is_below_the_output_folder_by_itself(monkeypatch):
    monkeypatch.setattr("llava_ds.engine.ds_config.native_ops.missing_tools", lambda device, op: [])
    section = resolve({"zero_optimization": NVME}).config["zero_optimization"]["offload_param"]
    assert section["nvme_path"].endswith("/out/nvme") and section["nvme_path"].startswith("/")


def test_an_estimate_for_another_machine_asks_nothing_of_this_one(bare):
    raw = {"zero_optimization": {**NVME, "offload_optimizer": {"device": "nvme", "nvme_path": "auto"}}}
    assert resolve(raw, device_type="cuda", is_local=False).config["optimizer"]["type"] == "AdamW"
    assert any("needs nvcc" in line for line in refused(raw, device_type="cuda"))


def test_compiling_is_said_before_it_begins_and_a_lock_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    [note] = native.compiling_notes(["cpu_adam"])
    assert note == "DeepSpeed compiles its cpu_adam when it starts; this takes minutes, once"
    (tmp_path / "cpu_adam").mkdir()
    (tmp_path / "cpu_adam" / "cpu_adam.so").touch()
    assert native.compiling_notes(["cpu_adam"]) == []
    (tmp_path / "cpu_adam" / "lock").touch()
    assert (
        f"{tmp_path}/cpu_adam/lock exists: another process is compiling it" in native.compiling_notes(["cpu_adam"])[1]
    )


def test_the_operators_of_a_json_are_known():
    def of(zero: dict, **block: object) -> dict[str, str]:
        return optimizer.kernels_of({"zero_optimization": zero} | ({"optimizer": block} if block else {}))

    cpu = {"offload_optimizer": {"device": "cpu"}}
    assert of({}) == {} and of({}, type="SGD") == {}
    assert of({}, type="adamw") == {"fused_adam": "optimizer.type adamw"}
    assert of({}, type="AdamW", params={"torch_adam": True}) == {}
    assert of(cpu, type="Muon") == {"cpu_adam": "zero_optimization.offload_optimizer"}
    assert list(of({**cpu, "offload_param": {"device": "nvme"}}, type="Lion")) == ["cpu_lion", "async_io"]
