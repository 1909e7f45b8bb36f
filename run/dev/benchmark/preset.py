"""Run LLaVA-1.5-7B in both stages on one large GPU, with random weights; without a GPU, a toy through the same code."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from benchmark.table import Row, Spread
from benchmark.training import TRAIN, Case, estimated_bytes, launch, work_of_steps, write_case
from benchmark.workload import Shape

from llava_ds.files.jsonl import read_metrics
from llava_ds.files.writing import run_folder
from llava_ds.runtime.gpus import gpu_named

WARM_UP = 2  # steps; the last step is profiled and also not timed
H200_FLOPS = gpu_named("h200").half * 1e12  # dense bfloat16, the same on H100 and H200

LLAVA_7B = Shape(
    "llava-v1.5-7b", hidden=4096, intermediate=11008, layers=32, heads=32, vocab=32_000,
    tower_hidden=1024, tower_layers=24, tower_heads=16, patches=24, patch_size=14,
)  # fmt: skip
TOY = Shape(
    "toy", hidden=64, intermediate=176, layers=2, heads=2, vocab=512,
    tower_hidden=32, tower_layers=3, tower_heads=2, patches=4, patch_size=8,
)  # fmt: skip


# Weights, gradients and Adam's states of 6.76 billion parameters take 108 GB of an H200's 149 GB. The rest holds the
# activations of 4,096 tokens without recomputation. ZeRO-3 is used even on one GPU, because it updates parameters in
# parts: at stages 1 and 2, fp32 gradients would take 27 GB more, and flattening them 14 GB.
# num_steps is derived from --rounds.
STAGES = (
    Case("stage 1", LLAVA_7B, captions=True, batch_size=256, accumulation=1, num_steps=0, tokens_per_micro_batch=8192),
    Case("stage 2", LLAVA_7B, captions=False, batch_size=128, accumulation=1, num_steps=0, tokens_per_micro_batch=4096),
)
ASKED = {"stage 1": 0.50, "stage 2": 0.465}  # minimum share of H200_FLOPS
NOT_MEASURED = (
    "no GPU found: a toy ran the same code on the CPU, and its figures say nothing about LLaVA-1.5-7B",
    "not measured: tokens/s, memory and MFU at 7B, and the GPU's idle time",
)


def run_stage(case: Case, folder: Path, num_steps: int, more_flags: list[str]) -> dict[str, object]:
    """Run and measure one stage, on a GPU if there is one. more_flags: flags of run/train.py that override its own."""
    on_cuda, own = torch.cuda.is_available(), folder / case.name
    if not on_cuda:
        case = replace(case, shape=TOY, batch_size=8, tokens_per_micro_batch=256)
    flags = write_case(replace(case, num_steps=num_steps), own, num_ranks=1, hollow=True)
    further = {
        "output_dir": own / "output",
        "bf16": True,
        "tokens_per_micro_batch": case.tokens_per_micro_batch,
        "gradient_checkpointing": "auto" if on_cuda else "off",  # as few layers as memory allows: none on an H200
        "learning_rate": 1e-3 if case.captions else 2e-5,
        "dataloader_num_workers": 8 if on_cuda else 0,
    }
    flags += [token for name, value in further.items() for token in (f"--{name}", str(value))] + more_flags
    launch(1, "profiled", own / "profile.json", [str(TRAIN), *flags], own / "log.txt", on_cpu=not on_cuda)
    report = json.loads((own / "profile.json").read_text())
    useful = [work.useful_flops for work in work_of_steps(flags, num_ranks=1)]
    return {
        "stage": case.name,
        **read_measured(report, read_metrics(run_folder(own / "output") / "metrics.jsonl"), useful),
        "estimated_bytes": estimated_bytes(flags, num_ranks=1),
    }


def read_measured(report: dict, rows: list[dict], useful_flops: list[float]) -> dict[str, object]:
    """Return the figures of a run's timed steps.

    mfu: share of H200_FLOPS, absent without a GPU; of_gemm: share of the products measured in the same process;
    idle_share: of the profiled step, absent without a GPU.
    """
    timed, on_cuda = slice(WARM_UP, len(rows) - 1), torch.cuda.is_available()
    useful, seconds = useful_flops[timed], report["step_time_s"][timed]
    speed = [flops / s for flops, s in zip(useful, seconds)]
    return {
        "device": torch.cuda.get_device_name() if on_cuda else "a CPU core",
        "step_time_s": seconds,
        **{name: [row[name] for row in rows[timed]] for name in ("data_wait_s", "loss")},
        "tokens_per_s": [row["tokens"] / s for row, s in zip(rows[timed], seconds)],
        "useful_flops": useful,
        "peak_memory_bytes": max(row["peak_memory_bytes"] for row in rows),
        "gemm_flops": report["gemm_flops_per_rank"],
        "mfu": [s / H200_FLOPS for s in speed] if on_cuda else None,
        "of_gemm": [s / report["gemm_flops_per_rank"] for s in speed],
        "idle_share": report["idle_share"],
    }


def rows_of(found: dict[str, object]) -> list[Row]:
    """Return a stage's figures as table rows."""
    label, idle = f"{found['stage']} on {found['device']}", found["idle_share"]
    rows = (
        ("tokens/s", found["tokens_per_s"], "{:,.0f}", None),
        (f"share of measured products, {found['gemm_flops'] / 1e12:.3g} TFLOP/s", found["of_gemm"], "{:.1%}", None),
        ("peak memory", [found["peak_memory_bytes"] / 1e9], "{:.1f} GB", None),
        ("peak memory as estimated", [found["estimated_bytes"] / 1e9], "{:.1f} GB", None),
        (f"MFU, of {H200_FLOPS / 1e12:.0f} TFLOP/s", found["mfu"], "{:.1%}", ASKED[found["stage"]]),
        ("GPU idle (target: at most 2 %)", None if idle is None else [idle], "{:.2%}", None),
    )
    return [Row(f"{label}: {name}", Spread.of(values), form, asked) for name, values, form, asked in rows if values]
