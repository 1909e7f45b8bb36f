"""Runs that draw answers, killed while they draw, in a step and in a save, and resumed each time, end with the books,
answers and model of one that nobody disturbed. RL_KILLS in the environment says how many kills (10, shared by GRPO and
PPO), SEED which."""

import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest
import toys
from drawing_runs import KINDS, RULES, TIMES, flags_of, read_rollouts
from signalled import Started

from llava_ds.files.jsonl import read_metrics

pytestmark = pytest.mark.faults

KILLS = int(os.environ.get("RL_KILLS", "10"))
SEED = os.environ.get("SEED", "0")
SAVED_EVERY = 2
MOMENTS = ("in a save", "while it draws", "in a step")


def num_rows(out: Path, name: str) -> int:
    """Whole rows of a log; 0 where there is none yet."""
    path = out / "run" / name
    return path.read_bytes().count(b"\n") if path.exists() else 0


def has_come(moment: str, out: Path, step: int) -> bool:
    """True when the run is at the moment. step: that has to be done before, but for a save."""
    if moment == "in a save":
        return any(out.glob("checkpoint-*.tmp"))
    done, drawn = num_rows(out, "metrics.jsonl"), num_rows(out, "rollouts.jsonl")
    return done >= step and drawn == done + (moment == "in a step")


def killed_in(run: Started, moment: str, step: int, delay_s: float) -> str:
    """Kill all of a run's processes at about a moment. Returns where it was found."""
    deadline = time.monotonic() + 240
    while not has_come(moment, run.output_dir, step):
        assert run.runner.poll() is None and time.monotonic() < deadline, run.log.read_text()
        time.sleep(0.002)
    time.sleep(delay_s)
    victims = run.processes()
    for process in victims:
        process.send_signal(signal.SIGSTOP)  # so that none goes on while the others are killed
    for process in victims:
        process.kill()
    psutil.wait_procs(victims, timeout=30)
    run.wait_for_end()
    out = run.output_dir
    if any(out.glob("checkpoint-*.tmp")):
        return "in a save"
    return MOMENTS[1 + (num_rows(out, "rollouts.jsonl") > num_rows(out, "metrics.jsonl"))]


def books(out: Path) -> tuple[list[dict], list[dict], bytes]:
    rows = [{k: v for k, v in row.items() if k not in TIMES} for row in read_metrics(out / "run" / "metrics.jsonl")]
    return rows, read_rollouts(out), (out / "model.safetensors").read_bytes()


@pytest.mark.parametrize("kind", ["held", "critic"])
def test_a_run_that_draws_and_is_killed_at_random_moments_ends_like_one_that_is_not(tmp_path, kind):
    (tmp_path / "rules.py").write_text(RULES)
    given = {**toys.write_base(tmp_path / "base"), **toys.write_data(tmp_path / "data", "iitit" * 3)}
    kills = max(len(MOMENTS), KILLS // 2)
    more = {
        **KINDS[kind],
        "max_steps": SAVED_EVERY * (2 * kills + 3),
        "max_completion_length": 24,
        "save_strategy": "steps",
        "save_steps": SAVED_EVERY,
        "save_total_limit": 2,
    }
    with Started(2, flags_of(tmp_path, given, "whole", 2, **more)) as run:
        assert run.wait_for_end(240) == 0, run.log.read_text()

    rng = random.Random(f"{SEED} {kind}")
    flags, found = flags_of(tmp_path, given, "out", 2, **more), []
    # A kill that comes a little late hits the next moment: so it goes on until every moment was hit.
    while len(found) < kills or (set(found) != set(MOMENTS) and len(found) < 2 * kills):
        moment = next((one for one in MOMENTS if one not in found), MOMENTS[len(found) % len(MOMENTS)])
        # Never further than a checkpoint from the last kill, so that all of them fit into the run.
        step = num_rows(tmp_path / "out", "metrics.jsonl") // SAVED_EVERY * SAVED_EVERY + rng.randrange(SAVED_EVERY)
        with Started(2, flags) as run:
            found.append(killed_in(run, moment, step, rng.random() * 0.05))
    assert set(found) == set(MOMENTS), found
    with Started(2, flags) as run:
        assert run.wait_for_end(240) == 0, run.log.read_text()
        assert "Traceback" not in run.log.read_text()
    assert books(tmp_path / "out") == books(tmp_path / "whole")
    assert len(books(tmp_path / "out")[0]) == more["max_steps"]
