"""The estimate of speed: public figures, DeepSpeed's traffic, and what bounds a step."""

import dataclasses
import importlib.util
import json
import re
import shlex

import pytest
import toys
from auto_sizes import zero_of_auto
from extension_there import if_there
from launching import ROOT
from transformers import CLIPVisionConfig

from llava_ds.config.parsing import parse_arguments
from llava_ds.constants import ConfigError
from llava_ds.extensions.planning.activations import MicroBatch
from llava_ds.extensions.planning.fit import Run
from llava_ds.extensions.planning.memory import Setup, ZeroPlacement
from llava_ds.extensions.planning.shapes import shape_named, shape_of
from llava_ds.extensions.planning.speed import Load, Machine, step_time
from llava_ds.extensions.planning.traffic import step_traffic
from llava_ds.model.open.tower import plan_tower
from llava_ds.runtime.gpus import GPUS, gpu_named, gpu_of_device

PAGE = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
SECTION = PAGE.split("**Against public figures.**")[1].split("\nSources:")[0]
FIGURES = (ROOT / "tests" / "extensions" / "planning" / "public_figures.sh").read_text(encoding="utf-8")
ROWS = [
    tuple(cell.strip() for cell in line.strip("|").split("|"))
    for line in SECTION.splitlines()
    if re.match(r"\| .* \| [\d.]+ \| ", line)
]
COMMANDS = [
    shlex.split(command.replace("\\\n", " "))
    for command in re.findall(r"python run/estimate\.py ((?:.*\\\n)*.*)", FIGURES)
]


@pytest.fixture(scope="module")
def main():
    spec = importlib.util.spec_from_file_location("estimate", ROOT / "run" / "estimate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


@pytest.fixture
def speed(main, capsys):
    """The JSON object that flags give."""

    def run(*flags: str) -> dict:
        main([*flags, "--speed", "--json"])
        return json.loads(capsys.readouterr().out)

    return run


@pytest.mark.parametrize(("row", "flags"), list(zip(ROWS, COMMANDS, strict=True)), ids=[row[0] for row in ROWS])
def test_public_figures_are_met_within_a_quarter(speed, row, flags):
    title, published, estimated, ratio = row
    if "Liger" in title:
        if not if_there("liger", use_liger_kernel=True):
            pytest.skip("there is no extension liger")
        flags = [*flags, "--use_liger_kernel", "True"]
    if "LoRA" in title:
        if not if_there("lora", lora_enable=True):
            pytest.skip("there is no extension lora")
        flags = [*flags, *["--lora_enable", "True", "--lora_r", "16", "--lora_alpha", "32", "--lora_dropout", "0"]]
    found = speed(*flags)
    column = "3 + cpu opt" if "optimizer on the CPU" in title else found["chosen"]
    seconds = found["speed"]["steps"][column]["total_s"]
    assert 0.75 <= seconds / float(published) <= 1.25
    assert (f"{seconds:.2f}", f"{seconds / float(published):.2f}") == (estimated, ratio), "docs/planning.md"


def test_there_are_public_figures():
    assert len(ROWS) == 10


def shape(**flags: str):
    args, _ = parse_arguments([t for n, v in flags.items() for t in (f"--{n}", v)], to_train=False, own_flags=[])
    return shape_named("llava-v1.5-7b", args)


def setup(num_gpus: int, overlaps: bool = True) -> Setup:
    return Setup(num_gpus, dataclasses.replace(zero_of_auto(4096), overlap_comm=overlaps, max_reuse_distance=0))


def test_traffic_is_deepspeeds_by_stage():
    """By hand, in weights of 2 bytes on 8 ranks; m micro-batches of an optimizer step."""
    model, m, once = shape(bf16="True"), 4, 2 * 6_759_395_328 * 7 / 8
    by_stage = {stage: step_traffic(model, ZeroPlacement(stage), setup(8), m) for stage in range(4)}
    assert by_stage[0].total == pytest.approx(2 * once)
    assert by_stage[1].total == pytest.approx(3 * once)  # all-reduce and gather, once a step
    assert by_stage[2].total == pytest.approx((2 * m + 1) * once)
    # Gathered twice, the frozen tower and the embedding once, small tensors never; reduce-scattered: all of it m times.
    tower, embedding = 2 * 290_909_184 * 7 / 8, 2 * 32_000 * 4096 * 7 / 8
    assert by_stage[3].total == pytest.approx(m * (3 * once + tower - embedding), rel=0.001)
    assert step_traffic(model, ZeroPlacement(1), setup(8, overlaps=False), m).after == pytest.approx(3 * once)
    assert all(step_traffic(model, ZeroPlacement(stage), setup(1), m).total == 0 for stage in range(4))


def test_what_does_not_train_is_gathered_and_not_reduced():
    model = shape(bf16="True", tune_mm_mlp_adapter="True")
    assert step_traffic(model, ZeroPlacement(2), setup(8), 1).total < 0.13e9  # the projector alone
    # Weights twice, but for the tower and both ends of the language model; the projector's gradients.
    elements = 2 * 7_050_304_512 - 290_909_184 - 2 * 32_000 * 4096 + 20_979_712
    assert step_traffic(model, ZeroPlacement(3), setup(8), 1).total == pytest.approx(2 * elements * 7 / 8, rel=0.001)


def test_the_last_weights_of_forward_are_gathered_once():
    model, half = shape(bf16="True"), dataclasses.replace(zero_of_auto(4096), max_reuse_distance=10**9)
    kept = step_traffic(model, ZeroPlacement(3), Setup(8, half), 1)
    again = step_traffic(model, ZeroPlacement(3), setup(8), 1)
    assert again.total - kept.total == pytest.approx(2 * 5e8 * 7 / 8)


def test_offload_sends_each_rank_its_own_part():
    model, owned = shape(bf16="True"), 6_759_395_328 / 8
    once = step_traffic(model, ZeroPlacement(2, "cpu"), setup(8), 1)
    assert (once.pcie, once.pcie_after) == (pytest.approx(4 * owned), pytest.approx(2 * owned))
    accumulated = step_traffic(model, ZeroPlacement(2, "cpu"), setup(8), 3)
    assert accumulated.pcie == pytest.approx((4 + 2 * 5) * owned)  # thrice there, twice back, and the sum in fp32
    everything = step_traffic(model, ZeroPlacement(3, "cpu", "cpu"), setup(8), 1)
    assert everything.pcie > 2 * 2 * owned and everything.pcie_after == 0


def timed(
    num_gpus: int = 8, stage: int = 3, load: Load | None = None, gpu: str = "h100", recomputed: int = 0, **machine
):
    run = Run(shape(bf16="True"), ZeroPlacement(stage), setup(num_gpus), MicroBatch(8192, 2048, 8, recomputed))
    of = {"matmul_share": None, "network_gbit": None, "overlap": 0.8, "tf32": False, **machine}
    return step_time(run, run.placement, load or Load(4, 8192, 1024, 2048, 8), Machine.of(gpu_named(gpu), **of))


def test_useful_flops_stay_and_time_grows_with_padding_and_recomputation():
    plain, padded = timed(), timed(load=Load(4, 8192, 1024, 2048, 8, useful=0.5))
    again = timed(recomputed=32)
    assert plain.tokens == padded.tokens == 4 * 8192 * 8
    assert padded.total_s > 1.8 * plain.total_s and padded.mfu < plain.mfu / 1.8
    # Forward is a third of a trained layer's work.
    assert again.compute_s == pytest.approx(4 / 3 * plain.compute_s, rel=0.05)
    assert again.memory_s == pytest.approx(4 / 3 * plain.memory_s, rel=0.15)


def test_mfu_is_of_the_peak_and_below_the_share_that_products_reach():
    time = timed(num_gpus=1, stage=0, matmul_share=0.5)
    assert 0.3 < time.mfu < 0.5 and time.traffic_s == time.traffic_bytes == 0
    faster = timed(num_gpus=1, stage=0, matmul_share=1.0)
    assert time.compute_s / 2 < faster.compute_s < 0.55 * time.compute_s  # attention has a share of its own


def test_a_slow_network_is_what_bounds_stage_3():
    fast, slow = timed(16), timed(16, network_gbit=25)
    assert fast.traffic_s < 0.2 * fast.total_s and slow.traffic_s > 0.8 * slow.total_s
    assert timed(16, network_gbit=25, overlap=0.0).traffic_s > slow.traffic_s
    # Fewer, larger micro-batches send less at stage 3, and the same at stage 1.
    larger = Load(2, 16384, 1024, 4096, 16)
    assert timed(16, load=larger).traffic_bytes == pytest.approx(fast.traffic_bytes / 2)
    assert timed(16, 1, load=larger).traffic_bytes == timed(16, 1).traffic_bytes


def test_fused_kernels_move_fewer_bytes():
    plain, fused = (timed(load=Load(4, 8192, 1024, 2048, 8, fused_layers=fused)) for fused in (False, True))
    assert fused.memory_s < 0.5 * plain.memory_s and fused.compute_s == plain.compute_s


def test_the_words_name_the_bound_and_changes_that_fit(main, capsys):
    flags = "--model llava-v1.5-7b --num_gpus 16 --gpu h100 --network_gbit 25 --per_device_train_batch_size 4 --speed"
    main([*flags.split(), "--gradient_accumulation_steps", "4", "--gradient_checkpointing", "True"])
    out = capsys.readouterr().out
    assert "in 80 GB" in out  # --gpu says the memory, too
    assert re.search(r"^ZeRO-3: [\d.]+ s per step, [\d,]+ tokens/s, MFU [\d.]+%; bound by the network", out, re.M)
    assert "faster: ZeRO-1 in the DeepSpeed JSON: +" in out
    assert "faster: ZeRO-0" not in out  # which does not fit
    assert out.count("in the DeepSpeed JSON") == 1  # the fastest alone
    assert "faster: a network of four times the bandwidth: +" in out
    table = out[out.index("s of a step") :].splitlines()
    widths = {len(line) for line in table[: next(i for i, line in enumerate(table) if line.startswith("MFU")) + 1]}
    assert len(widths) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--speed"], "--speed estimates a GPU's time: give --gpu"),
        (["--speed", "--gpu", "h1000"], "--gpu h1000 is unknown: choose from a10, "),
        (["--overlap", "0.5"], "--overlap is for the estimate of time: give --speed"),
        (["--speed", "--gpu", "h100", "--model", "13e9"], "--speed needs the model's layers"),
        (["--speed", "--gpu", "h100", "--useful_fraction", "0"], "useful_fraction is 0"),
        (
            ["--speed", "--gpu", "h100", "--mean_sample_tokens", "9999"],
            "samples are limited to --model_max_length 2048",
        ),
        (["--speed", "--gpu", "t4"], "--gpu t4 has no bf16: give --fp16 True"),
    ],
)
def test_wrong_flags_are_named(main, flags, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        main(flags)


def test_nvme_is_not_guessed(main, capsys):
    flags = ["--model", "llava-v1.5-7b", "--gpu", "h100", "--speed"]
    main([*flags, "--deepspeed_config", str(ROOT / "ds_configs" / "zero3_infinity.json"), "--bf16", "True"])
    assert "offload to NVMe: no estimate" in capsys.readouterr().out


def test_every_gpu_has_one_name_and_is_found_under_torchs():
    assert len({gpu.name for gpu in GPUS}) == len(GPUS)
    reported = {
        "NVIDIA A100-SXM4-40GB": "a100-40gb",
        "NVIDIA A100-SXM4-80GB": "a100-80gb",
        "NVIDIA A100-PCIE-40GB": "a100-40gb-pcie",
        "NVIDIA A100 80GB PCIe": "a100-80gb-pcie",
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA H200": "h200",
        "NVIDIA H200 NVL": "h200-nvl",
        "NVIDIA A800-SXM4-80GB": "a800",
        "NVIDIA GeForce RTX 4090": "rtx-4090",
        "NVIDIA GeForce RTX 3090": "rtx-3090",
        "Tesla V100-SXM2-16GB": "v100-16gb",
    }
    assert {name: gpu_of_device(name).name for name in reported} == reported
    for gpu in GPUS:
        assert gpu.fp32 < gpu.half and (gpu.tf32 is None or gpu.tf32 <= gpu.half)
        assert 8 < gpu.memory < 200 and 200 < gpu.bandwidth < 9000


@pytest.mark.parametrize("family", toys.FAMILIES)
def test_every_family_has_an_estimate(family):
    args, _ = parse_arguments([], to_train=False, own_flags=[])
    tower = plan_tower(CLIPVisionConfig(**toys.TOWER, image_size=24, patch_size=8), {}, "here", args.model)
    model = shape_of(toys.language_model_config(family), tower, args)
    run = Run(model, ZeroPlacement(3), Setup(2), MicroBatch(4096, 1024, 16, 1))
    time = step_time(
        run, run.placement, Load(2, 4096, 512, 1024, 16), Machine.of(gpu_named("h100"), None, None, 0.8, True)
    )
    assert 0 < time.mfu < 1 and time.memory_s > 0
