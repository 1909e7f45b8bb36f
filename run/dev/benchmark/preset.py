"""LLaVA-1.5-7B in both stages on one large GPU, with random weights; without a GPU, a toy through the same code."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from benchmark import workload
from benchmark.length_mix import FINETUNE, PRETRAIN, length_mix
from benchmark.table import Row, Spread
from benchmark.training import ROOT, SEED, TRAIN, data_flags, estimated_bytes, launch, work_of_steps, write_tokenizer
from benchmark.workload import Shape

from llava_ds.files.jsonl import read_metrics
from llava_ds.runtime.gpus import gpu_named

WARM_UP = 2  # steps; the last one is profiled and not timed either
H200_FLOPS = gpu_named("h200").half * 1e12  # dense bfloat16, of H100 and H200 alike

LLAVA_7B = Shape(
    "llava-v1.5-7b", hidden=4096, intermediate=11008, layers=32, heads=32, vocab=32_000,
    tower_hidden=1024, tower_layers=24, tower_heads=16, patches=24, patch_size=14,
)  # fmt: skip
TOY = Shape(
    "toy", hidden=64, intermediate=176, layers=2, heads=2, vocab=512,
    tower_hidden=32, tower_layers=3, tower_heads=2, patches=4, patch_size=8,
)  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """The settings of a stage. samples: of an optimizer step, LLaVA's own; asked: least share of H200_FLOPS."""

    name: str
    captions: bool
    samples: int
    zero_stage: int
    tokens_per_micro_batch: int
    asked: float


# Weights, gradients and Adam's states of 6.76 billion parameters take 108 GB of an H200's 149. ZeRO-3 on a single GPU,
# because it updates them in parts: at 1 and 2 the fp32 gradients of all of them would take 27 GB more, and flattening
# them 14. What is left holds the activations of 4,096 tokens without recomputing any.
STAGES = (
    Stage("stage 1", captions=True, samples=256, zero_stage=2, tokens_per_micro_batch=8192, asked=0.50),
    Stage("stage 2", captions=False, samples=128, zero_stage=3, tokens_per_micro_batch=4096, asked=0.465),
)
NOT_MEASURED = (
    "there is no GPU: a toy took the same way on the CPU, and its figures say nothing about LLaVA-1.5-7B",
    "not measured: tokens/s, memory and MFU at 7B, and the GPU's idle time",
)


def run_stage(stage: Stage, folder: Path, num_steps: int, more_flags: list[str]) -> dict[str, object]:
    """Run one stage, on the GPU if there is one, and measure it. more_flags: of run/train.py, which win."""
    on_cuda = torch.cuda.is_available()
    shape = LLAVA_7B if on_cuda else TOY
    if not on_cuda:
        stage = dataclasses.replace(stage, samples=8, tokens_per_micro_batch=256)
    model, data, own = folder / "model", folder / stage.name / "data", folder / stage.name
    model.mkdir(parents=True, exist_ok=True)
    write_tokenizer(model, shape.vocab)
    workload.write_hollow_model(model, shape)
    mix = length_mix(PRETRAIN if stage.captions else FINETUNE, num_steps * stage.samples, SEED)
    workload.write_samples(data, shape, mix, captions=stage.captions)
    flags = {
        **data_flags(model, data, own / "cache", stage.captions),
        "deepspeed_config": ROOT / "ds_configs" / f"zero{stage.zero_stage}.json",
        "output_dir": own / "output",
        "bf16": True,
        "per_device_train_batch_size": stage.samples,
        "tokens_per_micro_batch": stage.tokens_per_micro_batch,
        "gradient_checkpointing": "auto" if on_cuda else "off",  # as few layers as memory needs: none on an H200
        "max_steps": num_steps,
        "learning_rate": 1e-3 if stage.captions else 2e-5,
        "dataloader_num_workers": 8 if on_cuda else 0,
    }
    written = [token for name, value in flags.items() for token in (f"--{name}", str(value))] + more_flags
    launch(1, "profiled", own / "profile.json", [str(TRAIN), *written], own / "log.txt", on_cpu=not on_cuda)
    report = json.loads((own / "profile.json").read_text())
    useful = [work.useful_flops for work in work_of_steps(written, num_ranks=1)]
    return {
        "stage": stage.name,
        **read_measured(report, read_metrics(own / "output" / "metrics.jsonl"), useful),
        "estimated_bytes": estimated_bytes(written, num_ranks=1),
    }


def read_measured(report: dict, rows: list[dict], useful_flops: list[float]) -> dict[str, object]:
    """The figures of a run, its timed steps only.

    mfu: of H200_FLOPS, absent without a GPU; of_gemm: of the products measured in the same process; idle_share: of the
    profiled step, absent without a GPU.
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


def rows_of(found: dict[str, object], asked: float) -> list[Row]:
    """A stage's figures for the table."""
    what = {
        "tokens/s": (found["tokens_per_s"], "{:,.0f}", None),
        f"of products measured, {found['gemm_flops'] / 1e12:.3g} TFLOP/s": (found["of_gemm"], "{:.1%}", None),
        "peak memory": ([found["peak_memory_bytes"] / 1e9], "{:.1f} GB", None),
        "peak memory as estimated": ([found["estimated_bytes"] / 1e9], "{:.1f} GB", None),
        f"MFU, of {H200_FLOPS / 1e12:.0f} TFLOP/s": (found["mfu"], "{:.1%}", asked),
        "GPU idle (at most 2 % is asked)": (
            None if found["idle_share"] is None else [found["idle_share"]],
            "{:.2%}",
            None,
        ),
    }
    label = f"{found['stage']} on {found['device']}"
    return [
        Row(f"{label}: {name}", Spread.of(values), form, least)
        for name, (values, form, least) in what.items()
        if values is not None
    ]
