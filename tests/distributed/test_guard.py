"""A step in which one rank of two meets a loss that is not finite changes nothing on either, at every ZeRO stage."""

import json
import math
from pathlib import Path

import pytest
import toys
from extension_there import if_there, needs_extension
from launching import ROOT, command_line, ds_config, launch, toy_run

from llava_ds.files.jsonl import read_metrics

pytestmark = pytest.mark.long

KINDS = {f"{stage}-{precision}": (stage, precision) for stage in range(4) for precision in ("fp32", "bf16")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Folders of four steps by kind, two samples a step, and of two runs at each stage that end by themselves."""
    folder = tmp_path_factory.mktemp("guard")
    given = toys.write_base(folder / "base") | toys.write_data(folder / "data", "ittiitti")
    common = {"train_batch_size": 2, "max_grad_norm": 1.0}
    not_finite, flipped = ({"rank": 1, "where": where, "value": math.nan} for where in ("loss", "weight"))
    runs = []
    for name, (stage, precision) in KINDS.items():
        more = {**common, "max_steps": 4, "bf16": precision == "bf16"}
        runs.append((toy_run(given, folder / name, ds_config(stage), **more), {3: not_finite}))
    for stage in range(4):
        more = {**common, "max_steps": 9, "bf16": True}
        saving = {**more, "max_skipped_steps": 3, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
        stays = dict.fromkeys(range(3, 10), not_finite)
        runs.append((toy_run(given, folder / f"stays-{stage}", ds_config(stage), **saving), stays))
        checks = {**more, **if_there("replicas", check_divergence_steps=4)}
        runs.append((toy_run(given, folder / f"flips-{stage}", ds_config(stage), **checks), {3: flipped}))
    listed = folder / "runs.json"
    listed.write_text(json.dumps([(command_line(flags), faults) for flags, faults in runs]))
    done = launch(2, ROOT / "tests" / "workers" / "disturbed.py", str(listed))
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "output.txt").write_text(done.stdout)
    return folder


@pytest.mark.parametrize("name", KINDS)
def test_it_is_skipped_and_training_goes_on(folder, name):
    found = read_metrics(folder / name / "run" / "metrics.jsonl")
    assert [row["skipped_steps"] for row in found] == [0, 0, 1, 1]
    assert found[2]["grad_norm"] is None
    assert found[3]["loss"] < 20 and found[3]["loss"] == found[3]["loss"]  # finite weights, on both ranks
    (row,) = read_metrics(folder / name / "run" / "skipped_steps.jsonl")
    assert (row["step"], row["not_finite"], row["ranks"], len(row["samples"])) == (3, "loss", [1], 1)


@pytest.mark.parametrize("stage", range(4))
def test_too_many_in_a_row_end_the_run_and_leave_the_checkpoint_before_them(folder, stage):
    path = folder / f"stays-{stage}"
    assert [row["step"] for row in read_metrics(path / "run" / "skipped_steps.jsonl")] == [3, 4, 5]
    assert sorted(found.name for found in path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    assert (folder / "output.txt").read_text().count("3 steps in a row (3 to 5)") == 4


@needs_extension("replicas")
def test_a_bit_that_one_rank_has_differently_ends_the_run(folder):
    steps = [
        [row["step"] for row in read_metrics(folder / f"flips-{stage}" / "run" / "metrics.jsonl")] for stage in range(4)
    ]
    # ZeRO-3 gathers every copy anew in each step, so that it heals.
    assert steps == [[*range(1, 5)]] * 3 + [[*range(1, 10)]]
    output = (folder / "output.txt").read_text()
    assert output.count("step 4: the ranks no longer hold the same weights") == 3
    assert output.count("  rank 1: 1 of ") == 3
