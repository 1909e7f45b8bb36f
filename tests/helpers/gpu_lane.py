"""Device and launches for make test-gpu. REHEARSE_GPU=1 uses the CPU instead.

A rehearsal runs every line of these tests at toy sizes, with fake kernels, so that the tests themselves don't fail in
scarce GPU time. Its figures mean nothing.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from launching import ROOT, TRAIN, command_line, environment

from llava_ds.runtime.launchers import free_port

REHEARSED = os.environ.get("REHEARSE_GPU") == "1"
DEVICE = torch.device("cpu" if REHEARSED else "cuda")
OUTPUT = Path(os.environ.get("GPU_OUTPUT", ROOT / "output" / "gpu"))
ON_GPU = ROOT / "tests" / "workers" / "on_gpu.py"
MOST_S = 600


def on_device() -> dict[str, str]:
    """The environment of a started run: the GPU's own launcher settings, or the CPU ranks of other tests."""
    found = environment()
    if not REHEARSED:
        del found["DS_ACCELERATOR"], found["OMP_NUM_THREADS"]
    return found


def run_script(*command: object, timeout_s: int = MOST_S) -> subprocess.CompletedProcess:
    """Run a script of this project in one process."""
    words = [sys.executable, *map(str, command)]
    return subprocess.run(words, env=on_device(), capture_output=True, text=True, timeout=timeout_s)


def train(flags: dict[str, object], num_ranks: int = 1, how: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    """Run run/train.py through the deepspeed launcher. how: argument of tests/workers/on_gpu.py, for changes to the
    run."""
    launcher = [str(Path(sys.executable).parent / "deepspeed"), "--log_level", "error"]
    launcher += ["--num_accelerators", str(num_ranks), "--master_port", str(free_port())]
    script = [str(ON_GPU), *how] if how else [str(TRAIN)]
    words = [*launcher, *script, *command_line(flags)]
    return subprocess.run(words, env=on_device(), capture_output=True, text=True, timeout=MOST_S)


def trained(flags: dict[str, object], **options: object) -> str:
    """The output of a run that ended well."""
    done = train(flags, **options)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-5000:]
    return output


def rows(output_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (output_dir / "run" / "metrics.jsonl").read_text().splitlines()]


def curve(output_dir: Path) -> list[tuple]:
    """All of a run's log that must not depend on time."""
    return [(row["step"], row["loss"], row["grad_norm"], row["tokens"]) for row in rows(output_dir)]


def logit_difference(output: str) -> float:
    """The largest difference between the exported model's logits and the trained one's, of the largest."""
    (found,) = re.findall(r"logits differ by (\S+) of the largest", output)
    return float(found)
