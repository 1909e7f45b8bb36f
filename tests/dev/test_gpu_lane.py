"""make test-gpu, rehearsed on the CPU: every line of the lane runs, and leaves its results."""

import json
import os
import subprocess
import sys

import pytest
from launching import ROOT


@pytest.mark.long
def test_the_lane_runs_and_leaves_its_results(tmp_path):
    words = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "tests/gpu"]
    variables = {"REHEARSE_GPU": "1", "GPU_OUTPUT": str(tmp_path / "gpu")}
    done = subprocess.run(words, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    found = json.loads((tmp_path / "gpu" / "gpu.json").read_text())
    assert "rehearsal" in found["machine"]["device"]
    files = {result["test"].partition("::")[0] for result in found["results"] if result["outcome"] == "passed"}
    assert files == {path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    page = (tmp_path / "gpu" / "gpu.html").read_text()
    assert all(result["test"].replace("'", "&#39;") in page for result in found["results"])


@pytest.mark.full
def test_without_a_gpu_it_says_what_it_needs():
    words = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "tests/gpu/test_speed.py"]
    variables = {name: value for name, value in os.environ.items() if name != "REHEARSE_GPU"} | {
        "CUDA_VISIBLE_DEVICES": ""
    }
    done = subprocess.run(words, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "make test-gpu needs a CUDA GPU" in done.stdout
