"""Run a script as it is, and measure beside it, in the same process, how fast this machine multiplies matrices.

Started by the deepspeed launcher: beside_peak.py FILE.json SCRIPT ARGUMENTS. All ranks measure at once, as they compute
in training.
"""

import json
import os
import runpy
import sys
import time
from pathlib import Path

import torch

SECONDS = 0.6


def gemm_flops(device: torch.device, dtype: torch.dtype, size: int, seconds: float = SECONDS) -> float:
    """FLOP/s of a product of two square matrices, the best of as many as fit the time; on CUDA by events."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    torch.mm(a, b)
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        best = min(best, _seconds(a, b))
    return 2 * size**3 / best


def _seconds(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.device.type != "cuda":
        started = time.perf_counter()
        torch.mm(a, b)
        return time.perf_counter() - started
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.mm(a, b)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def main(argv: list[str]) -> None:
    peak_file, script, *arguments = argv
    flops = gemm_flops(torch.device("cpu"), torch.float32, 1024)
    if os.environ.get("RANK", "0") == "0":
        Path(peak_file).write_text(json.dumps({"gemm_flops_per_rank": flops}), encoding="utf-8")
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    # The launcher puts its own --local_rank first; the environment says it, too.
    main([token for token in sys.argv[1:] if not token.startswith("--local_rank=")])
