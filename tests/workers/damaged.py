"""Damage what a run left, at random, and ask for it: python tests/workers/damaged.py RUN [--trials N] [--seed N]

RUN is a finished --output_dir with at least two checkpoints. Each trial copies it, damages one to three of its files
(not UTF-8, JSON of other types, deep nesting, named pipes, links to /dev/zero, folders, empty, cut, flipped, gone,
sparse; of a checkpoint with hashes faked around it in every other trial) and, in a process of its own, looks for what
to resume from, verifies, restores, describes and reports. The last line is a JSON object: how often each outcome came,
and what failed: an exception that is not for users, a hang, or an older whole checkpoint that was not reached.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import io
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from llava_ds.checkpoint import commit
from llava_ds.checkpoint.base_weights import weight_hashes
from llava_ds.checkpoint.commit import TRAINER
from llava_ds.checkpoint.resume import RUN_FILES, find_resume_point
from llava_ds.checkpoint.run_identity import RunIdentity, saved_identity
from llava_ds.constants import ConfigError, DataError
from llava_ds.export.from_checkpoint import restore
from llava_ds.extensions.infer.formats import open_model
from llava_ds.files.jsonl import MetricsLog
from llava_ds.files.writing import run_folder
from llava_ds.runtime.ranks import Ranks
from llava_ds.tracking.mending import mend_side_files
from llava_ds.tracking.page import write_report
from llava_ds.tracking.run_record import read_run_record

RANKS = Ranks(0, 0, 1, torch.device("cpu"))
LIMIT_S = 90.0  # for all that is asked in a trial
MEMORY_BYTES = 6 << 30
SIDE_FILES = ("run.json", "metrics.jsonl", "weight_hashes.json", "ds_config.json", "evals.jsonl", "skipped.jsonl")
VALUES = (None, [], {}, "", "x", -1, 0, 2**63, 1.5, True, [[1]], {"a": None}, float("nan"), "\ud800", "a" * 10_000)


def as_pipe(path: Path, rng: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def as_zero(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.symlink_to(rng.choice(["/dev/zero", "/proc/self/mem", "/dev/full", str(path), "/nowhere/at/all"]))


def as_folder(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


def as_sparse(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.choice([40 << 20, 3 << 30, 50 << 30]))


def flipped(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes() or b"0")
    for _ in range(rng.randint(1, 8)):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def not_utf8(path: Path, rng: random.Random) -> None:
    content = path.read_bytes()
    at = rng.randrange(len(content) + 1)
    path.write_bytes(content[:at] + b"\xff\xfe\x80" + content[at:])


def nested(path: Path, rng: random.Random) -> None:
    depth = rng.choice([900, 2_000, 500_000])
    opened, closed = rng.choice([("[", "]"), ('{"step":', "}"), ('{"files":', "}")])
    path.write_text(opened * depth + "1" + closed * depth)


def of_another_type(path: Path, rng: random.Random) -> None:
    """Another value at a random place of a JSON file, or in the whole's; a line's of a JSONL file."""
    try:
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        at = rng.randrange(len(lines))
        lines[at] = json.dumps(changed(json.loads(lines[at]), rng, rng.randint(0, 4)))
        path.write_text("\n".join(lines) + "\n")
    except (ValueError, IndexError):
        path.write_text(json.dumps(rng.choice(VALUES)))


def changed(value: object, rng: random.Random, depth: int) -> object:
    if depth and isinstance(value, dict) and value:
        key = rng.choice(list(value))
        if rng.random() < 0.15:
            return {name: each for name, each in value.items() if name != key}
        return {**value, key: changed(value[key], rng, depth - 1)}
    if depth and isinstance(value, list) and value:
        at = rng.randrange(len(value))
        return [*value[:at], changed(value[at], rng, depth - 1), *value[at + 1 :]]
    return rng.choice(VALUES)


def pickled(path: Path, rng: random.Random) -> None:
    """Another whole object of torch's."""
    torch.save(rng.choice([None, [], {"module": None}, {"module": {}}, {"optimizer_state_dict": 3}, "x"]), path)


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "pipe": as_pipe,
    "link": as_zero,
    "folder": as_folder,
    "sparse": as_sparse,
    "flipped": flipped,
    "not UTF-8": not_utf8,
    "nested": nested,
    "type": of_another_type,
    "pickle": pickled,
    "empty": lambda path, rng: path.write_bytes(b""),
    "cut": lambda path, rng: os.truncate(path, rng.randrange(path.stat().st_size + 1)),
    "gone": lambda path, rng: path.unlink(),
}


def damage(run: Path, rng: random.Random) -> tuple[list[str], bool, bool]:
    """One damage; whether it is in the newest checkpoint alone, and whether its hashes were faked."""
    newest = commit.checkpoints(run)[0]
    in_checkpoint = rng.random() < 0.6
    fakes = in_checkpoint and rng.random() < 0.5
    if in_checkpoint:
        pool = sorted(path for path in newest.rglob("*") if path.is_file())
        json_files = [path for path in pool if path.suffix == ".json"]
        pool = json_files if rng.random() < 0.6 else pool
        pool = [path for path in pool if not fakes or path.name != commit.MANIFEST]
    else:
        pool = [path for name in SIDE_FILES if (path := run_folder(run) / name).is_file()]
    done = []
    for path in rng.sample(pool, min(len(pool), rng.randint(1, 3))):
        kind = rng.choice(list(DAMAGES))
        if kind in ("not UTF-8", "type", "nested") and path.suffix not in (".json", ".jsonl"):
            kind = "pickle"
        DAMAGES[kind](path, rng)
        done.append(f"{path.relative_to(run)}: {kind}")
    if fakes:
        fake_hashes(newest)
    return done, in_checkpoint, fakes


def fake_hashes(checkpoint: Path) -> None:
    """A manifest that agrees with what lies there, as anybody can write one."""
    files = {}
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file() and path.name != commit.MANIFEST and path.stat().st_size < 1 << 30:
            content = b"" if path.is_symlink() else path.read_bytes()  # what a link leads to may have no end
            name = path.relative_to(checkpoint).as_posix()
            files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    step = commit.step_of(checkpoint)
    digest = hashlib.sha256(json.dumps([step, files], sort_keys=True).encode()).hexdigest()
    (checkpoint / commit.MANIFEST).write_text(json.dumps({"step": step, "files": files, "sha256": digest}))


def load_verify() -> Callable:
    spec = importlib.util.spec_from_file_location("verify", Path(__file__).parents[2] / "run" / "verify.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def asked(run: Path, identity: RunIdentity, args, verify: Callable) -> dict[str, Callable[[], object]]:
    """The uses of a run's folder, by name, in order."""
    checkpoints = commit.checkpoints(run)

    def resume() -> int:
        point, _ = find_resume_point("auto", run, identity)
        return point.step

    def describe() -> None:
        with open_model(checkpoints[0]):
            pass

    def go_on() -> None:
        mend_side_files(run, RUN_FILES, RANKS)
        MetricsLog(run_folder(run) / "metrics.jsonl", 2)
        read_run_record(run)

    return {
        "identity": lambda: saved_identity("auto", run) and None,
        "resume": resume,
        "verify": lambda: verify([str(run)]) and None,
        "weights": lambda: weight_hashes(args, run, checkpoints[-1]) and None,
        "restore": lambda: restore(checkpoints[0], {}, None) and None,
        "describe": describe,
        "report": lambda: write_report(run) and None,
        "go on": go_on,
    }


def attempt(acts: dict[str, Callable[[], object]]) -> dict[str, object]:
    """The outcome of each: its result, "refused: …" or "TRACEBACK: …"."""
    found = {}
    for name, act in acts.items():
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                found[name] = act()
        except (ConfigError, DataError) as error:
            found[name] = f"refused: {ascii(error)[:200]}"
        except BaseException:
            found[name] = f"TRACEBACK: {traceback.format_exc()[-2000:]}"
    return found


def in_child(work: Callable[[], dict]) -> dict | None:
    """The result of a process of its own with bounded memory; None where it did not come in time."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        with os.fdopen(writer, "w") as file:
            json.dump(work(), file)
        os._exit(0)
    os.close(writer)
    content, end = b"", time.monotonic() + LIMIT_S
    with os.fdopen(reader, "rb", buffering=0) as file:
        while select.select([file], [], [], max(0.0, end - time.monotonic()))[0]:
            block = file.read(1 << 16)
            if not block:
                break
            content += block
        else:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
    status = os.waitpid(child, 0)[1]
    return json.loads(content) if content else {"process": f"TRACEBACK: it ended with status {status}"}


def trial(whole: Path, seed: int, verify: Callable) -> tuple[list[str], dict | None, list[str]]:
    """A damage, its outcome, and what is wrong with that."""
    rng = random.Random(seed)
    trainer = json.loads((commit.checkpoints(whole)[0] / TRAINER).read_text())
    identity = RunIdentity(**trainer["identity"])
    args, _ = read_run_record(whole)
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / whole.name
        shutil.copytree(whole, run, symlinks=True)
        older = commit.step_of(commit.checkpoints(run)[1])
        done, in_checkpoint, fakes = damage(run, rng)
        found = in_child(lambda: attempt(asked(run, identity, args, verify)))
    if found is None:
        return done, None, [f"HANG after {LIMIT_S:.0f} s"]
    wrong = [f"{act}: {came}" for act, came in found.items() if str(came).startswith("TRACEBACK")]
    step = found.get("resume")
    reached = step == trainer["step"] or (in_checkpoint and step == older)
    # Whoever fakes hashes can write another run's settings, too, which are refused by name.
    if not reached and not (fakes and "other settings" in str(step)):
        wrong.append(f"no checkpoint was reached: {step}")
    return done, found, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    verify, outcomes, failures = load_verify(), Counter(), []
    for number in range(args.seed, args.seed + args.trials):
        done, found, wrong = trial(args.run, number, verify)
        for act, came in (found or {"all": "hang"}).items():
            outcomes[f"{act}: {str(came).partition(':')[0] if isinstance(came, str) else 'done'}"] += 1
        print(f"{number}: {', '.join(done)}: {wrong or 'as it should be'}", file=sys.stderr, flush=True)
        failures += [{"seed": number, "damage": done, "wrong": each} for each in wrong]
    print(json.dumps({"trials": args.trials, "outcomes": dict(sorted(outcomes.items())), "failures": failures}))


if __name__ == "__main__":
    main()
