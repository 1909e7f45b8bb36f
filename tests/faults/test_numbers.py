"""NaN and Inf in pixels, loss or gradient, on any rank, at any stage and precision: the step changes nothing."""

import itertools
import json
import math

import pytest
import torch
import toys
from checkpoints import contents, differences
from launching import ROOT, command_line, ds_config, launch, toy_run

from llava_ds.files.jsonl import read_metrics

pytestmark = pytest.mark.faults

STEPS, WRONG = 4, 3
VALUES = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
FAULTS = list(itertools.product(("loss", "gradient", "pixels"), VALUES, (0, 1)))
ENGINES = list(itertools.product(range(4), (False, True), (0.0, 1.0)))


def name_of(engine) -> str:
    stage, bf16, clip = engine
    return f"zero{stage}-{'bf16' if bf16 else 'fp32'}{'-clipped' if clip else ''}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run for every fault and engine; where gradients are clipped, of NaN on rank 1 only."""
    folder = tmp_path_factory.mktemp("numbers")
    given = toys.write_base(folder / "base") | toys.write_data(folder / "data", "iiii")
    runs = []
    for engine in ENGINES:
        stage, bf16, clip = engine
        common = {"train_batch_size": 2, "max_steps": STEPS, "save_strategy": "steps", "save_steps": STEPS}
        for where, value, rank in faults_of(engine):
            out = folder / name_of(engine) / f"{where}-{value}-{rank}"
            flags = toy_run(given, out, ds_config(stage), **common, bf16=bf16, max_grad_norm=clip)
            runs.append((command_line(flags), {WRONG: {"where": where, "value": VALUES[value], "rank": rank}}))
    listed = folder / "runs.json"
    listed.write_text(json.dumps(runs))
    done = launch(2, ROOT / "tests" / "workers" / "disturbed.py", str(listed), timeout_s=3600)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def faults_of(engine) -> list[tuple[str, str, int]]:
    return [fault for fault in FAULTS if not engine[2] or fault[1:] == ("nan", 1)]


@pytest.mark.parametrize("engine", ENGINES, ids=name_of)
def test_the_step_is_skipped_counted_and_named_and_all_end_in_the_same_weights(folder, engine):
    paths = {fault: folder / name_of(engine) / "-".join(map(str, fault)) for fault in faults_of(engine)}
    for (where, _, rank), path in paths.items():
        rows = read_metrics(path / "run" / "metrics.jsonl")
        assert [row["skipped_steps"] for row in rows] == [0, 0, 1, 1]
        assert math.isfinite(rows[-1]["loss"]) and math.isfinite(rows[WRONG - 1]["loss"]) == (where == "gradient")
        (row,) = read_metrics(path / "run" / "skipped_steps.jsonl")
        gradient = where == "gradient"
        assert (row["step"], row["not_finite"]) == (WRONG, "gradients" if gradient else "loss")
        assert (row["ranks"], len(row["samples"])) == (([], 2) if gradient else ([rank], 1))
    first, *others = (path / f"checkpoint-{STEPS}" for path in paths.values())
    tensors = [value for value in contents(first).values() if torch.is_tensor(value) and value.is_floating_point()]
    assert tensors and all(torch.isfinite(tensor).all() for tensor in tensors)
    for other in others:
        assert differences(first, other) == []
