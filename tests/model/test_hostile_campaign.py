"""Model folders as a stranger might make them, through every command that opens one: each is accepted, or refused in
one message; nothing runs, nothing hangs, no memory is taken for what a file only says, and no file outside is opened.

LLAVA_DS_HOSTILE_FOLDERS: how many; LLAVA_DS_HOSTILE_SEED: the first one's seed. A case is its seed: one that fails is
repeated by that seed and a count of 1. Most go through the commands' own functions in forked processes; every 20th
through the command itself.
"""

import collections
import contextlib
import ctypes
import importlib.util
import json
import os
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
import traceback
from pathlib import Path

import hostile
import llavas
import pytest
import torch
import toys
from extension_there import if_there
from launching import ROOT, TRAIN, ds_config, launch, toy_run
from launching import command_line as words_of

from llava_ds.checkpoint import commit
from llava_ds.constants import ConfigError, DataError
from llava_ds.data import template_process
from llava_ds.data.end_markers import refuse_unfit_tokenizer
from llava_ds.data.templates import resolve_template
from llava_ds.engine.construct import build_model
from llava_ds.engine.shards.checkpoint_writer import ENGINE
from llava_ds.export.export_plan import ExportPlan, export_format
from llava_ds.export.trial import try_export
from llava_ds.extensions.infer import engines, web  # noqa: F401  imported once, before the processes are forked
from llava_ds.files.writing import sha256
from llava_ds.model.open.folder import take_from_model
from llava_ds.model.open.model_plan import plan_model

COUNT = int(os.environ.get("LLAVA_DS_HOSTILE_FOLDERS", "300"))
SEED = int(os.environ.get("LLAVA_DS_HOSTILE_SEED", "0"))
MEMORY = 3 * 2**30  # bytes that a case may take on top of what this process has
RESIDENT = 2**30  # and of memory that it touches
SECONDS, COMMAND_SECONDS = 90, 300  # for a case; toys take one, on an idle machine
OF_COMMANDS = 20
OPENED = 0x20  # IN_OPEN
DIRECTORY = 0x40000000
ALLOCATION = re.compile(r"MemoryError|can't allocate|not enough memory|bad_alloc|memory allocation", re.IGNORECASE)


def script(name: str):
    """A file of run/ as a module."""
    spec = importlib.util.spec_from_file_location(f"run_{name}", ROOT / "run" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NAMES = ("chat", "export", "inspect_data", *if_there("benchmarks", evaluate=True), *if_there("planning", estimate=True))
SCRIPTS = {name: script(name) for name in NAMES}


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> dict[str, Path]:
    """A folder of every kind, and data."""
    root = tmp_path_factory.mktemp("good")
    base = toys.write_base(root / "base")
    model = llavas.hf_model(base)
    llavas.write_hf(root / "hf", base, model)
    llavas.write_llava(root / "llava", base, model)
    projector = {
        name: tensor for name, tensor in llavas.llava_names(llavas.tensors_of(model)).items() if "mm_projector" in name
    }
    llavas.write_idle_adapter(root / "adapter", base, projector)
    (root / "projector").mkdir()
    torch.save(projector, root / "projector" / "mm_projector.bin")
    (root / "tokenizer").mkdir()
    for file in Path(base["model_name_or_path"]).glob("*token*"):
        shutil.copy(file, root / "tokenizer")
    toys.write_data(root / "data", "it")
    os.rename(base["model_name_or_path"], root / "lm")
    os.rename(base["vision_tower"], root / "tower")
    adapter = root / "adapter" / "adapter_config.json"
    adapter.write_text(adapter.read_text().replace(base["model_name_or_path"], str(root / "lm")))
    folders = {path.name: path for path in root.iterdir()}
    data = {"data_path": root / "data" / "data.json", "image_folder": root / "data" / "images"}
    given = {"model_name_or_path": root / "hf", "version": "v1", **data}
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1, "train_batch_size": 2}
    run = toy_run(given, tmp_path_factory.mktemp("run") / "run", ds_config(2), **saving)
    done = launch(1, TRAIN, *words_of(run))
    assert done.returncode == 0, done.stdout + done.stderr
    return {**folders, "checkpoint": Path(run["output_dir"])}


KINDS = {  # and the commands that open them
    "lm": ("train", "inspect_data", "estimate"),
    "tower": ("train", "inspect_data", "estimate", "chat"),
    "hf": ("train", "chat", "evaluate", "export", "inspect_data", "estimate"),
    "llava": ("train", "chat", "evaluate", "export", "inspect_data", "estimate"),
    **if_there("lora", adapter=("train", "chat", "evaluate", "export", "inspect_data", "estimate")),
    "projector": ("train",),
    "tokenizer": ("inspect_data",),
    "checkpoint": ("chat", "evaluate", "export"),  # what DeepSpeed wrote into it, with hashes that fit
}
KINDS = {kind: [each for each in names if each in ("train", *SCRIPTS)] for kind, names in KINDS.items()}


def flags_of(kind: str, folder: Path, good: dict[str, Path]) -> dict[str, str]:
    """Flags of training that name the folder, and good ones for the rest."""
    tower = {"vision_tower": str(good["tower"])}
    return {
        "lm": {"model_name_or_path": str(folder), **tower},
        "tower": {"model_name_or_path": str(good["llava"]), "vision_tower": str(folder)},
        "hf": {"model_name_or_path": str(folder)},
        "llava": {"model_name_or_path": str(folder), **tower},
        "adapter": {"model_name_or_path": str(folder), **tower},
        "projector": {"model_name_or_path": str(good["lm"]), **tower,
                      "pretrain_mm_mlp_adapter": str(folder / "mm_projector.bin")},
        "tokenizer": {"model_name_or_path": str(folder), **tower},
        "checkpoint": {"model_name_or_path": str(folder / "checkpoint-1")},
    }[kind]  # fmt: skip


def command_line(command: str, kind: str, folder: Path, good: dict[str, Path], version: str | None) -> list[str]:
    """What a user would write."""
    flags = flags_of(kind, folder, good)
    named = {"version": version} if version else {}
    data = {"data_path": good["data"] / "data.json", "image_folder": good["data"] / "images"}
    caches = {"cache_dir": folder.parent / "cache"}
    if command in ("chat", "evaluate", "export"):
        model = flags.pop("model_name_or_path")
        more = {"vision_tower": flags["vision_tower"]} if "vision_tower" in flags else {}
        if kind == "checkpoint":
            named = {}  # it says its template itself
        if command == "export":
            form = {"format": "llava", "vision_tower": "t"} if kind == "hf" else {"format": "hf"}
            said = {**form, **more, **named, "output_dir": folder.parent / "out"}
            return [model, *(word for name, value in said.items() for word in (f"--{name}", str(value)))]
        asked = {"image": next((good["data"] / "images").iterdir()), "question": "What is it?", "max_new_tokens": 2}
        if command == "evaluate":
            asked = {**data, **caches, "limit": 2, "max_new_tokens": 2, "output": folder.parent / "answers.json"}
        said = {"model_path": model, **more, **named, **asked}
    elif command == "estimate":
        said = {**flags, "num_gpus": 2}
    else:
        said = {**flags, **data, **caches, **named}
        if command == "train":
            said |= {"dry_run": True, "deepspeed_config": ROOT / "ds_configs" / "zero0.json", "num_train_epochs": 1,
                     "per_device_train_batch_size": 1, "output_dir": folder.parent / "out"}  # fmt: skip
    return [word for name, value in said.items() for word in (f"--{name}", str(value))]


def opened_for_training(flags: dict[str, str], version: str | None, output_dir: Path) -> None:
    """What run/train.py does with a model before and after its data, up to the model with its weights."""
    args, _ = take_from_model(llavas.arguments({**flags, **({"version": version} if version else {})}))
    args = args.replaced(version=resolve_template(args.model.version))
    plan = plan_model(args.model, 512)
    refuse_unfit_tokenizer(args.model, plan.tokenizer)
    image_options = plan.tower.image_options(args)
    form, _ = export_format(args, plan, image_options)
    export = ExportPlan(plan, args.model, image_options, torch.float32, 512, form)
    try_export(export, output_dir)
    build_model(plan, args.model, llavas.STAGE_0, torch.float32, 0, llavas.RANKS)


def run_here(command: str, kind: str, folder: Path, good: dict[str, Path], version: str | None) -> None:
    if command == "train":
        opened_for_training(flags_of(kind, folder, good), version, folder.parent / "out")
        return
    argv = command_line(command, kind, folder, good, version)
    SCRIPTS[command].main(argv)


def in_a_process(case: Path, work) -> tuple[str, str]:
    """(outcome, what was said) of a function, in a forked process with bounded memory and time."""
    report = case / "report"
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            with open(case / "output", "w") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            os.chdir(case)
            data = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_DATA, (data + MEMORY, data + MEMORY))
            template_process.CPU_SECONDS = 2
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            outcome, said = outcome_of(work)
            touched = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
            if touched > RESIDENT:
                outcome, said = "memory", f"{touched >> 20} MB: {said}"
            report.write_text(f"{outcome}\n{said}", errors="replace")
        finally:
            os._exit(0)
    code = waited(child)
    if code is None:
        return "hang", (case / "output").read_text(errors="replace")[-2000:]
    if not report.is_file():
        return "crash", f"status {code}: {(case / 'output').read_text(errors='replace')[-2000:]}"
    outcome, _, said = report.read_text().partition("\n")
    return outcome, said


def outcome_of(work) -> tuple[str, str]:
    try:
        work()
    except (ConfigError, DataError) as error:
        return ("memory" if ALLOCATION.search(str(error)) else "refused"), str(error)
    except SystemExit as error:
        return ("refused" if error.code == 2 else "accepted" if error.code in (0, None) else "exit"), str(error)
    except BaseException:
        return "traceback", traceback.format_exc()
    return "accepted", ""


def waited(child: int) -> int | None:
    """The exit status; None for one that had to be killed."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.01)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def by_command(case: Path, command: str, argv: list[str]) -> tuple[str, str]:
    """The same of the command itself."""
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_DATA, ({2 * MEMORY}, {2 * MEMORY})); "
    start = f"{limited}import os, sys; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    program = [sys.executable, "-c", start, str(ROOT / "run" / f"{command}.py"), *argv]
    with open(case / "output", "w") as output:
        ran = subprocess.Popen(program, cwd=case, stdout=output, stderr=output, start_new_session=True)
        try:
            code = ran.wait(COMMAND_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(ran.pid, signal.SIGKILL)
            ran.wait()
            return "hang", ""
    said = (case / "output").read_text(errors="replace")
    if "Traceback" in said:
        return "traceback", said
    if code not in (0, 2):
        return "crash", f"exit code {code}: {said[-2000:]}"
    return ("memory" if ALLOCATION.search(said) else "refused" if code else "accepted"), said[-2000:]


@contextlib.contextmanager
def opened_files(folder: Path):
    """Names of files directly in a folder that any process opens meanwhile, whatever language it is written in."""
    libc, names = ctypes.CDLL(None, use_errno=True), []
    watch = libc.inotify_init1(os.O_NONBLOCK)
    assert watch >= 0 and libc.inotify_add_watch(watch, os.fsencode(folder), OPENED) >= 0
    try:
        yield names
        with contextlib.suppress(BlockingIOError):
            while events := os.read(watch, 2**16):
                while events:
                    _, mask, _, length = struct.unpack("iIII", events[:16])
                    if not mask & DIRECTORY:
                        names.append(events[16 : 16 + length].rstrip(b"\0").decode())
                    events = events[16 + length :]
    finally:
        os.close(watch)


OURS = {"report", "output", "answers.json"}  # files of a case that commands are asked to write
# Of such a file, those beside it while it is written; and nameless ones, which try whether a folder can be written to.
NOT_OUTSIDE = ("answers", ".answers", "#")


def sign(checkpoint: Path) -> str:
    """Give a checkpoint the hashes of its files as they are now, as whoever changed them could; says so."""
    manifest = json.loads((checkpoint / commit.MANIFEST).read_text())
    for name, entry in manifest["files"].items():
        if (file := checkpoint / name).is_file() and not file.is_symlink():
            entry |= {"bytes": file.stat().st_size, "sha256": sha256(file)}
    manifest["sha256"] = commit.digest(manifest["step"], manifest["files"])
    (checkpoint / commit.MANIFEST).write_text(json.dumps(manifest))
    return ", signed"


def run_case(seed: int, good: dict[str, Path], root: Path) -> tuple[str, str, str]:
    """(outcome, what was done to what, what was said) of one case."""
    rng = random.Random(seed)
    kind = rng.choice([*KINDS])
    case = root / f"case-{seed}"
    folder = Path(shutil.copytree(good[kind], case / "folder"))
    (case / "secret.txt").write_bytes(b"secret")
    shutil.copy(good["hf"] / "config.json", case / "config.4.0.0.json")
    ran = case / "RAN"
    mutations = hostile.Mutations(rng, case / "secret.txt", ran)
    if kind == "checkpoint":
        done = mutations.apply(folder / "checkpoint-1" / ENGINE) + sign(folder / "checkpoint-1")
    else:
        done = mutations.apply(folder)
    command = rng.choice(KINDS[kind])
    version = "chat_template" if "template" in done else rng.choice((None, "v1", "chat_template"))
    what = f"seed {seed}: {command} of {kind}, --version {version}: {done}"
    with opened_files(case) as opened:
        if seed % OF_COMMANDS == 0:
            outcome, said = by_command(case, command, command_line(command, kind, folder, good, version))
            what += " (by the command)"
        else:
            outcome, said = in_a_process(case, lambda: run_here(command, kind, folder, good, version))
    if kind == "projector" and "mm_projector.bin -> " in done:
        opened.clear()  # the user names the file itself, and so means what a link of that name leads to
    if ran.exists():
        outcome = "code ran"
    elif outside := {name for name in opened if name not in OURS and not name.startswith(NOT_OUTSIDE)}:
        outcome, said = "outside", f"{outside}: {said}"
    elif outcome == "refused" and (len(said) > 4000 or not said.strip()):
        outcome = "unclear"
    shutil.rmtree(case, ignore_errors=True)
    return outcome, what, said


@pytest.mark.long
def test_hostile_folders_are_accepted_or_refused_in_one_message(good, tmp_path, capsys):
    counts, bad, by_kind = collections.Counter(), [], collections.Counter()
    for seed in range(SEED, SEED + COUNT):
        outcome, what, said = run_case(seed, good, tmp_path)
        counts[outcome] += 1
        by_kind[f"{what.split(': ')[1].split(',')[0]}: {outcome}"] += 1
        if outcome not in ("accepted", "refused"):
            bad.append(f"{outcome}: {what}\n{said}")
        with capsys.disabled():
            print(f"\n{outcome:10} {what}\n           {said.strip()[-300:]}", end="", flush=True)
    with capsys.disabled():
        print("\n", *sorted(by_kind.items()), dict(counts), sep="\n")
    assert not bad, f"{dict(counts)}\n" + "\n\n".join(bad)
    assert counts["refused"] > 0.5 * COUNT and (COUNT < 100 or counts["accepted"] > 0)


@pytest.mark.long
def test_a_toy_of_every_kind_is_opened_by_every_command(good, tmp_path):
    """Without a mutation all is accepted: what the campaign refuses, it refuses for what was done."""
    for kind in ("hf", "llava", *if_there("lora", adapter=True), "lm"):
        for command in KINDS[kind][:1] if kind != "hf" else KINDS[kind]:
            case = tmp_path / f"{kind}-{command}"
            folder = Path(shutil.copytree(good[kind], case / "folder"))
            said = in_a_process(case, lambda c=command, k=kind, f=folder: run_here(c, k, f, good, "v1"))
            assert said == ("accepted", ""), (kind, command)
