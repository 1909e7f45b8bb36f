"""Measuring the loss on held-out samples, and asking questions, while a run trains: it changes nothing of the run."""

import itertools
import json
import shutil
from pathlib import Path

import pytest
import toys
from checkpoints import differences
from extension_there import if_there, needs_extension
from launching import ds_config, run_many, tight_config, toy_run

from llava_ds.data.sample import Message
from llava_ds.extensions.infer.generate import Prompt, answer
from llava_ds.extensions.infer.load import load_model
from llava_ds.files.jsonl import read_metrics

pytestmark = pytest.mark.long

STEPS, SAVED = 6, 4
STAGES = range(4)
LAYOUTS = {"count": {}, "tokens": {"tokens_per_micro_batch": 300}}
WATCH = if_there("samples", sample_steps=2, num_sample_questions=3, sample_max_new_tokens=5)
LOGS = ("evals.jsonl", *(["samples.jsonl"] if WATCH else []))
WATCH |= {"eval_steps": 2}
PARTS = ("first", "second")  # of what is held out
CASES = list(itertools.product(STAGES, LAYOUTS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("held-out")
    given = toys.write_base(folder / "base", attention_dropout=0.1) | toys.write_data(folder / "data", "ittiitti" * 2)
    records = json.loads((folder / "data" / "data.json").read_text())
    held_out = folder / "held-out.json"
    held_out.write_text(json.dumps(records[:7]))  # does not divide by ranks nor micro-batches
    parts = {name: folder / f"{name}.json" for name in PARTS}
    for path, part in zip(parts.values(), (records[:4], records[4:7])):
        path.write_text(json.dumps(part))
    mixture = folder / "mix.yaml"
    mixture.write_text(json.dumps({"datasets": [{"json_path": str(path)} for path in parts.values()]}))
    common = {"train_batch_size": 4, "max_steps": STEPS, "save_strategy": "steps", "save_steps": SAVED}
    common |= {"per_device_train_batch_size": 2, "dataloader_num_workers": 1}
    runs, stopped = [], []
    for stage, layout in CASES:
        for name, more in (("plain", {}), ("watched", {**WATCH, "eval_data_path": mixture})):
            out = folder / f"{stage}-{layout}" / name
            config = tight_config(folder) if stage == 3 else ds_config(stage)
            runs.append(toy_run(given, out, config, **{**common, **LAYOUTS[layout], **more}))
            if name == "watched" and layout == "count":
                stopped.append({**runs[-1], "output_dir": folder / f"{stage}-{layout}" / "stopped"})
    run_many(2, folder / "launch", runs, timeout_s=900)
    for flags in stopped:
        as_if_stopped(Path(flags["output_dir"]).with_name("watched"), Path(flags["output_dir"]))
    run_many(2, folder / "launch-stopped", stopped, timeout_s=900)
    return folder


def as_if_stopped(whole: Path, out: Path) -> None:
    """The output of a run that is stopped at the step of a checkpoint: it saves, and evaluates no more."""
    shutil.copytree(whole, out)
    shutil.rmtree(out / f"checkpoint-{STEPS}")
    for name in LOGS:
        rows = [row for row in read_metrics(out / "run" / name) if row["step"] < SAVED]
        assert rows
        (out / "run" / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(("stage", "layout"), CASES)
def test_the_run_is_the_one_that_does_not_look(folder, stage, layout):
    plain, watched = (folder / f"{stage}-{layout}" / name for name in ("plain", "watched"))
    rows = [read_metrics(side / "run" / "metrics.jsonl") for side in (plain, watched)]
    for field in ("loss", "lr", "grad_norm", "samples", "tokens"):
        assert [row[field] for row in rows[0]] == [row[field] for row in rows[1]]
    assert differences(plain / f"checkpoint-{STEPS}", watched / f"checkpoint-{STEPS}") == []
    evals = read_metrics(watched / "run" / "evals.jsonl")
    assert [row["step"] for row in evals] == [2, 4, 6] and {row["samples"] for row in evals} == {7}
    assert len({row["loss"] for row in evals}) == 3
    for row in evals:
        by_source = row["source_losses"]
        assert list(by_source) == list(PARTS)
        assert min(by_source.values()) < row["loss"] < max(by_source.values())
    for path in [watched / "run" / name for name in LOGS if name != "evals.jsonl"]:
        assert [row["step"] for row in read_metrics(path)] == [2] * 3 + [4] * 3 + [6] * 3


@pytest.mark.parametrize("stage", STAGES)
def test_what_a_stop_leaves_no_time_for_is_done_when_the_run_goes_on(folder, stage):
    watched, stopped = (folder / f"{stage}-count" / name for name in ("watched", "stopped"))
    for name in LOGS:
        whole, again = (
            [{**row, "seconds": 0} for row in read_metrics(side / "run" / name)] for side in (watched, stopped)
        )
        assert again == whole
    assert differences(watched / f"checkpoint-{STEPS}", stopped / f"checkpoint-{STEPS}") == []


@pytest.mark.parametrize("layout", LAYOUTS)  # whose dropout differs, and so do the weights that it trains
def test_all_stages_measure_the_same(folder, layout):
    rows = [read_metrics(folder / f"{stage}-{layout}" / "watched" / "run" / "evals.jsonl") for stage in STAGES]
    for found in rows:
        assert [row["supervised_tokens"] for row in found] == [row["supervised_tokens"] for row in rows[0]]
        assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in rows[0]], rel=2e-6)


@needs_extension("samples")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stage", STAGES)
def test_the_last_answers_are_those_of_the_finished_model(folder, stage, layout):
    out = folder / f"{stage}-{layout}" / "watched"
    asked = [row for row in read_metrics(out / "run" / "samples.jsonl") if row["step"] == STEPS]
    records = {record["id"]: record for record in json.loads((folder / "held-out.json").read_text())}
    prompts = [
        Prompt((Message("human", records[row["id"]]["conversations"][0]["value"]),), tuple(row["images"]))
        for row in asked
    ]
    assert any(prompt.images for prompt in prompts)
    assert answer(load_model(out), prompts, max_new_tokens=5) == [row["answer"] for row in asked]
    assert [row["reference"] for row in asked] == [records[row["id"]]["conversations"][1]["value"] for row in asked]
