"""Each check's way of going wrong, its remedy, and what the exit code says."""

import importlib.util
import json
import os
import resource
import shutil
import subprocess
import sys
import time
import types
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from launching import ROOT

from llava_ds.tools import asked as asked_module
from llava_ds.tools import collective, doctor, machine, software
from llava_ds.tools.asked import OK, PROBLEM, WARNING, Asked, Finding

DOCTOR = ROOT / "run" / "doctor.py"
NVME = {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/nowhere/nvme"}}}
CPU_OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}


@pytest.fixture
def asked(tmp_path) -> Asked:
    return Asked(tmp_path / "out", tmp_path / "cache")


def with_json(config: dict) -> Asked:
    return Asked(Path("output"), Path("cache"), config)


def only(findings: list[Finding], level: str) -> Finding:
    """The one finding of a level, which has a remedy."""
    [found] = [finding for finding in findings if finding.level == level]
    assert found.remedy
    return found


def test_the_packages_are_setup_pys():
    listed = (ROOT / "setup.py").read_text().split("install_requires=[")[1].split("]")[0]
    assert [line.split('"')[1] for line in listed.splitlines() if '"' in line] == list(software.REQUIRED)


@pytest.mark.parametrize(
    ("config", "ops"),
    [
        ({}, set()),
        ({"optimizer": {"type": "AdamW"}}, {"fused_adam"}),
        ({"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, set()),
        ({"optimizer": {"type": "SGD"}}, set()),
        (CPU_OFFLOAD, {"cpu_adam"}),
        ({**CPU_OFFLOAD, "optimizer": {"type": "Lion"}}, {"cpu_lion"}),
        ({**CPU_OFFLOAD, "zero_force_ds_cpu_optimizer": False}, set()),
        (NVME, {"cpu_adam", "async_io"}),
        ({"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": "/x"}}}, {"async_io"}),
        ({"zero_optimization": "auto", "optimizer": []}, set()),
    ],
)
def test_what_a_json_asks_for(config, ops):
    assert set(with_json(config).ops) == ops


def test_python_and_packages(asked, monkeypatch):
    assert [finding.level for finding in software.check_python(asked) + software.check_packages(asked)] == [OK, OK]
    monkeypatch.setattr(software, "LEAST_PYTHON", (9, 0))
    assert "9.0 is needed" in only(software.check_python(asked), PROBLEM).found
    monkeypatch.setattr(software, "REQUIRED", ("torch>=99", "no-such-package-here"))
    found = [finding.found for finding in software.check_packages(asked) if finding.level == PROBLEM]
    assert "and torch>=99 is needed" in found[0] and found[1] == "no-such-package-here is not installed"


def test_a_torchvision_of_another_build(asked, monkeypatch, tmp_path):
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    importlib.invalidate_caches()
    problem = only(software.check_imports(asked), PROBLEM)
    assert "import torchvision: RuntimeError: operator" in problem.found and "uninstall torchvision" in problem.remedy
    # What needs the packages is not looked at then, and says so.
    checks = [check for check in doctor.CHECKS if check.name in ("imports", "devices")]
    levels = [(name, finding.level) for name, finding in doctor.examine(asked, tuple(checks))]
    assert levels == [("imports", PROBLEM), ("devices", WARNING)]


def test_a_compiler_counts_where_something_is_compiled(asked, monkeypatch):
    monkeypatch.setattr(software, "_is_built", lambda op: False)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no no-such-compiler" in only(software.check_compiler(asked), WARNING).found
    problem = only(software.check_compiler(with_json(CPU_OFFLOAD)), PROBLEM)
    assert "cpu_adam would be compiled" in problem.found and "g++" in problem.remedy
    monkeypatch.setattr(software, "_is_built", lambda op: True)
    only(software.check_compiler(with_json(CPU_OFFLOAD)), WARNING)


@pytest.mark.parametrize(("nvcc", "found"), [(None, "no nvcc"), ("release 11.8, V11", "nvcc is CUDA 11.8, torch was")])
def test_a_cuda_toolkit_that_does_not_fit(monkeypatch, nvcc, found):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", "/cuda")
    monkeypatch.setattr(software, "_is_built", lambda op: False)
    monkeypatch.setattr(software, "output_of", lambda *command: nvcc if "nvcc" in command[0] else "1.0")
    monkeypatch.setattr(shutil, "which", lambda command: f"/bin/{command}")
    problem = only(software.check_compiler(with_json({"optimizer": {"type": "Adam"}})), PROBLEM)
    assert found in problem.found and "CUDA toolkit 12.8" in problem.remedy


def test_a_lock_on_which_torch_would_wait(asked, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    assert "is being built, or was broken off" in only(software.check_built_operators(asked), WARNING).found
    os.utime(lock, (0, 0))
    only(software.check_built_operators(asked), WARNING)
    problem = only(software.check_built_operators(with_json(CPU_OFFLOAD)), PROBLEM)
    assert str(lock) in problem.found and problem.remedy == "delete that file"
    monkeypatch.setattr(software, "can_be_written", lambda path: False)
    assert "TORCH_EXTENSIONS_DIR" in only(software.check_built_operators(asked), WARNING).remedy


def test_an_operator_that_can_not_be_compiled(asked, monkeypatch):
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    def refuse(verbose):
        print("\x1b[93m [WARNING] \x1b[0m async_io requires the dev libaio .so object and headers")
        return False

    monkeypatch.setattr(ALL_OPS["async_io"], "is_compatible", refuse)
    assert all(finding.level == OK for finding in software.check_operators(asked))
    problem = only(software.check_operators(with_json(NVME)), PROBLEM)
    assert "requires the dev libaio" in problem.found and "libaio-dev" in problem.remedy


def test_attention(asked, monkeypatch, tmp_path):
    [found] = software.check_attention(asked)
    assert found.level == OK
    (tmp_path / "flash_attn.py").write_text("raise ImportError('undefined symbol')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert "undefined symbol" in only(software.check_attention(asked), WARNING).found
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "uninstall flash-attn" in only(software.check_attention(asked), PROBLEM).remedy
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "neither" in only(software.check_attention(asked), PROBLEM).found


def test_a_machine_without_a_gpu(asked, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(machine, "output_of", lambda *command: None)
    assert [finding.level for finding in machine.check_devices(asked)] == [OK]
    assert "GPUs only" in only(machine.check_devices(with_json({"fp16": {"enabled": True}})), PROBLEM).found
    monkeypatch.setattr(machine, "output_of", lambda *command: "NVIDIA H100, 550.54")
    assert "torch's CUDA build" in only(machine.check_devices(asked), WARNING).remedy
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert "a driver for CUDA 12.8" in only(machine.check_devices(asked), WARNING).remedy


def test_gpus(asked, monkeypatch):
    properties = namedtuple("Properties", "name major minor")
    gpus = [properties("A100", 8, 0), properties("V100", 7, 0)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: gpus[i])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: ((40 - 30 * i) * 2**30, 40 * 2**30))
    monkeypatch.setattr(machine, "output_of", lambda *command: "A100, 550.54\nV100, 550.54")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    findings = machine.check_devices(with_json({"bf16": {"enabled": True}}))
    assert "GPU 0: A100, 40 GiB, compute capability 8.0, bf16" in [finding.found for finding in findings]
    assert findings[-1].found.startswith("driver 550.54")
    warnings = " ".join(finding.found for finding in findings if finding.level == WARNING)
    for part in ("DS_ACCELERATOR is cpu", "GPU 1 computes bf16 in software", "others hold 30 of 40", "the GPUs differ"):
        assert part in warnings
    assert all(finding.level != PROBLEM for finding in findings)


def test_memory_and_its_limits(asked, monkeypatch):
    numbers = {"/sys/fs/cgroup/memory.max": 3 * 2**30, "/sys/fs/cgroup/memory.current": 2**30}
    monkeypatch.setattr(machine, "_read_number", numbers.get)
    assert only(machine.check_memory(asked), WARNING).found == "2 of 3 GiB available"
    limits = {resource.RLIMIT_NOFILE: (1024, 1 << 20), resource.RLIMIT_MEMLOCK: (8 << 20, 8 << 20)}
    monkeypatch.setattr(resource, "getrlimit", limits.get)
    findings = machine.check_limits(with_json(NVME))
    assert [finding.remedy.split(" (")[0] for finding in findings] == ["", "ulimit -n 65536", "ulimit -l unlimited"]


def test_shared_memory_and_disks(asked, monkeypatch, tmp_path):
    assert "--dataloader_num_workers 0" not in machine.check_disks(asked)[0].remedy
    only(machine.check_shared_memory(asked, tmp_path / "shm"), PROBLEM)
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(64 << 20))
    assert "--shm-size" in only(machine.check_shared_memory(asked, tmp_path), WARNING).remedy
    assert [finding.level for finding in machine.check_disks(asked)] == [PROBLEM, PROBLEM]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2 << 30))
    assert [finding.level for finding in machine.check_disks(asked)] == [WARNING, WARNING]
    monkeypatch.setattr(machine, "can_be_written", lambda path: False)
    assert "can't be written to" in machine.check_disks(asked)[0].found


def test_the_folder_that_is_offloaded_to(asked, monkeypatch, tmp_path):
    assert [finding.level for finding in machine.check_nvme(asked)] == [OK]
    assert "mkdir -p /nowhere/nvme" in only(machine.check_nvme(with_json(NVME)), PROBLEM).remedy
    section = {"device": "nvme", "nvme_path": str(tmp_path)}
    here = with_json({"zero_optimization": {"offload_param": section}})
    monkeypatch.setattr(machine, "_opens_directly", lambda folder: False)
    assert "O_DIRECT" in only(machine.check_nvme(here), PROBLEM).found
    section.pop("nvme_path")
    missing = with_json({"zero_optimization": {"offload_param": section}})
    assert "offload_param.nvme_path is missing" in only(machine.check_nvme(missing), PROBLEM).found


def test_the_network(asked, monkeypatch):
    monkeypatch.setattr(machine, "is_loopback_name", lambda host: True)
    monkeypatch.setattr(machine.socket, "if_nameindex", lambda: [(1, "lo"), (2, "ib0")])
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "DEEPSPEED_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    assert "/etc/hosts" in only(machine.check_network(asked), WARNING).remedy
    for name, good, bad in (
        ("GLOO_SOCKET_IFNAME", ("ib0", "lo,ib0"), ("ib", "eth0")),
        ("NCCL_SOCKET_IFNAME", ("ib", "=ib0", "eth,ib", "^lo"), ("=ib", "eth")),
        ("DEEPSPEED_TIMEOUT", ("30",), ("0", "1.5", "soon")),
    ):
        for value in good + bad:
            monkeypatch.setenv(name, value)
            problems = [finding.found for finding in machine.check_network(asked) if finding.level == PROBLEM]
            assert len(problems) == (value in bad) and all(name in found for found in problems), (name, value)
        monkeypatch.delenv(name)


def test_backends(asked, monkeypatch):
    assert machine.check_backends(asked)[0].found.startswith("gloo")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert "no NCCL" in only(machine.check_backends(asked), PROBLEM).found
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    assert "no gloo" in only(machine.check_backends(asked), PROBLEM).found


def test_ranks_that_do_not_end_are_ended(monkeypatch, tmp_path):
    """The launcher is replaced by a sleeper with a child of its own: both are gone afterwards."""
    sleeper = tmp_path / "sleeper"
    sleeper.write_text(f"#!/bin/sh\nsleep 60 & echo $! > {tmp_path}/child\nwait\n")
    sleeper.chmod(0o755)
    monkeypatch.setattr(collective.sys, "executable", str(sleeper))
    finding = collective.try_collective("gloo", 2, timeout_s=1.0)
    assert finding.level == PROBLEM and "did not end within 1 s" in finding.found and finding.remedy
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 20
    while _runs(child):
        assert time.monotonic() < deadline, "the child outlived its launcher"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"  # a zombie until init has seen it
    except FileNotFoundError:
        return False


def test_ranks_that_fail_say_why(monkeypatch, tmp_path):
    failing = tmp_path / "failing"
    failing.write_text("#!/bin/sh\necho starting\necho 'RuntimeError: no route' >&2\nexit 3\n")
    failing.chmod(0o755)
    monkeypatch.setattr(collective.sys, "executable", str(failing))
    finding = collective.try_collective("nccl", 2)
    assert finding.found == "2 ranks over nccl failed (exit code 3): RuntimeError: no route"
    assert "NCCL_DEBUG" in finding.remedy


def test_which_ranks_are_tried(asked, monkeypatch):
    tried = []
    monkeypatch.setattr(collective, "try_collective", lambda *what: tried.append(what) or Finding(OK, ""))
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    for num_gpus in (0, 1, 8):
        monkeypatch.setattr(torch.cuda, "device_count", lambda n=num_gpus: n)
        collective.check_collective(asked)
    assert tried == [("gloo", 2), ("gloo", 2), ("nccl", 1), ("nccl", 8)]


def test_a_check_that_breaks_is_a_problem(asked):
    def check_nothing(asked):
        raise OSError("gone")

    [(name, finding)] = doctor.examine(asked, (doctor.Check("x", check_nothing),))
    assert name == "x" and finding.level == PROBLEM and "OSError: gone" in finding.found


def test_a_command_that_is_not_there_or_hangs():
    assert asked_module.output_of("no-such-command") is None
    assert asked_module.output_of("sleep", "5", timeout_s=0.1) is None
    assert asked_module.output_of("false") is None and asked_module.output_of("echo", "a") == "a"


def load_run() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("run_doctor", DOCTOR)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_exit_code_follows_the_worst_finding(monkeypatch, capsys):
    run = load_run()
    for levels, code in (([OK], 0), ([OK, WARNING], 0), ([WARNING, PROBLEM], 1)):
        made = [("some check", Finding(level, "found", "do this" * (level != OK))) for level in levels]
        monkeypatch.setattr(run, "examine", lambda asked, checks, made=made: iter(made))
        assert run.main([]) == code
        out = capsys.readouterr().out
        assert ("training can start" in out) == (code == 0) and out.count("-> do this") == len(levels) - (OK in levels)
        assert run.main(["--json"]) == code
        report = json.loads(capsys.readouterr().out)
        assert report["can_start"] == (code == 0) and [each["level"] for each in report["findings"]] == levels


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_json_that_can_not_be_used_is_exit_code_2(tmp_path, text):
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text)
    done = subprocess.run([sys.executable, str(DOCTOR), "--deepspeed", str(path)], capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.startswith("run/doctor.py: error: --deepspeed_config")
    done = subprocess.run([sys.executable, str(DOCTOR), "--nonsense"], capture_output=True, text=True)
    assert done.returncode == 2


def test_this_machine_can_train(tmp_path):
    """Really: two ranks over the launcher, and nothing but the report on standard output."""
    command = [sys.executable, str(DOCTOR), "--json", "--output_dir", str(tmp_path), "--cache_dir", str(tmp_path)]
    config = ROOT / "ds_configs" / "zero3.json"
    done = subprocess.run([*command, "--deepspeed_config", str(config)], capture_output=True, text=True, timeout=300)
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["can_start"], done.stdout
    assert {finding["check"] for finding in report["findings"]} == {check.name for check in doctor.CHECKS}
    [ranks] = [finding["found"] for finding in report["findings"] if finding["check"] == "collective"][:1]
    for name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast"):
        assert name in ranks
