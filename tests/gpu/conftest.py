"""make test-gpu: needs a CUDA GPU, or REHEARSE_GPU=1. Its results go to output/gpu: gpu.json, and gpu.html to send."""

import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version

import gpu_lane
import pytest
import torch

from llava_ds.tracking.blocks import note, render, table

RESULTS: list[dict[str, object]] = []
STARTED = time.time()


@pytest.fixture(scope="session", autouse=True)
def a_gpu():
    if not gpu_lane.REHEARSED and not torch.cuda.is_available():
        pytest.exit("make test-gpu needs a CUDA GPU that torch can use; REHEARSE_GPU=1 rehearses it on the CPU", 2)
    gpu_lane.OUTPUT.mkdir(parents=True, exist_ok=True)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.nodeid.startswith("tests/gpu/") and (report.when == "call" or report.outcome != "passed"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
        RESULTS.append(
            {
                "test": report.nodeid.removeprefix("tests/gpu/"),
                "outcome": report.outcome,
                "seconds": round(report.duration, 1),
                "figures": dict(report.user_properties),
                "reason": reason[-3000:],
            }
        )


def pytest_sessionfinish() -> None:
    if RESULTS and gpu_lane.OUTPUT.is_dir():
        found = {"machine": machine(), "seconds": round(time.time() - STARTED), "results": RESULTS}
        (gpu_lane.OUTPUT / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")
        (gpu_lane.OUTPUT / "gpu.html").write_text(page(found))
        print(f"\nresults: {gpu_lane.OUTPUT / 'gpu.json'}; to read and to send: {gpu_lane.OUTPUT / 'gpu.html'}")


def machine() -> dict[str, object]:
    """What the figures belong to."""
    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=gpu_lane.ROOT, capture_output=True, text=True)
    return {
        "device": "CPU (rehearsal: its figures say nothing)" if gpu_lane.REHEARSED else torch.cuda.get_device_name(),
        "GPUs": torch.cuda.device_count(),
        "driver": driver(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "deepspeed", "transformers")},
        **{
            name: found
            for name in ("flash-attn", "flash-attn-3", "liger-kernel", "bitsandbytes")
            if (found := has(name))
        },
        "CUDA": torch.version.cuda,
        "cores": os.cpu_count(),
        "commit": git.stdout.strip() or None,
        "command": " ".join(sys.argv),
    }


def has(name: str) -> str | None:
    try:
        return version(name)
    except ModuleNotFoundError:
        return None


def driver() -> str | None:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, timeout=60).stdout.split("\n")[0] or None
    except OSError:
        return None


def page(found: dict) -> str:
    """The results as one page."""
    outcomes = [result["outcome"] for result in found["results"]]
    summary = ", ".join(f"{outcomes.count(kind)} {kind}" for kind in sorted(set(outcomes)))
    rows = [
        (
            result["test"],
            result["outcome"],
            f"{result['seconds']:.1f}",
            "; ".join(f"{name} {value}" for name, value in result["figures"].items())
            or result["reason"].strip().rpartition("\n")[2],
        )
        for result in found["results"]
    ]
    machine = [(name, str(value)) for name, value in found["machine"].items()]
    return render(
        "page.html.j2",
        title="make test-gpu",
        name="make test-gpu",
        first=[note(f"{summary}, in {found['seconds']:,} s", "note")],
        sections={
            "Machine": [table(["", ""], machine)],
            "Results": [table(["test", "outcome", "s", "figures"], rows, numbers=[2], stacks=True)],
        },
        navigates=False,
    )
