"""--dry_run says what a run would do, and leaves everything as it was."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import toys
from launching import TRAIN, command_line, ds_config, launch


@pytest.fixture(scope="module")
def dry(tmp_path_factory) -> dict[str, tuple[subprocess.CompletedProcess, Path]]:
    """Two dry runs and their output folders: of two ranks beside an earlier run's metrics, and of one into nothing."""
    folder = tmp_path_factory.mktemp("dry")
    base = toys.write_base(folder / "base")
    data = toys.write_data(folder / "data", "itti" * 3)
    flags = {
        **base,
        **data,
        "cache_dir": folder / "cache",
        "model_max_length": 512,
        "train_batch_size": 4,
        "num_train_epochs": 2,
        "shuffle": False,
        "dry_run": True,
    }
    earlier = folder / "earlier"
    earlier.mkdir()
    (earlier / "metrics.jsonl").write_text("{}\n")
    here = {"deepspeed_config": ds_config(3), "per_device_train_batch_size": 2, "output_dir": earlier}
    launched = launch(2, TRAIN, *command_line({**flags, **here}))
    nowhere = folder / "nowhere"
    alone = {"deepspeed_config": ds_config(1), "tokens_per_micro_batch": 250, "output_dir": nowhere, "bf16": True}
    done = subprocess.run(
        [sys.executable, str(TRAIN), *command_line({**flags, **alone})],
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return {"launched": (launched, earlier), "alone": (done, nowhere)}


def test_it_ends_well_and_leaves_everything_as_it_was(dry):
    for done, _ in dry.values():
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stdout + done.stderr
    assert [path.name for path in dry["launched"][1].iterdir()] == ["metrics.jsonl"]
    assert (dry["launched"][1] / "metrics.jsonl").read_text() == "{}\n"
    assert not dry["alone"][1].exists()


def test_it_says_what_would_be_done_and_why(dry):
    for name, stage, steps in (("launched", 3, 6), ("alone", 1, 6)):
        said = dry[name][0].stdout
        assert f"{steps} optimizer steps of 4 samples" in said
        assert re.search(r"train_batch_size += 4 +--train_batch_size", said)
        assert said.count("GB per GPU") + said.count("MB per GPU") == 1 and f"[ZeRO-{stage}]" in said


def test_it_shows_the_first_batch_of_the_first_rank(dry):
    said = dry["launched"][0].stdout
    records = json.loads((dry["launched"][1].parent / "data" / "data.json").read_text())
    totals = re.search(r"step 1: 4 samples, (\d+) tokens, (\d+) supervised, on 2 ranks in 1 micro-batches", said)
    mine = re.search(r"rank 0's first: 2 samples, (\d+) tokens, (\d+) supervised, 1 image tiles", said)
    assert int(mine[1]) < int(totals[1]) and 0 < int(mine[2]) < int(totals[2])
    shown = said[said.index("--- s0") :]  # files' order: the first record is the first sample
    assert "[9 image positions]" in shown
    answers = [turn["value"] for turn in records[0]["conversations"] if turn["from"] == "gpt"]
    marked = re.findall(r">>>(.*?)<<<", shown)
    assert [text.strip().removesuffix("</s>") for text in marked] == answers


def test_it_counts_the_parameters_by_part(dry):
    said = dry["alone"][0].stdout
    assert re.search(r"[\d,]+ parameters, [\d,]+ of them trained \(vision_tower .* frozen, projector", said)
    assert "1 GPU, 2 bytes a weight, 250 tokens a micro-batch at most" in said
