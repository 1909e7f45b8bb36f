"""Going back to the last checkpoint when the loss jumps leaves the model that steps which change nothing leave."""

import json
from pathlib import Path

import pytest
import toys
from checkpoints import differences
from known_flags import known_cases
from launching import ROOT, command_line, ds_config, launch, toy_run

from llava_ds.files.jsonl import read_metrics

pytestmark = pytest.mark.long

STEPS, SAVED, SPIKE = 8, 3, 5
NAN, LARGE = ({"rank": 1, "where": "loss", "value": value} for value in (float("nan"), 500.0))
KINDS = {
    **{f"{stage}-fp32": (stage, {}) for stage in range(4)},
    **{f"{stage}-bf16": (stage, {"bf16": True}) for stage in range(4)},
    "2-async": (2, {"async_save": True, "bf16": True}),
    "3-lora": (3, {"lora_enable": True, "bf16": True}),
}
KINDS = known_cases(KINDS)
WATCH = {"on_loss_spike": "rewind", "loss_spike_window": 4, "loss_spike_sigma": 30}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """For each kind a run that goes back from SPIKE, and one whose steps up to there, after SAVED, change nothing."""
    folder = tmp_path_factory.mktemp("rewind")
    given = toys.write_base(folder / "base", attention_dropout=0.1) | toys.write_data(folder / "data", "ittiitti")
    common = {"train_batch_size": 2, "max_grad_norm": 1.0, "max_steps": STEPS, "save_strategy": "steps"}
    runs = []
    for name, (stage, more) in KINDS.items():
        flags = {**common, "save_steps": SAVED, "warmup_steps": 2, **more}
        back = toy_run(given, folder / name / "back", ds_config(stage), **flags, **WATCH)
        plain = toy_run(given, folder / name / "plain", ds_config(stage), **flags)
        runs.append((command_line(back), {SPIKE: LARGE}))
        runs.append((command_line(plain), dict.fromkeys(range(SAVED + 1, SPIKE + 1), NAN)))
    for name, save_steps, spikes in (("none", 50, (5, 7)), ("thrice", 8, (9, 10, 11))):
        flags = {**common, **WATCH, "save_steps": save_steps, "max_steps": 12}
        runs.append((command_line(toy_run(given, folder / name, ds_config(2), **flags)), dict.fromkeys(spikes, LARGE)))
    listed = folder / "runs.json"
    listed.write_text(json.dumps(runs))
    done = launch(2, ROOT / "tests" / "workers" / "disturbed.py", str(listed), timeout_s=600)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "output.txt").write_text(done.stdout)
    return folder


@pytest.mark.parametrize("name", KINDS)
def test_it_ends_as_if_the_steps_had_changed_nothing(folder, name):
    back, plain = (folder / name / side for side in ("back", "plain"))
    different = differences(back / f"checkpoint-{STEPS}", plain / f"checkpoint-{STEPS}")
    assert [place for place in different if not place.endswith("/skipped_steps")] == []
    assert len(different) > 0  # it compares: of the two, one skipped its steps by itself
    rows = [read_metrics(side / "run" / "metrics.jsonl") for side in (back, plain)]
    for field in ("step", "lr", "samples", "tokens"):
        assert [row[field] for row in rows[0]] == [row[field] for row in rows[1]]
    assert [row["loss"] for row in rows[0][SPIKE:]] == [row["loss"] for row in rows[1][SPIKE:]]
    (row,) = read_metrics(back / "run" / "loss_spikes.jsonl")
    assert (row["step"], row["rewound_to"], len(row["samples"])) == (SPIKE, f"checkpoint-{SAVED}", 2)


def test_without_a_checkpoint_it_goes_on(folder):
    rows = read_metrics(folder / "none" / "run" / "loss_spikes.jsonl")
    assert {row["rewound_to"] for row in rows} == {None} and len(rows) == 2
    assert read_metrics(folder / "none" / "run" / "metrics.jsonl")[-1]["step"] == 12
    assert "no checkpoint to go back to yet" in (folder / "output.txt").read_text()


def test_the_third_time_from_one_checkpoint_ends_the_run(folder):
    assert [path.name for path in (folder / "thrice").glob("checkpoint-*")] == ["checkpoint-8"]
    assert "ended: the run went back to checkpoint-8 3 times" in (folder / "output.txt").read_text()
    assert [row["step"] for row in read_metrics(folder / "thrice" / "run" / "loss_spikes.jsonl")] == [9, 10, 11]
