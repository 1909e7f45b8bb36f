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


def flags_in(folder: Path) -> dict[str, object]:
    base = toys.write_base(folder / "base")
    data = toys.write_data(folder / "data", "itti" * 3)
    return {
        **base,
        **data,
        "cache_dir": folder / "cache",
        "model_max_length": 512,
        "train_batch_size": 4,
        "num_train_epochs": 2,
        "shuffle": False,
        "dry_run": True,
        "verbose": True,
    }


@pytest.fixture(scope="module")
def launched(tmp_path_factory) -> tuple[subprocess.CompletedProcess, Path]:
    """A dry run of two ranks, and its output folder, where an earlier run left metrics."""
    folder = tmp_path_factory.mktemp("dry")
    earlier = folder / "earlier"
    earlier.mkdir()
    (earlier / "metrics.jsonl").write_text("{}\n")
    here = {"deepspeed_config": ds_config(3), "per_device_train_batch_size": 2, "output_dir": earlier}
    return launch(2, TRAIN, *command_line({**flags_in(folder), **here})), earlier


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> tuple[subprocess.CompletedProcess, Path]:
    """A dry run of one rank, and its output folder, which is not there."""
    folder = tmp_path_factory.mktemp("alone")
    nowhere = folder / "nowhere"
    own = {"deepspeed_config": ds_config(1), "tokens_per_micro_batch": 250, "output_dir": nowhere, "bf16": True}
    done = subprocess.run(
        [sys.executable, str(TRAIN), *command_line({**flags_in(folder), **own})],
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done, nowhere


def check(done: subprocess.CompletedProcess, stage: int) -> None:
    """It ended well, and says what would be done and why."""
    said = done.stdout
    assert done.returncode == 0 and "Traceback" not in done.stderr, said + done.stderr
    assert "6 optimizer steps of 4 samples" in said
    assert re.search(r"train_batch_size += 4 +--train_batch_size", said)
    verdict = next(line for line in said.splitlines() if line.startswith("dry run: "))
    assert re.match(r"dry run: ready\. 6 optimizer steps of 4 samples on \d ranks?\. Memory: ", verdict)
    assert verdict.endswith("free on this machine: fits")
    assert said.index(verdict) < said.index("12 records: 12 accepted") < said.index("train_batch_size")
    assert "the finished model will have 80 tensors" in said
    assert said.count("GB per CPU rank") + said.count("MB per CPU rank") == 1 and f"[ZeRO-{stage}]" in said


def test_it_says_what_would_be_done_and_leaves_everything_as_it_was(launched):
    done, earlier = launched
    check(done, 3)
    assert [path.name for path in earlier.iterdir()] == ["metrics.jsonl"]
    assert (earlier / "metrics.jsonl").read_text() == "{}\n"


def test_it_shows_the_first_batch_of_the_first_rank(launched):
    said = launched[0].stdout
    records = json.loads((launched[1].parent / "data" / "data.json").read_text())
    totals = re.search(r"step 1: 4 samples, (\d+) tokens, (\d+) supervised, on 2 ranks in 1 micro-batches", said)
    mine = re.search(r"rank 0's first: 2 samples, (\d+) tokens, (\d+) supervised, 1 image tiles", said)
    assert int(mine[1]) < int(totals[1]) and 0 < int(mine[2]) < int(totals[2])
    shown = said[said.index("--- s0") :]  # files' order: the first record is the first sample
    assert "[9 image positions]" in shown
    answers = [turn["value"] for turn in records[0]["conversations"] if turn["from"] == "gpt"]
    marked = re.findall(r">>>(.*?)<<<", shown)
    assert [text.strip().removesuffix("</s>") for text in marked] == answers


@pytest.mark.long
def test_it_leaves_nothing_where_nothing_was_and_counts_the_parameters_by_part(alone):
    done, nowhere = alone
    check(done, 1)
    assert not nowhere.exists()
    said = done.stdout
    assert re.search(r"[\d,]+ parameters, [\d,]+ of them trained \(vision_tower .* frozen, projector", said)
    assert "1 CPU rank, 2 bytes per weight, at most 250 tokens per micro-batch" in said
