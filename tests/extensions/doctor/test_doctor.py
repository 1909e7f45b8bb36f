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

from llava_ds.engine.ds_config.optimizer import OPTIMIZERS
from llava_ds.extensions.doctor import checks as doctor
from llava_ds.extensions.doctor import collectives as collective
from llava_ds.extensions.doctor import machine, software
from llava_ds.extensions.doctor import requirements as requirements
from llava_ds.extensions.doctor.requirements import OK, PROBLEM, WARNING, Finding, Requirements

DOCTOR = ROOT / "run" / "doctor.py"
NVME = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "auto"}}}
CPU_OFFLOAD = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}


@pytest.fixture
def required(tmp_path) -> Requirements:
    return Requirements(tmp_path / "out", tmp_path / "cache")


@pytest.fixture
def with_json(tmp_path, monkeypatch):
    """From a DeepSpeed JSON, or a file's text, to what it asks for; nothing to compile with is missing."""
    monkeypatch.setattr("llava_ds.engine.ds_config.native_ops.missing_tools", lambda device_type, op: [])
    monkeypatch.setattr("llava_ds.engine.ds_config.optimizer_block.missing_tools", lambda device_type, op: [])

    def make(config: dict | str) -> Requirements:
        path = tmp_path / "ds.json"
        path.write_text(config if isinstance(config, str) else json.dumps(config))
        return Requirements(tmp_path / "out", tmp_path / "cache", path)

    return make


def only(findings: list[Finding], level: str) -> Finding:
    """The one finding of a level, which has a remedy."""
    [found] = [finding for finding in findings if finding.level == level]
    assert found.remedy
    return found


@pytest.mark.parametrize(
    ("config", "ops"),
    [
        ({}, set()),
        ({"optimizer": {"type": "AdamW"}}, set()),  # filled with torch_adam where there is no GPU
        ({"optimizer": {"type": "SGD"}}, set()),
        (CPU_OFFLOAD, {"cpu_adam"}),
        ({**CPU_OFFLOAD, "optimizer": {"type": "lion"}}, {"cpu_lion"}),
        ({**CPU_OFFLOAD, "zero_force_ds_cpu_optimizer": False}, set()),
        (NVME, {"cpu_adam", "async_io"}),
        ({"optimizer": {"type": "Lion"}}, set()),  # refused: it has a kernel for GPUs only
    ],
)
def test_what_a_json_asks_for_without_a_gpu(with_json, monkeypatch, config, ops):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert set(with_json(config).ops) == ops


@pytest.mark.parametrize(
    ("optimizer", "ops"),
    [
        ({"type": "AdamW"}, {"fused_adam"}),
        ({"type": "AdamW", "params": {"torch_adam": True}}, set()),
        ({"type": "Lion"}, {"fused_lion"}),
    ],
)
def test_what_a_json_asks_for_with_a_gpu(with_json, monkeypatch, optimizer, ops):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    assert set(with_json({"optimizer": optimizer}).ops) == ops
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert set(with_json({"optimizer": optimizer}).ops) == set()


def test_every_operator_is_one_of_deepspeeds():
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    ops = {op for facts in OPTIMIZERS.values() for op in (facts.op, facts.offloaded_op) if op is not None}
    assert {"fused_adam", "cpu_adam"} <= ops
    assert all(op in ALL_OPS or op.startswith("fused_") or op.startswith("cpu_") for op in ops)


@pytest.mark.parametrize(
    ("text", "found", "remedy"),
    [
        ('{"zero_optimization": {"stage": 9}}', "zero_optimization.stage", ""),
        ('{"zero_optimisation": {"stage": 2}}', "zero_optimisation", "zero_optimization"),
        (
            '{"optimizer": {"type": "AdamWW"}}',
            'optimizer.type "AdamWW" in the DeepSpeed JSON is unknown',
            "did you mean",
        ),
        ('{"fp16": {"enabled": true}, "zero_optimization": {"stage": 2}}', "there is no GPU", "use --bf16 or fp32"),
        ('{"gradient_clipping": 1, "gradient_clipping": 2}', "gradient_clipping occurs twice", ""),
        ('{"zero_optimization": ', "can't be read as JSON", "ds_configs/"),
        ("[]", "holds a list: expected a JSON object", "ds_configs/"),
        (
            '{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}',
            "offload_param.nvme_path is missing",
            "name a folder on a local NVMe disk",
        ),
    ],
)
def test_what_training_refuses_is_a_problem(with_json, monkeypatch, text, found, remedy):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    required = with_json(text)
    problem = only(software.check_configuration(required), PROBLEM)
    assert found in problem.found and remedy in problem.remedy
    assert next(machine.check_nvme(required)).level == WARNING and required.ops == {}


def test_every_line_of_a_refusal_is_a_problem_of_its_own(with_json):
    findings = list(
        software.check_configuration(with_json({"zero_optimization": {"stage": 9}, "optimizer": {"type": "x"}}))
    )
    assert len(findings) == 2 and all(each.level == PROBLEM and each.remedy for each in findings)


@pytest.mark.parametrize("path", sorted((ROOT / "ds_configs").glob("*.json")), ids=lambda path: path.stem)
def test_the_jsons_of_this_repository_can_be_used(with_json, path):
    [found] = software.check_configuration(with_json(path.read_text()))
    assert found.level == OK, found


@pytest.mark.parametrize(
    "config",
    [
        {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
        {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}},
        '{ // with a comment\n "zero_optimization": {"stage": 2}}',
    ],
)
def test_a_json_for_more_ranks_or_with_comments_can_be_used(with_json, config):
    [found] = software.check_configuration(with_json(config))
    assert found.level == OK, found


def test_without_a_json_there_is_nothing_to_refuse(required):
    assert [finding.level for finding in software.check_configuration(required)] == [OK]


def test_python_and_packages(required, monkeypatch):
    assert [finding.level for finding in [*software.check_python(required), *software.check_packages(required)]] == [
        OK,
        OK,
    ]
    monkeypatch.setattr(software.importlib.metadata, "metadata", lambda name: {"Requires-Python": ">=9.0"})
    assert ">=9.0 is needed" in only(software.check_python(required), PROBLEM).found
    listed = ["torch>=99", "no-such-package-here", 'not-wanted; extra == "video"']
    monkeypatch.setattr(software.importlib.metadata, "requires", lambda name: listed)
    found = [finding.found for finding in software.check_packages(required) if finding.level == PROBLEM]
    assert len(found) == 2
    assert "but torch>=99 is needed" in found[0] and found[1] == "no-such-package-here is not installed"

    def missing(name):
        raise software.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(software.importlib.metadata, "requires", missing)
    monkeypatch.setattr(software.importlib.metadata, "metadata", missing)
    assert [finding.level for finding in software.check_python(required)] == [OK]
    assert "llava_ds is not installed" in only(software.check_packages(required), WARNING).found


def test_a_torchvision_of_another_build(required, monkeypatch, tmp_path):
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    importlib.invalidate_caches()
    problem = only(software.check_imports(required), PROBLEM)
    assert "import torchvision: RuntimeError: operator" in problem.found and "uninstall torchvision" in problem.remedy
    # What needs the packages is not looked at then, and says so.
    checks = [check for check in doctor.CHECKS if check.name in ("imports", "devices")]
    levels = [(name, finding.level) for name, finding in doctor.examine(required, tuple(checks))]
    assert levels == [("imports", PROBLEM), ("devices", WARNING)]


def test_a_compiler_counts_where_something_is_compiled(required, with_json, monkeypatch):
    monkeypatch.setattr(software, "_is_built", lambda op: False)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no no-such-compiler" in only(software.check_compiler(required), WARNING).found
    problem = only(software.check_compiler(with_json(CPU_OFFLOAD)), PROBLEM)
    assert "cpu_adam would be compiled" in problem.found and "g++" in problem.remedy
    monkeypatch.setattr(software, "_is_built", lambda op: True)
    only(software.check_compiler(with_json(CPU_OFFLOAD)), WARNING)


@pytest.mark.parametrize(("nvcc", "found"), [(None, "no nvcc"), ("release 11.8, V11", "nvcc is CUDA 11.8, torch was")])
def test_a_cuda_toolkit_that_does_not_fit(with_json, monkeypatch, nvcc, found):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", "/cuda")
    monkeypatch.setattr(software, "_is_built", lambda op: False)
    monkeypatch.setattr(software, "output_of", lambda *command: nvcc if "nvcc" in command[0] else "1.0")
    monkeypatch.setattr(shutil, "which", lambda command: f"/bin/{command}")
    problem = only(software.check_compiler(with_json({"optimizer": {"type": "Adam"}})), PROBLEM)
    assert found in problem.found and "CUDA toolkit 12.8" in problem.remedy
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")  # what is compiled for the CPU needs none
    assert found in only(software.check_compiler(with_json(CPU_OFFLOAD)), WARNING).found


def test_a_lock_on_which_torch_would_wait(required, with_json, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    assert (
        "is being built, or the build was interrupted" in only(software.check_built_operators(required), WARNING).found
    )
    os.utime(lock, (0, 0))
    only(software.check_built_operators(required), WARNING)
    problem = only(software.check_built_operators(with_json(CPU_OFFLOAD)), PROBLEM)
    assert str(lock) in problem.found and problem.remedy == "delete that file"
    monkeypatch.setattr(software, "can_be_made", lambda path: False)
    assert "TORCH_EXTENSIONS_DIR" in only(software.check_built_operators(required), WARNING).remedy


def test_an_operator_that_can_not_be_compiled(required, with_json, monkeypatch):
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    def refuse(verbose):
        print("\x1b[93m [WARNING] \x1b[0m async_io requires the dev libaio .so object and headers")
        return False

    monkeypatch.setattr(ALL_OPS["async_io"], "is_compatible", refuse)
    assert all(finding.level == OK for finding in software.check_operators(required))
    problem = only(software.check_operators(with_json(NVME)), PROBLEM)
    assert "requires the dev libaio" in problem.found and "libaio-dev" in problem.remedy


def test_attention(required, monkeypatch, tmp_path):
    [found] = software.check_attention(required)
    assert found.level == OK
    (tmp_path / "flash_attn.py").write_text("raise ImportError('undefined symbol')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert "undefined symbol" in only(software.check_attention(required), WARNING).found
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "uninstall flash-attn" in only(software.check_attention(required), PROBLEM).remedy
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "neither" in only(software.check_attention(required), PROBLEM).found


def test_a_machine_without_a_gpu(required, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(machine, "output_of", lambda *command: None)
    assert [finding.level for finding in machine.check_devices(required)] == [OK]
    monkeypatch.setattr(machine, "output_of", lambda *command: "NVIDIA H100, 550.54")
    assert "torch's CUDA build" in only(machine.check_devices(required), WARNING).remedy
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert "a driver for CUDA 12.8" in only(machine.check_devices(required), WARNING).remedy


def test_gpus(required, monkeypatch):
    properties = namedtuple("Properties", "name major minor")
    gpus = [properties("A100", 8, 0), properties("V100", 7, 0)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: gpus[i])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: ((40 - 30 * i) * 2**30, 40 * 2**30))
    monkeypatch.setattr(machine, "output_of", lambda *command: "A100, 550.54\nV100, 550.54")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    findings = list(machine.check_devices(required))
    assert "GPU 0: A100, 40 GiB, compute capability 8.0, bf16" in [finding.found for finding in findings]
    assert findings[-1].found.startswith("driver 550.54")
    warnings = " ".join(finding.found for finding in findings if finding.level == WARNING)
    for part in ("DS_ACCELERATOR is cpu", "other processes hold 30 of 40", "the GPUs differ"):
        assert part in warnings
    assert all(finding.level != PROBLEM for finding in findings)


def test_memory_and_its_limits(required, with_json, monkeypatch):
    numbers = {"/sys/fs/cgroup/memory.max": 3 * 2**30, "/sys/fs/cgroup/memory.current": 2**30}
    monkeypatch.setattr(machine, "_read_number", numbers.get)
    assert only(machine.check_memory(required), WARNING).found == "2 of 3 GiB available"
    limits = {resource.RLIMIT_NOFILE: (1024, 1 << 20), resource.RLIMIT_MEMLOCK: (8 << 20, 8 << 20)}
    monkeypatch.setattr(resource, "getrlimit", limits.get)
    monkeypatch.setattr(machine, "_has_rdma", lambda: True)
    findings = list(machine.check_limits(required))
    assert [finding.remedy.split(" (")[0] for finding in findings] == ["", "ulimit -n 65536", "ulimit -l unlimited"]
    monkeypatch.setattr(machine, "_has_rdma", lambda: False)
    assert len(list(machine.check_limits(required))) == 2
    pinned = list(machine.check_nvme(with_json(NVME)))[-1]
    assert "offload to NVMe pins more" in pinned.found and "ulimit -l unlimited" in pinned.remedy


def test_shared_memory_and_disks(required, monkeypatch, tmp_path):
    assert "--dataloader_num_workers 0" not in next(machine.check_disks(required)).remedy
    only(machine.check_shared_memory(required, tmp_path / "shm"), PROBLEM)
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(64 << 20))
    assert "--shm-size" in only(machine.check_shared_memory(required, tmp_path), WARNING).remedy
    assert [finding.level for finding in machine.check_disks(required)] == [PROBLEM, PROBLEM]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2 << 30))
    assert [finding.level for finding in machine.check_disks(required)] == [WARNING, WARNING]
    monkeypatch.setattr(machine, "can_be_made", lambda path: False)
    assert "can't be written to" in next(machine.check_disks(required)).found


def test_the_folder_that_is_offloaded_to(required, with_json, monkeypatch, tmp_path):
    assert [finding.level for finding in machine.check_nvme(required)] == [OK]
    section = {"device": "nvme", "nvme_path": str(tmp_path)}
    here = with_json({"zero_optimization": {"stage": 3, "offload_param": section}})
    assert f"offload_param.nvme_path {tmp_path}: " in next(machine.check_nvme(here)).found
    monkeypatch.setattr(machine, "_opens_directly", lambda folder: False)
    assert "O_DIRECT" in only(machine.check_nvme(here), PROBLEM).found


def test_the_network(required, monkeypatch):
    monkeypatch.setattr(machine, "is_loopback_name", lambda host: True)
    monkeypatch.setattr(machine.socket, "if_nameindex", lambda: [(1, "lo"), (2, "ib0")])
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "DEEPSPEED_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    assert "/etc/hosts" in only(machine.check_network(required), WARNING).remedy
    for name, good, bad in (
        ("GLOO_SOCKET_IFNAME", ("ib0", "lo,ib0"), ("ib", "eth0")),
        ("NCCL_SOCKET_IFNAME", ("ib", "=ib0", "eth,ib", "^lo"), ("=ib", "eth")),
        ("DEEPSPEED_TIMEOUT", ("30",), ("0", "1.5", "soon")),
    ):
        for value in good + bad:
            monkeypatch.setenv(name, value)
            problems = [finding.found for finding in machine.check_network(required) if finding.level == PROBLEM]
            assert len(problems) == (value in bad) and all(name in found for found in problems), (name, value)
        monkeypatch.delenv(name)


def test_backends(required, monkeypatch):
    assert next(machine.check_backends(required)).found.startswith("gloo")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert "no NCCL" in only(machine.check_backends(required), PROBLEM).found
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    assert "no gloo" in only(machine.check_backends(required), PROBLEM).found


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


def test_which_ranks_are_tried(required, monkeypatch):
    tried = []
    monkeypatch.setattr(collective, "try_collective", lambda *what: tried.append(what) or Finding(OK, ""))
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    for num_gpus in (0, 1, 8):
        monkeypatch.setattr(torch.cuda, "device_count", lambda n=num_gpus: n)
        list(collective.check_collective(required))
    assert tried == [("gloo", 2), ("gloo", 2), ("nccl", 1), ("nccl", 8)]


def test_a_check_that_breaks_is_a_problem(required):
    def check_nothing(required):
        raise OSError("gone")

    [(name, finding)] = doctor.examine(required, (doctor.Check("x", check_nothing),))
    assert name == "x" and finding.level == PROBLEM and "OSError: gone" in finding.found


def test_a_command_that_is_not_there_or_hangs():
    assert requirements.output_of("no-such-command") is None
    assert requirements.output_of("sleep", "5", timeout_s=0.1) is None
    assert requirements.output_of("false") is None and requirements.output_of("echo", "a") == "a"


def load_run() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("run_doctor", DOCTOR)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_exit_code_follows_the_worst_finding(monkeypatch, capsys):
    run = load_run()
    for levels, code in (([OK], 0), ([OK, WARNING], 0), ([WARNING, PROBLEM], 1)):
        made = [("some check", Finding(level, "found", "do this" * (level != OK))) for level in levels]
        monkeypatch.setattr(run, "examine", lambda required, checks, made=made: iter(made))
        assert run.main([]) == code
        out = capsys.readouterr().out
        assert ("training can start" in out) == (code == 0) and out.count("-> do this") == len(levels) - (OK in levels)
        assert run.main(["--json"]) == code
        report = json.loads(capsys.readouterr().out)
        assert report["can_start"] == (code == 0) and [each["level"] for each in report["findings"]] == levels


def test_flags_that_can_not_be_used_are_exit_code_2(tmp_path):
    path = tmp_path / "ds.json"
    done = subprocess.run([sys.executable, str(DOCTOR), "--deepspeed", str(path)], capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.startswith("run/doctor.py: error: --deepspeed_config")
    done = subprocess.run([sys.executable, str(DOCTOR), "--nonsense"], capture_output=True, text=True)
    assert done.returncode == 2


@pytest.mark.long
def test_a_json_that_training_refuses_is_exit_code_1(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{ // as DeepSpeed allows\n "zero_optimization": {"stage": 9}}')
    command = [sys.executable, str(DOCTOR), "--no_collective", "--output_dir", str(tmp_path), "--cache_dir"]
    done = subprocess.run([*command, str(tmp_path), "--deepspeed", str(path)], capture_output=True, text=True)
    assert done.returncode == 1 and "training can not start (problems: 1" in done.stdout, done.stdout + done.stderr
    assert "problem  configuration    zero_optimization.stage" in done.stdout


@pytest.mark.long
def test_this_machine_can_train(tmp_path):
    """Really: two ranks over the launcher, and nothing but the report on standard output."""
    command = [sys.executable, str(DOCTOR), "--json", "--output_dir", str(tmp_path), "--cache_dir", str(tmp_path)]
    config = ROOT / "ds_configs" / "zero3.json"
    done = subprocess.run([*command, "--deepspeed_config", str(config)], capture_output=True, text=True, timeout=300)
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["can_start"], done.stdout
    assert {finding["check"] for finding in report["findings"]} == {check.name for check in doctor.CHECKS}
    [ranks] = [finding["found"] for finding in report["findings"] if finding["check"] == "collective"][:1]
    for name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send"):
        assert name in ranks


@pytest.mark.full
def test_a_shipped_json_is_found_by_name(tmp_path):
    command = [sys.executable, str(ROOT / "run" / "doctor.py"), "--no_collective", "--json"]
    done = subprocess.run(
        [*command, "--deepspeed_config", "zero2"], capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    assert "no such file" not in done.stderr and "zero2.json" in done.stdout
