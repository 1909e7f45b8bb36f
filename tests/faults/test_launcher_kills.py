"""Runner, launcher or a rank is killed, mostly while they start, and runs are started twice: the books balance.

All through the real launcher. LAUNCHER_KILLS says how many kills (50), STARTS how many pairs of starts at
once (6), SEED which. After each nothing of the run is left within a bounded time, and its exit code is one of those
that the documentation has; at the end every chain has one row per step and the weights of a run that nobody disturbed.
"""

import collections
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest
import toys
from launching import DEEPSPEED, TRAIN, ds_config, toy_run
from safetensors.torch import load_file
from signalled import Started

from llava_ds.constants import EXIT_BAD_INPUT, EXIT_RANK_LOST, EXIT_STOPPED
from llava_ds.runtime.launchers import free_port
from llava_ds.runtime.output_lock import NAME

pytestmark = pytest.mark.faults

KILLS = int(os.environ.get("LAUNCHER_KILLS", "50"))
STARTS = int(os.environ.get("STARTS", "6"))
SEED = int(os.environ.get("SEED", "19"))
STEPS, SAVE_STEPS = 40, 4
VICTIMS = ("runner", "runner", "launcher", "launcher", "rank-0", "rank-1")
SIGNALS = (signal.SIGKILL, signal.SIGTERM)
EARLY_S = 14.0  # most kills come before: runner, launcher and ranks import one after the other
END_S, RUN_S = 75.0, 240.0
KILLS_PER_CHAIN = 8
# What `deepspeed` may say (docs/checkpoints.md). Of a launcher's end it knows nothing: 0 for SIGKILL, and while it
# imports for SIGTERM too.
TRUE_CODES = {
    ("runner", signal.SIGKILL): {-9},
    ("runner", signal.SIGTERM): {-15},
    ("launcher", signal.SIGKILL): {0},
    ("launcher", signal.SIGTERM): {0, 1},
    ("rank", signal.SIGKILL): {247, EXIT_RANK_LOST},  # 247: the rank's -9, as the launcher hands it on
    ("rank", signal.SIGTERM): {EXIT_STOPPED, 241, EXIT_RANK_LOST},  # 241: while it imports
}


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("given")
    return toys.write_base(folder / "base", attention_dropout=0.1) | toys.write_data(folder / "data", "ittiitti")


def flags_of(given: dict[str, str], folder: Path) -> dict[str, object]:
    return toy_run(given, folder, ds_config(2), max_steps=STEPS, save_strategy="steps", save_steps=SAVE_STEPS)


def victim_of(run: Started, name: str) -> int | None:
    """Its pid; None while there is no such process."""
    try:
        return run.process(name)
    except (StopIteration, psutil.Error):
        return None


def changed(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else 0.0


def wait_for_moment(run: Started, chance: random.Random) -> str:
    """Until a random moment of the start (six of ten), of training, or of a save. Returns which."""
    moment = chance.choices(("start", "training", "save"), (6, 2, 2))[0]
    if moment == "start":
        time.sleep(chance.uniform(0.1, EARLY_S))
        return moment
    log, began, seen = run.output_dir / "run" / "metrics.jsonl", time.time(), 0
    last, wanted = max(began, changed(log)), chance.randint(1, 8)
    while run.runner.poll() is None and seen < wanted:
        if moment == "save" and any(changed(path) > began for path in run.output_dir.glob("checkpoint-*.tmp")):
            break
        if moment == "training" and (now := changed(log)) > last:
            last, seen = now, seen + 1
        time.sleep(0.002)
    time.sleep(chance.uniform(0, 0.1))
    return moment


def kill(run: Started, chance: random.Random) -> tuple[str, int, str] | None:
    """Wait for a random moment, and signal somebody then. Who, how and when; None if the run had ended before."""
    name, number = chance.choice(VICTIMS), chance.choice(SIGNALS)
    moment = wait_for_moment(run, chance)
    while run.runner.poll() is None:
        if (pid := victim_of(run, name)) is not None:
            os.kill(pid, number)
            return name.split("-")[0], number, moment
        time.sleep(0.02)
    return None


def wait_for_end(run: Started) -> tuple[int, float, list[str]]:
    """The runner's code, seconds until nothing of the run was left, and what was left after the limit."""
    began = time.monotonic()
    while (left := run.processes()) and time.monotonic() - began < END_S:
        time.sleep(0.1)
    orphans = [f"{process.pid} {process.cmdline()}" for process in left]
    if orphans:
        run.__exit__()
    return run.runner.wait(), time.monotonic() - began, orphans


def rows(folder: Path) -> list[int]:
    path = folder / "run" / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def check_books(found: Path, expected: Path) -> None:
    assert rows(found) == list(range(1, STEPS + 1))
    losses = [
        [json.loads(line)["loss"] for line in (each / "run" / "metrics.jsonl").open()] for each in (found, expected)
    ]
    assert losses[0] == losses[1]
    weights = [load_file(folder / "model.safetensors") for folder in (found, expected)]
    assert weights[0].keys() == weights[1].keys()
    assert all(weights[0][key].equal(weights[1][key]) for key in weights[0])
    assert not list(found.glob(f"{NAME}*"))  # the finished run holds nothing, and no start left anything


def finish(given: dict[str, str], folder: Path) -> None:
    with Started(2, flags_of(given, folder)) as run:
        assert run.wait_for_end(RUN_S) == 0, run.log.read_text()


@pytest.fixture(scope="module")
def whole(given, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "whole"
    finish(given, folder)
    return folder


def test_kills_of_everybody_leave_nobody_behind(given, whole, tmp_path):
    chance, counts, slowest = random.Random(SEED), collections.Counter(), 0.0
    problems: list[str] = []
    done = chain = 0
    while done < KILLS:
        folder = tmp_path / f"chain-{chain}"
        for _ in range(min(KILLS_PER_CHAIN, KILLS - done)):
            with Started(2, flags_of(given, folder)) as run:
                hit = kill(run, chance)
                code, seconds, orphans = wait_for_end(run)
                said = run.log.read_text()
            if hit is None:
                assert code == 0, said
                break
            done, slowest = done + 1, max(slowest, seconds)
            who, number, moment = hit
            counts[f"{who} {signal.Signals(number).name} {moment}"] += 1
            counts["orphans"] += len(orphans)
            counts["tracebacks"] += "Traceback (most recent" in said
            if orphans:
                problems.append(f"{hit}: {orphans}\n{said}")
            if code not in TRUE_CODES[who, number]:
                problems.append(f"{hit}: exit code {code}\n{said}")
            if code == EXIT_BAD_INPUT or "is in use" in said:
                problems.append(f"{hit}: refused by its own lock\n{said}")
            print(
                f"{done} {who} {number.name} {moment}: code {code}, {seconds:.1f} s, step {len(rows(folder))}",
                flush=True,
            )
        finish(given, folder)
        check_books(folder, whole)
        shutil.rmtree(folder)
        chain += 1
    print(f"{done} kills in {chain} chains, all gone after {slowest:.0f} s: {dict(counts)}", flush=True)
    assert not problems, "\n".join(problems)


def test_of_two_starts_at_once_one_trains_and_one_is_refused(given, whole, tmp_path):
    chance, codes = random.Random(SEED + 1), collections.Counter()
    for number in range(STARTS):
        folder, flags = tmp_path / f"pair-{number}", flags_of(given, tmp_path / f"pair-{number}")
        port = str(free_port())  # both the same, as a command that is given twice
        command = [*DEEPSPEED, "--num_accelerators", "2", "--master_port", port, str(TRAIN)]
        offset_s = 0.0 if number == 0 else chance.choice((chance.uniform(0, 2), chance.uniform(0, 6)))
        with Started(2, flags, command) as one:
            time.sleep(offset_s)
            log = one.log.rename(folder.with_suffix(".first.log"))
            with Started(2, flags, command) as other:
                ended = [other.wait_for_end(RUN_S), one.wait_for_end(RUN_S)]
                said = [other.log.read_text(), log.read_text()]
        codes[tuple(sorted(ended))] += 1
        print(f"{offset_s:.1f} s apart: codes {ended}", flush=True)
        assert sorted(ended) == [0, EXIT_BAD_INPUT], "\n".join(said)
        refused = said[ended.index(EXIT_BAD_INPUT)]
        assert refused.count("is in use by another run (process ") == 1 and "Traceback" not in refused, refused
        check_books(folder, whole)
    print(f"{STARTS} pairs: {dict(codes)}", flush=True)
