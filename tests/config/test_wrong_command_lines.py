"""Wrong command lines over all commands: none may end in a traceback, hang, or leave something in the current folder.

WRONG_COMMANDS says how many (500), WRONG_SEED which (0):
WRONG_COMMANDS=50 python -m pytest -m long -s tests/config/test_wrong_command_lines.py. Most run in forks of this
process, which has opened the libraries already; every fiftieth is a process of its own. The counts of outcomes, and the
lines that failed, are printed.
"""

import argparse
import collections
import contextlib
import importlib.util
import json
import os
import random
import resource
import runpy
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from launching import ROOT, environment

COUNT = int(os.environ.get("WRONG_COMMANDS", "500"))
SEED = int(os.environ.get("WRONG_SEED", "0"))
CPU_S, WALL_S, MEMORY = 90, 420, 4 * 10**9
REAL_EVERY = 50
FINE = {"doctor.py": {0, 1}, "verify.py": {0, 1}}  # exit codes of a line that is taken; elsewhere 0

WHOLE = ["x", "-1", "0", "1e3", "9" * 30, "9" * 5000, "nan", "", "0x10", "1.5", "-99999999999", "１"]
REAL = ["nan", "inf", "-inf", "x", "", "-1", "1e400", "1e300", "0x1p3", "1,5"]
WORDS = ["zzz", "", "-", "x" * 5000, "{", "[" * 3000, "\x1b[31m", "(1x1),...,(99999x99999)", "None", "a,b", "${HOME}"]
TALK = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]
TRUTHS = ["maybe", "2", "", "tru"]


@pytest.fixture(scope="module")
def world(tmp_path_factory, toy_base) -> dict[str, str]:
    """Paths of everything that a line may name, by name."""
    folder = tmp_path_factory.mktemp("wrong")
    contents = {
        "records": json.dumps([{"id": i, "conversations": TALK} for i in range(4)]),
        "deep.json": "[" * 100_000,
        "deep_object.json": '{"a":' * 100_000,
        "list.json": "[1, 2]",
        "number.json": '{"train_batch_size": ' + "9" * 400 + "}",
        "deep.yaml": "a: " + "[" * 1500,
        "list.yaml": "- a\n- b",
        "date.yaml": "seed: 2024-13-45",
        "nested.yaml": "recipe: other.yaml\nhelp: true",
        "wrong.yaml": "learning_rat: 1\nseed: -1\n1: 2",
        "empty": "",
        "binary": "\udcff\udcfe\x00",
    }  # fmt: skip
    for name, text in contents.items():
        (folder / name).write_bytes(text.encode(errors="surrogateescape"))
    os.mkfifo(folder / "fifo")
    run = folder / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": i, "loss": 1 / i}) + "\n" for i in range(1, 5)))
    (folder / "checkpoint-1").mkdir()
    names = {name: str(folder / name) for name in [*contents, "fifo", "run", "checkpoint-1"]}
    return {**names, **toy_base, "folder": str(folder), "cache": str(folder / "cache")}


def paths(world: dict[str, str]) -> list[str]:
    mine = [world[name] for name in world if name not in ("cache",)]
    others = ["", "/nowhere/x", "/proc/x", "/dev/full", "/dev/null", "/dev/zero", "x" * 300, "new/" + "y" * 300]
    return [*mine, *others, "../" * 2000, "~nobody/x", "\x01", "a\nb", "/etc/passwd/x", "*", "-"]


def plain(world: dict[str, str]) -> dict[str, list[str]]:
    """A cheap command line of every script. Those that would work long are wrong already."""
    base = ["--model_name_or_path", world["model_name_or_path"], "--vision_tower", world["vision_tower"]]
    data = ["--data_path", world["records"], "--cache_dir", world["cache"], "--model_max_length", "512"]
    zero2 = str(ROOT / "ds_configs" / "zero2.json")
    out = os.path.join(world["folder"], "out")
    found = {
        "train.py": [*base, *data, "--deepspeed_config", zero2, "--output_dir", out, "--dry_run", "True"],
        "inspect_data.py": [*base, *data],
        "encode.py": [*base, *data],
        "evaluate.py": ["--model_path", world["run"], "--data_path", world["records"]],
        "chat.py": ["--model_path", world["run"], "--question", "Hi"],
        "export.py": [world["run"], "--output_dir", out],
        "estimate.py": ["--model", "7e9", "--num_gpus", "8"],
        "doctor.py": ["--no_collective", "--output_dir", out],
        "report.py": [world["run"]],
        "compare.py": [world["run"], world["run"], "--html", f"{out}.html"],
        "verify.py": [world["checkpoint-1"]],
        "bench.py": ["--only", "nothing", "--output_dir", out],
        "build_tiny.py": ["--only", "nothing", "--output", out],
    }
    return {name: words for name, words in found.items() if any((ROOT / "run").rglob(name))}


def bad_value(action: argparse.Action, world: dict[str, str], chance: random.Random) -> str:
    """A value that the flag's kind does not take, as a rule."""
    names = str(action.dest)
    if action.choices is not None:
        return chance.choice(WORDS)
    if any(
        part in names for part in ("path", "folder", "dir", "config", "recipe", "html", "output", "adapter", "base")
    ):
        return chance.choice(paths(world))
    kind = getattr(action.type, "__name__", "")
    if kind == "string_to_bool":
        return chance.choice(TRUTHS)
    return chance.choice({"int": WHOLE, "float": REAL, "read": WHOLE + REAL}.get(kind, WORDS + paths(world)[-15:]))


def mutated(name: str, words: list[str], actions: list[argparse.Action], world, chance: random.Random) -> list[str]:
    """The line with one to three mistakes."""
    flags = [action for action in actions if action.option_strings and action.dest not in ("help", "web", "port")]
    for _ in range(chance.choice((1, 1, 2, 3))):
        action = chance.choice(flags)
        flag = chance.choice([each for each in action.option_strings if each.startswith("--")])
        value = bad_value(action, world, chance)
        at = chance.randrange(len(flag) - 2) + 2
        words = chance.choice(
            [
                [*words, flag, value],
                [*words, flag, value],
                [*words, flag, value],
                [*words, f"{flag}={value}"],
                [*words, flag],
                [*words, flag[:at] + flag[at + 1 :], value],
                [*words, flag[:at] + chance.choice("abz_") + flag[at:], value],
                [*words, flag, value, flag, bad_value(action, world, chance)],
                [value, *words],
                [*words, *(["--recipe", chance.choice(paths(world))] if "train" in name else [value])],
                [*words, "--deepspeed_config", chance.choice(paths(world))],
            ]
        )  # fmt: skip
    return words


@dataclass
class Case:
    script: str
    words: list[str]
    real: bool = False

    def __str__(self) -> str:
        return f"{script_of(self).relative_to(ROOT)} " + " ".join(shlex.quote(word[:200]) for word in self.words)


def limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()  # data, which is limited
    resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**9, 10**9))


def script_of(case: Case) -> Path:
    """A script of run/, or of run/dev/."""
    path = ROOT / "run" / case.script
    return path if path.exists() else path.parent / "dev" / case.script


def run_forked(case: Case, cwd: Path, log: Path) -> int | None:
    """The exit status, as subprocess tells it; None where it ran out of time."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        null = os.open(os.devnull, os.O_RDONLY)
        for new, old in ((null, 0), (file, 1), (file, 2)):
            os.dup2(new, old)
        sys.stdout, sys.stderr = (os.fdopen(each, "w", closefd=False) for each in (1, 2))
        sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(cwd)
        limit()
        sys.argv = [str(script_of(case)), *case.words]
        code = 1
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as ended:
            code = ended.code or 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            os._exit(code if isinstance(code, int) else 1)
    deadline = time.monotonic() + WALL_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def run_really(case: Case, cwd: Path, log: Path) -> int | None:
    with log.open("w") as file:
        command = [sys.executable, str(script_of(case)), *case.words]
        with subprocess.Popen(
            command, cwd=cwd, env=environment(), stdin=subprocess.DEVNULL, stdout=file, stderr=file, preexec_fn=limit
        ) as process:
            try:
                return process.wait(timeout=WALL_S)
            except subprocess.TimeoutExpired:
                process.kill()
                return None


def outcome(case: Case, code: int | None, said: str, left: list[str]) -> str:
    if code is None or code == -signal.SIGXCPU:
        return "hang"
    if "Traceback (most recent call last)" in said:
        return "traceback"
    if left:
        return "wrote into the current folder"
    if code == 2:
        lines = [line for line in said.splitlines() if line.startswith(f"{script_of(case).relative_to(ROOT)}: error")]
        return "refused" if len(lines) == 1 else f"refused with {len(lines)} messages"
    if code in FINE.get(case.script, {0}):
        return "taken"
    return f"ended with {code}"


@pytest.mark.long
def test_wrong_command_lines(world, tmp_path):
    spec = importlib.util.spec_from_file_location("run_flags", ROOT / "run" / "dev" / "flags.py")
    flags = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(flags)
    parsers = flags.all_parsers()
    import deepspeed  # noqa: F401  for the forks

    chance = random.Random(SEED)
    lines = plain(world)
    train = parsers["train.py"]._actions
    counts, failed = collections.Counter(), []
    for number in range(COUNT):
        name = chance.choice([*lines, "train.py", "train.py", "train.py"])
        actions = parsers[name]._actions + (
            train if name in ("encode.py", "estimate.py", "inspect_data.py", "verify.py") else []
        )
        case = Case(name, mutated(name, lines[name], actions, world, chance), number % REAL_EVERY == 0)
        case.words = [word.replace("\0", "") for word in case.words]
        cwd, log = tmp_path / str(number), tmp_path / f"{number}.log"
        cwd.mkdir()
        code = (run_really if case.real else run_forked)(case, cwd, log)
        said = log.read_text(errors="replace")
        result = outcome(case, code, said, [left for left in os.listdir(cwd) if left not in " ".join(case.words)])
        counts[result] += 1
        if result == "taken":
            print(f"taken: {case}")
        elif result != "refused":
            failed.append(f"{result}: {case}\n{said[-1500:]}")
            print(failed[-1], flush=True)
    print(f"{COUNT} wrong command lines, seed {SEED}: {dict(counts)}")
    assert not failed, "\n\n".join(failed)
