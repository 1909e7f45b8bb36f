"""A step in which one rank of two meets a loss that is not finite changes nothing on either, at every ZeRO stage."""

import json

import pytest
import toys
from launching import ROOT, command_line, ds_config, launch, toy_run

from llava_ds.report.metrics import read_metrics

pytestmark = pytest.mark.full

KINDS = {f"{stage}-{precision}": (stage, precision) for stage in range(4) for precision in ("fp32", "bf16")}


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> dict[str, list[dict]]:
    """metrics.jsonl of four steps by kind, two samples a step."""
    folder = tmp_path_factory.mktemp("guard")
    given = toys.write_base(folder / "base") | toys.write_data(folder / "data", "ittiitti")
    runs = []
    for name, (stage, precision) in KINDS.items():
        more = {"train_batch_size": 2, "max_steps": 4, "bf16": precision == "bf16", "max_grad_norm": 1.0}
        runs.append(toy_run(given, folder / name, ds_config(stage), **more))
    listed = folder / "runs.json"
    listed.write_text(json.dumps([command_line(flags) for flags in runs]))
    done = launch(2, ROOT / "tests" / "workers" / "poisoned.py", str(listed))
    assert done.returncode == 0, done.stdout + done.stderr
    return {name: read_metrics(folder / name / "metrics.jsonl") for name in KINDS}


@pytest.mark.parametrize("name", KINDS)
def test_it_is_skipped_and_training_goes_on(rows, name):
    found = rows[name]
    assert [row["skipped_steps"] for row in found] == [0, 0, 1, 1]
    assert found[2]["grad_norm"] is None
    assert found[3]["loss"] < 20 and found[3]["loss"] == found[3]["loss"]  # finite weights, on both ranks
