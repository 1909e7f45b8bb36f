"""--eval_tasks through the launcher: scores are those of run/evaluate.py, and the run is one that asks nothing."""

import json
from pathlib import Path

import pytest
import toys
import yaml
from extension_there import if_there, needs_extension
from known_flags import known_cases
from launching import ds_config, losses, run_many, run_script, tight_config, toy_run

from llava_ds.checkpoint.commit import checkpoints
from llava_ds.files.jsonl import read_metrics

pytestmark = pytest.mark.long

STEPS, EVERY = 12, 4
LORA = {"lora_enable": True, "lora_r": 16, "lora_alpha": 64, "lora_dropout": 0.0, "learning_rate": 2e-2}
GRPO = if_there("rl", objective="grpo", reward_funcs="exact", num_generations=2, max_completion_length=4)
RUNS = {
    "zero0": (0, {}),
    "zero3": (3, {}),
    "zero2-bf16": (2, {"bf16": True}),
    "zero3-lora": (3, LORA),
    **({"zero2-grpo": (2, GRPO)} if GRPO else {}),
}
RUNS = known_cases(RUNS)
READY = ("smolvlm", "qwen3_vl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    ready_models = pytest.importorskip("ready_models")
    folder = tmp_path_factory.mktemp("tasks")
    given = toys.write_base(folder / "base") | toys.write_data(folder / "data", "itti" * 5)
    entry = {"data_path": given["data_path"], "image_folder": given["image_folder"], "max_new_tokens": 8}
    tasks = {"answers": {**entry, "metric": "exact"}, "turns": {**entry, "turns": "each", "limit": 7}}
    (folder / "tasks.yaml").write_text(yaml.safe_dump(tasks))
    asks = {"eval_tasks": folder / "tasks.yaml", "eval_steps": EVERY, "save_strategy": "steps", "save_steps": EVERY}
    best = if_there("best", metric_for_best_model="answers", load_best_model_at_end=True)
    asks |= {**best, "save_total_limit": 1}
    common = {"max_steps": STEPS, "learning_rate": 1e-2, "check_export": "off"}
    runs = []
    for name, (stage, more) in RUNS.items():
        config = tight_config(folder) if stage == 3 else ds_config(stage)
        runs += [toy_run(given, folder / name, config, **{**common, **asks, **more})]
        if name in ("zero0", "zero3"):
            runs += [toy_run(given, folder / f"{name}-plain", config, **{**common, **more})]
    for family in READY:
        ready = ready_models.write_ready(folder / family, family)
        own = {**given, **ready, "vision_tower": None, "tune_mm_mlp": True, "tune_mm_llm": True}
        flags = toy_run(own, folder / f"zero3-{family}", tight_config(folder), **{**common, **asks})
        left_out = ("vision_tower", "mm_projector_lr")
        runs += [{name: value for name, value in flags.items() if name not in left_out}]
    run_many(2, folder / "launch", runs)
    return folder


def evaluated(folder: Path, name: str, *flags: str) -> float:
    out, data = folder / name, folder / "data"
    given = ("--data_path", data / "data.json", "--image_folder", data / "images", "--max_new_tokens", 8)
    run_script("evaluate.py", "--model_path", out, "--output", out / "scores.json", *given, *flags)
    total, asked = json.loads((folder / name / "scores.json").read_text())["scores"]["with picture"]["overall"]
    return total / asked


@needs_extension("best")
@pytest.mark.parametrize("name", [*RUNS, *(f"zero3-{family}" for family in READY)])
def test_the_best_score_is_that_of_the_exported_model(folder, name):
    rows = read_metrics(folder / name / "run" / "evals.jsonl")
    assert [row["step"] for row in rows] == list(range(EVERY, STEPS + 1, EVERY))
    best = max(rows, key=lambda row: row["answers"])  # the first of equal ones
    if name != "zero2-grpo":  # which does not learn in so few steps
        assert best["answers"] > 0.1
    assert f"checkpoint-{best['step']}" in [path.name for path in checkpoints(folder / name)]
    assert evaluated(folder, name) == pytest.approx(best["answers"])
    assert evaluated(folder, name, "--turns", "each", "--limit", "7") == pytest.approx(best["turns"])


@pytest.mark.parametrize("name", ["zero0", "zero3"])
def test_the_run_is_the_one_that_asks_nothing(folder, name):
    assert losses(folder / name) == losses(folder / f"{name}-plain")


def test_every_stage_has_the_same_scores(folder):
    first, other = (read_metrics(folder / name / "run" / "evals.jsonl") for name in ("zero0", "zero3"))
    assert [row["answers"] for row in first] == [row["answers"] for row in other]
