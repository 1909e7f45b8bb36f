"""Every process of a run gets every signal, and a run is stopped at random moments, over and over."""

import json
import signal
import sys
import time
from pathlib import Path

import pytest
import toys
from launching import ROOT, command_line, ds_config, environment, launch, losses, toy_run
from signalled import SIGNALS, Started

from llava_ds.checkpoint.commit import step_of
from llava_ds.checkpoint.verification import newest_whole
from llava_ds.constants import EXIT_STOPPED
from llava_ds.runtime.launchers import free_port

pytestmark = pytest.mark.faults

SEED = 20
MOMENTS = 20
STOPPED_OFTEN = ROOT / "tests" / "workers" / "stopped_often.py"

# The runner's exit code, by who gets what. Without a handler the runner ends by the signal itself. The launcher says 1
# for SIGTERM and SIGINT whatever its ranks say, and where a signal ends it, the runner says 0 (DeepSpeed 0.19.8).
CODES = {
    **{("runner", name): -SIGNALS[name] for name in ("TERM", "INT", "USR1", "KILL")},
    **{("launcher", name): code for name, code in (("TERM", 1), ("INT", 1), ("USR1", 0), ("KILL", 0))},
    **{(f"rank-{rank}", name): EXIT_STOPPED for rank in (0, 1) for name in ("TERM", "INT", "USR1")},
    **{("group", name): -SIGNALS[name] for name in ("TERM", "INT", "USR1", "HUP")},  # HUP: the terminal is closed
}
WHILE_LOADING = {"runner": -signal.SIGTERM, "launcher": 1, "rank-0": EXIT_STOPPED, "rank-1": EXIT_STOPPED}


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("signals")
    return toys.write_base(folder / "base", attention_dropout=0.1) | toys.write_data(folder / "data", "ittiitti")


def flags_of(given: dict[str, str], folder: Path, **more: object) -> dict[str, object]:
    common = {"max_steps": 20_000, "save_strategy": "steps", "save_steps": 20_000, "dataloader_num_workers": 1}
    return toy_run(given, folder, ds_config(2), **{**common, **more})


def whole_step(run: Started) -> int:
    path, refused = newest_whole(run.output_dir)
    assert path is not None and refused == [], run.log.read_text()
    return step_of(path)


@pytest.mark.parametrize(("name", "number"), CODES)
def test_whoever_gets_whatever_saves_its_last_step_and_leaves_nobody_behind(given, tmp_path, name, number):
    with Started(2, flags_of(given, tmp_path / "run")) as run:
        run.wait_for_step(3)
        run.send(name, SIGNALS[number])
        code, said = run.wait_for_end(), run.log.read_text()
        assert (code, whole_step(run)) == (CODES[name, number], run.steps()[-1]["step"]), said
        interrupted = number == "INT" and name in ("runner", "group")  # which the runner itself answers with one
        assert said.count("Traceback") == interrupted, said


@pytest.mark.parametrize("name", WHILE_LOADING)
def test_while_it_loads_nothing_is_written_and_all_leave(given, tmp_path, name):
    with Started(2, flags_of(given, tmp_path / "run")) as run:
        run.wait_until(lambda: "optimizer steps of" in run.log.read_text())
        run.send(name, signal.SIGTERM)
        assert run.wait_for_end() == WHILE_LOADING[name], run.log.read_text()
        assert not list(run.output_dir.glob("checkpoint-*"))


def test_a_loader_worker_that_is_told_to_stop_goes_on(given, tmp_path):
    with Started(2, flags_of(given, tmp_path / "loader")) as run:
        run.wait_for_step(3)
        for number in ("TERM", "INT", "USR1"):
            run.send("loader-1", SIGNALS[number])
        run.wait_for_step(len(run.steps()) + 40)  # more than it has ahead
        run.send("rank-0", signal.SIGTERM)
        assert run.wait_for_end() == EXIT_STOPPED


def test_a_second_signal_leaves_at_once_and_the_checkpoint_before_is_whole(given, tmp_path):
    with Started(2, flags_of(given, tmp_path / "twice", save_steps=10)) as run:
        run.wait_for_step(12)
        run.send("rank-1", signal.SIGSTOP)  # so that no boundary is ever reached
        run.send("rank-0", signal.SIGTERM)
        time.sleep(3)
        assert run.processes()
        run.send("rank-0", signal.SIGTERM)
        assert run.wait_for_end() == 128 + signal.SIGTERM
        assert whole_step(run) % 10 == 0


def test_stopped_at_random_moments_it_ends_in_the_losses_of_a_run_that_never_was(given, tmp_path):
    seen = {}
    for name, stops in (("whole", 0), ("stopped", MOMENTS)):
        flags = flags_of(given, tmp_path / name, max_steps=150)
        task = {"argv": command_line(flags), "stops": stops, "seed": SEED, "report": str(tmp_path / f"{name}.json")}
        (tmp_path / "task.json").write_text(json.dumps(task))
        done = launch(2, STOPPED_OFTEN, str(tmp_path / "task.json"), timeout_s=1200)
        assert done.returncode == 0, done.stdout + done.stderr
        seen[name] = json.loads((tmp_path / f"{name}.json").read_text())
    *stopped, last = seen["stopped"]
    assert [each["code"] for each in stopped] == [EXIT_STOPPED] * MOMENTS and last["code"] == 0
    assert all(each["saved"] == each["step"] and not each["refused"] for each in seen["stopped"])  # no step is lost
    assert {each["rank"] for each in stopped} == {0, 1}
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")


def test_max_run_time_saves_within_it(given, tmp_path):
    with Started(2, flags_of(given, tmp_path / "limited", max_run_time="90s", save_steps=50)) as run:
        began = time.monotonic()
        code = run.wait_for_end(200)
        assert code == EXIT_STOPPED and whole_step(run) == run.steps()[-1]["step"]
        assert "--max_run_time is nearly over: stopped after step" in run.log.read_text()
        assert time.monotonic() - began < 90


def test_slurms_warning_saves_and_the_job_goes_back_into_the_queue(given, tmp_path):
    for name, text in (
        ("srun", f'exec "$PYTHON" {ROOT}/tests/workers/fake_srun.py "$@"'),
        ("scontrol", f'echo "$@" > {tmp_path}/scontrol.txt'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    flags = flags_of(given, tmp_path / "slurm")
    variables = {
        "PATH": f"{tmp_path}:{environment()['PATH']}",
        "PYTHON": sys.executable,
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": str(free_port()),
        "SLURM_JOB_NODELIST": "gpu[01-02]",
    }
    with Started(2, flags, command=["bash", str(ROOT / "run" / "slurm.sh")], **variables) as run:
        run.wait_for_step(3)
        srun = next(p for p in run.processes() if any("fake_srun" in word for word in p.cmdline()))
        for task in srun.children():
            task.send_signal(signal.SIGUSR1)  # Slurm sends it to every task
        assert run.wait_for_end() == EXIT_STOPPED, run.log.read_text()
        assert whole_step(run) == run.steps()[-1]["step"]
    assert (tmp_path / "scontrol.txt").read_text() == f"requeue {variables['SLURM_JOB_ID']}\n"
