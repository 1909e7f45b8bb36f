"""kill -9 at random moments of whole runs through the real launcher: what they end in is bit for bit what an
uninterrupted run ends in.

KILLS in the environment says how many kills there are; half of them hit a save.
"""

import contextlib
import json
import os
import random
import shutil
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch
import toys
from launching import DEEPSPEED, TRAIN, command_line, ds_config, environment, toy_run
from safetensors.torch import load_file

from llava_ds.checkpoint import commit
from llava_ds.launchers import free_port

pytestmark = pytest.mark.faults

KILLS = int(os.environ.get("KILLS", "200"))
STEPS, SAVE_STEPS = 40, 2
START_S, END_S = 300.0, 90.0  # within which a run trains, and within which nothing of a killed one is left
KINDS = {
    "zero2-fp32": (2, {}),
    "zero3-bf16-async": (3, {"bf16": True, "async_save": True}),
    "zero1-fp32-async": (1, {"async_save": True, "save_total_limit": 1}),
    "zero3-fp32": (3, {"save_total_limit": 2}),
}
# Who is killed: one rank, both, or the launcher and all that it started.
VICTIMS = ("0", "1", "both", "all")
# What a step of the log says about the result, and not about time or memory.
FIELDS = ("step", "loss", "lr", "grad_norm", "samples", "tokens", "supervised_tokens", "skipped_steps")


class Run:
    """One start of run/train.py on two ranks."""

    def __init__(self, flags: dict[str, object], log: Path) -> None:
        self.output_dir, self.log, self.started = Path(flags["output_dir"]), log, time.time()
        command = [*DEEPSPEED, "--num_accelerators", "2", "--master_port", str(free_port()), str(TRAIN)]
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [*command, *command_line(flags)], env=environment(), stdout=file, stderr=subprocess.STDOUT
            )

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    @property
    def is_saving(self) -> bool:
        """Whether this run is in a save; what an earlier one left unfinished is not of it."""
        with contextlib.suppress(FileNotFoundError):
            return any(path.stat().st_mtime > self.started for path in self.output_dir.glob("checkpoint-*.tmp"))
        return False

    def wait(self, condition, limit_s: float) -> None:
        """Until it is true, the run ended, or the time is over."""
        deadline = time.monotonic() + limit_s
        while self.is_alive and time.monotonic() < deadline and not condition():
            time.sleep(0.0005)

    def wait_for_saves(self, number: int) -> float:
        """Until the number-th save from now has begun. Returns the seconds that the one before it took, or a guess."""
        took_s = 0.1
        for index in range(number):
            self.wait(lambda: self.is_saving, START_S)
            if index < number - 1:
                began = time.monotonic()
                self.wait(lambda: not self.is_saving, START_S)
                took_s = time.monotonic() - began
        return took_s

    def kill(self, victim: str) -> bool | None:
        """SIGKILL, until nothing of the run is left. Whether a save was under way; None when the run had just ended."""
        launcher = psutil.Process(self.process.pid)
        children = launcher.children(recursive=True)
        ranks = [process for process in children if rank_of(process) is not None]
        victims = {"all": [launcher, *children], "both": ranks}.get(victim)
        if victims is None:
            victims = [process for process in ranks if rank_of(process) == victim]
        for process in victims or [launcher, *children]:  # while it starts there may be no rank yet
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        was_saving = self.is_saving
        self.process.wait(END_S)
        _, left = psutil.wait_procs(children, timeout=END_S)
        assert not left, [process.cmdline() for process in left]
        return was_saving if self.process.returncode != 0 else None


def rank_of(process: psutil.Process) -> str | None:
    with contextlib.suppress(psutil.Error):
        if str(TRAIN) in process.cmdline() and process.ppid() != 1:
            return process.environ().get("RANK")
    return None


def wait_for_a_moment(run: Run, in_save: bool, chance: random.Random) -> None:
    if in_save:
        took_s = run.wait_for_saves(chance.randint(1, 4))
        time.sleep(chance.uniform(0, took_s))
    elif chance.random() < 0.3:
        run.wait(lambda: False, chance.uniform(0, 8))  # while it starts
    else:
        run.wait_for_saves(chance.randint(1, 3))
        time.sleep(chance.uniform(0, 1))


def newest_step(output_dir: Path) -> int:
    """Of the checkpoint that a resume would take; 0 without one."""
    path, _ = commit.newest_whole(output_dir)
    return 0 if path is None else commit.step_of(path)


def finish(flags: dict[str, object], log: Path) -> None:
    run = Run(flags, log)
    assert run.process.wait(300) == 0, log.read_text()


def same(one: object, other: object) -> bool:
    """Whether two values are the same bit for bit, tensors in any container."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "__dict__"):
        return type(one) is type(other) and same(vars(one), vars(other))
    return one == other


def compare(found: Path, expected: Path) -> None:
    """Weights, moments, schedule, counters and random states of the last checkpoint, the log, and the model."""
    folders = [folder / f"checkpoint-{STEPS}" for folder in (expected, found)]
    assert [commit.problem_with(folder) for folder in folders] == [None, None]
    names, again = (sorted(commit.read_manifest(folder)) for folder in folders)
    assert names == again
    for name in names:
        if name.endswith(".pt"):
            states = [torch.load(folder / name, weights_only=False) for folder in folders]
            assert same(*states), name
    trainers = [json.loads((folder / "trainer.json").read_text()) for folder in folders]
    assert trainers[0] == trainers[1]
    logs = [map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) for folder in (expected, found)]
    whole, killed = ([{field: row[field] for field in FIELDS} for row in log] for log in logs)
    assert len(whole) == STEPS and whole == killed
    assert same(*(load_file(folder / "model.safetensors") for folder in (expected, found)))


def test_kills_at_random_moments_change_nothing(tmp_path):
    given = toys.write_base(tmp_path / "base", attention_dropout=0.1)
    given |= toys.write_data(tmp_path / "data", "ittiitti" * 2)
    chance, started = random.Random(KILLS), time.monotonic()
    kills = in_saves = chain = starts = 0
    logs = tmp_path / "logs"
    logs.mkdir()
    while kills < KILLS or in_saves * 2 < KILLS:
        kind = list(KINDS)[chain % len(KINDS)]
        stage, more = KINDS[kind]
        options = {"save_strategy": "steps", "max_steps": STEPS, "save_steps": SAVE_STEPS, **more}
        whole, broken = tmp_path / f"whole-{kind}", tmp_path / f"broken-{chain}"
        if not whole.exists():
            finish(toy_run(given, whole, ds_config(stage), **options), logs / f"{kind}.txt")
        flags = toy_run(given, broken, ds_config(stage), **options)
        while kills < KILLS or in_saves * 2 < KILLS:
            step, starts = newest_step(broken), starts + 1
            run = Run(flags, logs / f"{chain}-{starts}.txt")
            wait_for_a_moment(run, in_saves * 2 <= kills, chance)
            hit = run.kill(chance.choice(VICTIMS)) if run.is_alive else None
            if hit is None:
                assert run.process.returncode == 0, run.log.read_text()
                break
            kills, in_saves = kills + 1, in_saves + hit
            assert newest_step(broken) >= step
        else:
            finish(flags, logs / f"{chain}-last.txt")
        assert " is not used: " not in "".join(log.read_text() for log in logs.glob(f"{chain}-*.txt"))
        compare(broken, whole)
        shutil.rmtree(broken)
        chain += 1
    print(f"{kills} kills, {in_saves} in saves, {starts} starts, {chain} runs, {time.monotonic() - started:.0f} s")
