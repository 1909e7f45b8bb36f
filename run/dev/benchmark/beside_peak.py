"""Run a script as it is, and measure beside it, in the same process, how fast this machine multiplies matrices.

Started by the deepspeed launcher: beside_peak.py FILE.json SCRIPT ARGUMENTS. All ranks measure at once, as they compute
in training.
"""

import json
import os
import runpy
import sys
from pathlib import Path

import torch
from benchmark.cpu_times import counted
from benchmark.profiled import own_arguments

from llava_ds.tracking.peak import gemm_peak
from llava_ds.train import loop

SECONDS = 0.6


def main(argv: list[str]) -> None:
    peak_file, script, *arguments = argv
    flops = gemm_peak(torch.device("cpu"), torch.float32, SECONDS)
    if os.environ.get("RANK", "0") == "0":
        Path(peak_file).write_text(json.dumps({"gemm_flops_per_rank": flops}), encoding="utf-8")
    loop.run_steps = counted(loop.run_steps, Path(peak_file).parent)
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(own_arguments())
