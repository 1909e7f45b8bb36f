"""The tiny model in both stages, on one GPU: losses, export, accuracy, and a resumed run."""

import json
import shutil
from functools import cache
from pathlib import Path

import pytest
from extension_there import if_there
from gpu_lane import OUTPUT, REHEARSED, ROOT, curve, logit_difference, rows, run_script, trained
from launching import ds_config

from llava_ds.extensions.benchmarks.score_table import OVERALL

pytestmark = pytest.mark.gpu

RECIPES = ROOT / "run" / "recipes"
SHORT = {"max_steps": 4, **if_there("samples", sample_steps=0)} if REHEARSED else {}
LEAST_ACCURACY = 0.9  # of the tiny model on its held-out questions; 0.95 on the CPU, 0.25 without seeing
KINDS = [(precision, stage) for precision in ("fp32", "bf16") for stage in (0, 2, 3)]


@cache
def both_stages(precision: str, stage: int) -> tuple[Path, str]:
    """Train stages 1 and 2 in full. Returns the folder of the model, and what was printed."""
    folder = OUTPUT / f"tiny-{precision}-zero{stage}"
    shutil.rmtree(folder, ignore_errors=True)
    flags = {"deepspeed_config": ds_config(stage), "bf16": precision == "bf16", "save_strategy": "no", **SHORT}
    trained({**flags, "recipe": RECIPES / "tiny-pretrain.yaml", "output_dir": folder / "pretrain"})
    projector = folder / "pretrain" / "mm_projector.bin"
    flags |= {"recipe": RECIPES / "tiny-finetune.yaml", "pretrain_mm_mlp_adapter": projector}
    return folder / "model", trained({**flags, "output_dir": folder / "model"})


@pytest.mark.parametrize(("precision", "stage"), KINDS)
def test_the_tiny_model_learns_to_see(record_property, precision, stage):
    model, output = both_stages(precision, stage)
    log = rows(model)
    record_property("last loss", f"{log[-1]['loss']:.4f}")
    record_property("steps/s", f"{1 / sorted(row['step_time_s'] for row in log)[len(log) // 2]:.1f}")
    record_property("logits of the export differ by", f"{logit_difference(output):.1e}")
    report = model / "evaluation.json"
    done = run_script(ROOT / "run" / "evaluate.py", "--model_path", model, "--compare_blank_image", "--output", report)
    assert done.returncode == 0, done.stdout + done.stderr
    scores = json.loads(report.read_text())["metrics"]
    found = {name: next(iter(kinds[OVERALL].values()))["value"] for name, kinds in scores.items()}
    for name, value in found.items():
        record_property(name, f"{value:.3f}")
    assert REHEARSED or next(iter(found.values())) >= LEAST_ACCURACY


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_zero_stages_begin_with_one_curve(record_property, precision):
    """The first steps of stage 2 from the same projector, before rounding grows."""
    most = {"fp32": 2e-4, "bf16": 3e-2}[precision]
    curves = [[row["loss"] for row in rows(both_stages(precision, stage)[0])[:4]] for stage in (0, 2, 3)]
    apart = max(abs(a - b) / a for other in curves[1:] for a, b in zip(curves[0], other))
    record_property("losses of ZeRO 0, 2, 3 differ by", f"{apart:.1e}")
    assert apart < most


@pytest.mark.parametrize("stage", [2, 3])
def test_a_resumed_run_is_the_same_to_the_bit(stage):
    """4 + 4 steps and 8, in bf16, with --deterministic."""
    whole, resumed = OUTPUT / f"whole-zero{stage}", OUTPUT / f"resumed-zero{stage}"
    for folder in (whole, resumed):
        shutil.rmtree(folder, ignore_errors=True)
    flags = {
        "deepspeed_config": ds_config(stage), "recipe": RECIPES / "tiny-finetune.yaml", "bf16": True, "max_steps": 8,
        "save_steps": 4, "save_total_limit": 2, "deterministic": True,
        **if_there("samples", sample_steps=0),
    }  # fmt: skip
    trained({**flags, "output_dir": whole})
    resumed.mkdir(parents=True)
    shutil.copytree(whole / "checkpoint-4", resumed / "checkpoint-4")
    assert "resumed at step 4" in trained({**flags, "output_dir": resumed})
    assert curve(resumed) == curve(whole)[-len(curve(resumed)) :]
    weights = [(folder / "model.safetensors").read_bytes() for folder in (whole, resumed)]
    assert weights[0] == weights[1]
