"""kill -9 at random moments of whole runs: what they end in is bit for bit what an uninterrupted run ends in.

KILLS in the environment says how many kills there are, and SEED which; half of them hit a save. Every tenth start goes
through the real launcher, the others are forked from a process that has imported everything.
"""

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
import toys
from known_flags import known_cases
from launching import DEEPSPEED, ROOT, TRAIN, command_line, ds_config, environment, toy_run
from safetensors.torch import load_file

from llava_ds.checkpoint import commit, verification
from llava_ds.runtime.launchers import free_port

pytestmark = pytest.mark.faults

KILLS = int(os.environ.get("KILLS", "200"))
SEED = int(os.environ.get("SEED", "20"))
LAUNCHES = 10  # every so many starts goes through the real launcher
LAUNCHER_S = 1.0  # in which it ends the other ranks when one has failed
FORKING = ROOT / "tests" / "workers" / "forking.py"
STEPS, SAVE_STEPS = 40, 2
START_S, END_S = 300.0, 90.0  # within which a run trains, and within which nothing of a killed one is left
KINDS = {
    "zero2-fp32": (2, {}),
    "zero3-bf16-async": (3, {"bf16": True, "async_save": True}),
    "zero1-fp32-async": (1, {"async_save": True, "save_total_limit": 1}),
    "zero3-fp32": (3, {"save_total_limit": 2}),
    "zero2-shared-samples": (2, {"sequence_parallel_size": 2}),
    "zero1-shared-matrices": (1, {"tensor_parallel_size": 2, "async_save": True}),
    "zero2-shared-experts": (2, {"moe_enable": True, "moe_mode": "dense", "num_experts": 4, "ep_size": 2}),
    "zero2-dropping-experts": (
        2,
        {
            "moe_enable": True,
            "moe_mode": "dense",
            "ep_size": 2,
            "capacity_factor": 0.6,
            "tokens_per_micro_batch": 120,
        },
    ),
    "zero1-stages": (1, {"pipeline_parallel_size": 2, "bf16": True, "async_save": True}),
}
KINDS = known_cases(KINDS)
# Who is killed: one rank, both, or the launcher and all that it started.
VICTIMS = ("0", "1", "both", "all")
# What a step of the log says about the result, and not about time or memory.
FIELDS = ("step", "loss", "lr", "grad_norm", "samples", "tokens", "supervised_tokens", "skipped_steps")


class Run:
    """One start of run/train.py on two ranks. Its processes are those of `started`, a Launched or a Forked."""

    def __init__(self, flags: dict[str, object], log: Path, start: Callable) -> None:
        self.output_dir, self.log, self.began = Path(flags["output_dir"]), log, time.time()
        self.started = start(command_line(flags), log)

    @property
    def is_alive(self) -> bool:
        return self.started.code() is None

    @property
    def is_saving(self) -> bool:
        """True if this run is in a save; unfinished saves of earlier ones don't count."""
        with contextlib.suppress(FileNotFoundError):
            return any(path.stat().st_mtime > self.began for path in self.output_dir.glob("checkpoint-*.tmp"))
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

    def wait_for_end(self, limit_s: float) -> int:
        self.wait(lambda: False, limit_s)
        code = self.started.code()
        assert code is not None, f"nothing ended it within {limit_s} s: {self.log.read_text()}"
        return code

    def kill(self, victim: str) -> bool | None:
        """SIGKILL, until nothing of the run is left. Whether a save was under way; None when the run had just ended."""
        everyone, ranks = self.started.everyone(), self.started.ranks()
        victims = {"all": everyone, "both": list(ranks.values())}.get(victim, [ranks[v] for v in ranks if v == victim])
        for process in victims or everyone:  # while it starts there may be no rank yet
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        was_saving = self.is_saving
        code = self.wait_for_end(END_S)
        _, left = psutil.wait_procs(everyone, timeout=END_S)
        assert not left, [process.cmdline() for process in left]
        return was_saving if code != 0 else None


class Launched:
    """By the deepspeed launcher."""

    def __init__(self, argv: list[str], log: Path) -> None:
        command = [*DEEPSPEED, "--num_accelerators", "2", "--master_port", str(free_port()), str(TRAIN), *argv]
        with log.open("w") as file:
            self._process = subprocess.Popen(command, env=environment(), stdout=file, stderr=subprocess.STDOUT)

    def code(self) -> int | None:
        return self._process.poll()

    def everyone(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            launcher = psutil.Process(self._process.pid)
            return [launcher, *launcher.children(recursive=True)]
        return []

    def ranks(self) -> dict[str, psutil.Process]:
        return {rank: process for process in self.everyone() if (rank := rank_of(process)) is not None}


def rank_of(process: psutil.Process) -> str | None:
    with contextlib.suppress(psutil.Error):
        if str(TRAIN) in process.cmdline() and process.ppid() != 1:
            return process.environ().get("RANK")
    return None


class Forked:
    """By tests/workers/forking.py, for most of what a launch takes is imports. As a launcher does, it ends the rank
    that is left soon after one has failed."""

    def __init__(self, forking: subprocess.Popen, argv: list[str], log: Path) -> None:
        self._forking, self._failed_at = forking, None
        task = {"argv": argv, "log": str(log), "port": free_port()}
        forking.stdin.write(json.dumps(task) + "\n")
        forking.stdin.flush()
        self._ranks = [psutil.Process(pid) for pid in json.loads(forking.stdout.readline())["pids"]]
        self._code: int | None = None

    def code(self) -> int | None:
        alive = [process for process in self._ranks if is_running(process)]
        if self._code is None and not alive:
            codes = json.loads(self._forking.stdout.readline())["codes"]
            self._code = next((code for code in codes if code), 0)
        elif len(alive) == 1:
            self._failed_at = self._failed_at or time.monotonic()
            if time.monotonic() - self._failed_at > LAUNCHER_S:
                with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                    alive[0].kill()
        return self._code

    def everyone(self) -> list[psutil.Process]:
        return self._ranks

    def ranks(self) -> dict[str, psutil.Process]:
        return {str(rank): process for rank, process in enumerate(self._ranks)}


def is_running(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


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
    path, _ = verification.newest_whole(output_dir)
    return 0 if path is None else commit.step_of(path)


def finish(flags: dict[str, object], log: Path, start: Callable) -> None:
    assert Run(flags, log, start).wait_for_end(300) == 0, log.read_text()


@pytest.fixture
def forking() -> Iterator[subprocess.Popen]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, str(FORKING)], env=environment(), **pipes) as process:
        yield process
        process.stdin.close()


def same(one: object, other: object) -> bool:
    """True if two values are bit-equal, tensors in any container."""
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
    assert [verification.problem_with(folder) for folder in folders] == [None, None]
    names, again = (sorted(verification.read_manifest(folder)) for folder in folders)
    assert names == again
    for name in names:
        if name.endswith(".pt"):
            states = [torch.load(folder / name, weights_only=False) for folder in folders]
            assert same(*states), name
    trainers = [json.loads((folder / "trainer.json").read_text()) for folder in folders]
    assert trainers[0] == trainers[1]
    logs = [
        map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines()) for folder in (expected, found)
    ]
    whole, killed = ([{field: row[field] for field in FIELDS} for row in log] for log in logs)
    assert len(whole) == STEPS and whole == killed
    assert same(*(load_file(folder / "model.safetensors") for folder in (expected, found)))


def test_kills_at_random_moments_change_nothing(tmp_path, forking):
    data = toys.write_data(tmp_path / "data", "ittiitti" * 2)
    dropping = toys.write_base(tmp_path / "base", attention_dropout=0.1) | data
    whole_heads = toys.write_base(tmp_path / "other") | data  # ranks that share heads can't drop parts of them
    chance, started = random.Random(SEED), time.monotonic()
    kills = in_saves = chain = starts = launches = 0
    logs = tmp_path / "logs"
    logs.mkdir()
    fork = partial(Forked, forking)
    while kills < KILLS or in_saves * 2 < KILLS:
        kind = list(KINDS)[chain % len(KINDS)]
        stage, more = KINDS[kind]
        given = whole_heads if "tensor_parallel_size" in more else dropping
        options = {"save_strategy": "steps", "max_steps": STEPS, "save_steps": SAVE_STEPS, **more}
        whole, broken = tmp_path / f"whole-{kind}", tmp_path / f"broken-{chain}"
        if not whole.exists():
            finish(toy_run(given, whole, ds_config(stage), **options), logs / f"{kind}.txt", Launched)
        flags = toy_run(given, broken, ds_config(stage), **options)
        while kills < KILLS or in_saves * 2 < KILLS:
            step, starts = newest_step(broken), starts + 1
            start = Launched if starts % LAUNCHES == 0 else fork
            launches += start is Launched
            run = Run(flags, logs / f"{chain}-{starts}.txt", start)
            wait_for_a_moment(run, in_saves * 2 <= kills, chance)
            hit = run.kill(chance.choice(VICTIMS)) if run.is_alive else None
            if hit is None:
                assert run.started.code() == 0, run.log.read_text()
                break
            kills, in_saves = kills + 1, in_saves + hit
            assert newest_step(broken) >= step
        else:
            finish(flags, logs / f"{chain}-last.txt", fork)
        assert " is not used: " not in "".join(log.read_text() for log in logs.glob(f"{chain}-*.txt"))
        compare(broken, whole)
        shutil.rmtree(broken)
        chain += 1
        print(
            f"{kills} kills, {in_saves} in saves, {starts} starts, {launches} of them by the launcher, {chain} runs, "
            f"{time.monotonic() - started:.0f} s",
            flush=True,
        )
