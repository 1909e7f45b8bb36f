"""A run that overfits keeps its best checkpoint, ends for want of a better one on every rank, and exports it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import toys
from launching import ds_config, run_many, run_script, toy_run
from safetensors.torch import load_file

from llava_ds.checkpoint.commit import checkpoints
from llava_ds.constants import ConfigError
from llava_ds.extensions.best.rule import BestRule
from llava_ds.files.jsonl import read_metrics

pytestmark = pytest.mark.long

STAGES, EVERY, PATIENCE, STEPS = (0, 2, 3), 2, 3, 40
RULE = BestRule("eval_loss", False, PATIENCE, 0.0)
ENDS = {"early_stopping_patience": PATIENCE, "load_best_model_at_end": True, "save_total_limit": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """By stage: a run to the planned end that keeps all, one that ends early, and one that was killed in between."""
    folder = tmp_path_factory.mktemp("best")
    given = toys.write_base(folder / "base") | toys.write_data(folder / "data", "ittiitti" * 2)
    records = json.loads((folder / "data" / "data.json").read_text())
    for name, part in (("data.json", records[:4]), ("held-out.json", records[4:])):
        (folder / "data" / name).write_text(json.dumps(part))
    common = {"eval_data_path": folder / "data/held-out.json", "eval_steps": EVERY, "save_strategy": "steps"}
    common |= {"save_steps": EVERY, "max_steps": STEPS, "learning_rate": 1e-2, "check_export": "off"}

    def runs(name: str, **more: object) -> list[dict]:
        return [toy_run(given, folder / f"{name}-{stage}", ds_config(stage), **{**common, **more}) for stage in STAGES]

    run_many(2, folder / "launch", runs("whole") + runs("ended", **ENDS))
    for stage in STAGES:
        as_if_killed(folder / f"whole-{stage}", folder / f"killed-{stage}")
    said = run_many(2, folder / "launch-again", runs("killed", **ENDS) + runs("ended", **ENDS))
    assert said.count(f"--early_stopping_patience {PATIENCE}") == 2 * len(STAGES)
    return folder


def expected_end(whole: Path) -> int:
    rows = read_metrics(whole / "run" / "evals.jsonl")
    return next(row["step"] for i, row in enumerate(rows, 1) if RULE.evaluations_without(rows[:i]) >= PATIENCE)


def best_step(whole: Path) -> int:
    return RULE.best(row for row in read_metrics(whole / "run" / "evals.jsonl") if row["step"] <= expected_end(whole))[
        "step"
    ]


def as_if_killed(whole: Path, out: Path) -> None:
    """What a run leaves that was killed two evaluations before its end."""
    shutil.copytree(whole, out)
    (out / "model.safetensors").unlink()
    for path in checkpoints(out):
        if int(path.name.split("-")[1]) > expected_end(whole) - 2 * EVERY:
            shutil.rmtree(path)


@pytest.mark.parametrize("stage", STAGES)
def test_the_last_checkpoints_can_be_averaged(folder, stage, tmp_path):
    newest = checkpoints(folder / f"whole-{stage}")[:3]
    for i, path in enumerate(newest):
        run_script("export.py", path, "--output_dir", tmp_path / str(i))
    run_script("export.py", newest[0], "--average", 3, "--output_dir", tmp_path / "mean")
    several, found = [load_file(tmp_path / str(i) / "model.safetensors") for i in range(3)], tmp_path / "mean"
    for key, weight in load_file(found / "model.safetensors").items():
        assert torch.allclose(weight, sum(each[key] for each in several) / 3, atol=1e-7), key
    with pytest.raises(ConfigError, match="checkpoints exist up to 20: give at most that many"):
        run_script("export.py", newest[0], "--average", 21, "--output_dir", tmp_path / "none")
    with pytest.raises(ConfigError, match="--average 2 needs a checkpoint, but SOURCE is not one"):
        run_script("export.py", found, "--average", 2, "--output_dir", tmp_path / "none")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ("ended", "killed"))
def test_it_ends_and_exports_its_best_checkpoint(folder, name, stage, tmp_path):
    whole, out = folder / f"whole-{stage}", folder / f"{name}-{stage}"
    end, best = expected_end(whole), best_step(whole)
    assert 0 < best < end < STEPS
    assert read_metrics(out / "run" / "metrics.jsonl")[-1]["step"] == end
    assert read_metrics(out / "run" / "evals.jsonl")[-1]["step"] == end
    assert [path.name for path in checkpoints(out)] == [f"checkpoint-{end}", f"checkpoint-{best}"]
    state = json.loads((out / "trainer_state.json").read_text())
    value = RULE.best(read_metrics(out / "run" / "evals.jsonl"))["loss"]
    assert (state["best_metric"], Path(state["best_model_checkpoint"]).name) == (value, f"checkpoint-{best}")

    run_script("export.py", whole / f"checkpoint-{best}", "--output_dir", tmp_path / "wanted")
    wanted, found, last = (load_file(path / "model.safetensors") for path in (tmp_path / "wanted", out, whole))
    assert wanted.keys() == found.keys()
    for key, weight in wanted.items():
        assert found[key].equal(weight), key
    assert any(not last[key].equal(weight) for key, weight in wanted.items())
    card = (out / "README.md").read_text()
    assert f"- optimizer steps: {best} of {STEPS}" in card and f"- best eval_loss: {value:.4f}, at step {best}" in card
    assert f"finished at step {end} of {STEPS}" in (out / "report.html").read_text()
