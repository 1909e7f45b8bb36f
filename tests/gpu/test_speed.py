"""LLaVA-1.5-7B's two stages with random weights (on small GPUs as far as memory goes), and memory by the estimate."""

import json

import pytest
from gpu_lane import OUTPUT, REHEARSED, ROOT, run_script

pytestmark = pytest.mark.gpu

BENCH = ROOT / "run" / "dev" / "bench.py"


def test_the_7b_preset(record_property):
    """Two timed steps of both stages; the peak of memory lies at most 10 % beside the estimate of the same flags."""
    folder = OUTPUT / "bench"
    done = run_script(BENCH, "--preset", "gpu-7b", "--rounds", 2, "--output_dir", folder, timeout_s=1200)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    measured = json.loads((folder / "bench.json").read_text())["gpu-7b"]
    for stage in (found for found in measured.values() if isinstance(found, dict)):
        name, peak, estimated = stage["stage"], stage["peak_memory_bytes"], stage["estimated_bytes"]
        for key in ("tokens_per_s", "mfu", "idle_share"):
            record_property(f"{name}: {key}", stage[key])
        record_property(f"{name}: peak memory", f"{peak / 1e9:.1f} GB, estimated {estimated / 1e9:.1f}")
        assert REHEARSED or abs(peak - estimated) <= 0.1 * estimated
