"""--save_strategy epoch, --eval_strategy epoch and --save_only_model, on two ranks at ZeRO 2 and 3."""

import json
import signal
import subprocess
import sys

import pytest
import toys
from launching import ROOT, command_line, ds_config, environment, launch, losses, run_many, toy_run
from safetensors.torch import load_file
from signalled import Started
from transformers import LlavaForConditionalGeneration

from llava_ds.checkpoint import commit
from llava_ds.checkpoint.commit import step_of
from llava_ds.constants import EXIT_NOT_RESUMABLE

pytestmark = pytest.mark.long

PER_EPOCH, EPOCHS = 3, 2
FLAGS = {"num_train_epochs": EPOCHS, "save_strategy": "epoch", "eval_strategy": "epoch"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("strategies")
    given = {**toys.write_base(folder / "base"), **toys.write_data(folder / "data", "iitiitiiitii")}
    held_out = toys.write_data(folder / "eval", "iit", seed=5)
    watched = {"eval_data_path": held_out["data_path"]}
    # Pictures of both lie in one folder.
    given["image_folder"] = str(folder / "data" / "images")
    flags = {}
    for stage in (2, 3):
        for name, more in (("whole", {}), ("model", {"save_only_model": True})):
            out = folder / f"{name}-{stage}"
            flags[name, stage] = toy_run(given, out, ds_config(stage), **{**FLAGS, **watched, **more})
    run_many(2, folder / "launch", list(flags.values()))
    return flags


def test_epochs_end_with_a_checkpoint_and_an_evaluation(runs):
    for flags in runs.values():
        steps = sorted(map(step_of, commit.checkpoints(flags["output_dir"])))
        assert steps == [PER_EPOCH, PER_EPOCH * EPOCHS]
        rows = (flags["output_dir"] / "run" / "evals.jsonl").read_text().splitlines()
        assert [json.loads(row)["step"] for row in rows] == steps


@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_of_the_model_alone_changes_nothing_and_opens_by_itself(runs, stage):
    whole, alone = (runs[name, stage]["output_dir"] for name in ("whole", "model"))
    assert losses(whole) == losses(alone)
    last = alone / f"checkpoint-{PER_EPOCH * EPOCHS}"
    assert not (last / "engine").exists()
    found, left = (load_file(folder / "model.safetensors") for folder in (last, alone))
    assert found.keys() == left.keys() and all(found[name].equal(left[name]) for name in left)
    assert LlavaForConditionalGeneration.from_pretrained(last)
    verified = subprocess.run(
        [sys.executable, ROOT / "run" / "verify.py", alone], env=environment(), capture_output=True, text=True
    )
    assert verified.returncode == 0 and "the model alone (hf)" in verified.stdout


@pytest.mark.parametrize(("how", "left"), [({"save_only_model": True, "save_strategy": "epoch"}, 1), ({}, 0)])
def test_a_run_that_is_stopped_has_an_exit_code_of_its_own_where_it_cannot_be_resumed(tmp_path, how, left):
    given = toys.write_base(tmp_path / "base") | toys.write_data(tmp_path / "data", "ittiitti")
    flags = toy_run(given, tmp_path / "out", ds_config(2), max_steps=5000, num_train_epochs=5000, **how)
    with Started(2, flags) as run:
        run.wait_for_step(1)
        run.send("rank-1", signal.SIGTERM)
        assert run.wait_for_end() == EXIT_NOT_RESUMABLE, run.log.read_text()
    found = commit.checkpoints(run.output_dir)
    assert sorted(map(step_of, found))[-1:] == [run.steps()[-1]["step"]][:left]


def test_a_resume_says_why_not(runs):
    flags = runs["model", 2]
    done = launch(2, ROOT / "run" / "train.py", *command_line({**flags, "num_train_epochs": 3}))
    assert done.returncode != 0 and "no checkpoint that a run can be resumed from" in done.stderr
    assert "Traceback" not in done.stderr and len(commit.checkpoints(flags["output_dir"])) == 2
