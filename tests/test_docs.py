"""Flags, files, names, links and messages in the documentation exist in the code."""

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import measure
import pytest
from launching import ROOT

from llava_ds.checkpoint import base_weights as sources
from llava_ds.checkpoint.resume import RUN_FILES
from llava_ds.config.arguments import every_section
from llava_ds.config.bounds import MOST, bounds_of
from llava_ds.config.other_names import ELSEWHERE, by_name
from llava_ds.config.other_trainers import WITHOUT_EFFECT
from llava_ds.config.parsing import parse_arguments
from llava_ds.constants import ConfigError
from llava_ds.extensions.active import flags_class
from llava_ds.extensions.table import EXTENSIONS
from llava_ds.runtime import output_lock
from llava_ds.runtime.launchers import free_port
from llava_ds.tracking.mending import OTHERS as WRITTEN_ANEW

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "ds_configs" / "README.md"]
SCRIPTS = [ROOT / "Makefile", ROOT / "run" / "slurm.sh", ROOT / "run" / "hostfile.example"]
SCRIPTS += sorted((ROOT / "llava_ds" / "extensions").glob("*/targets.mk"))
FLAG = re.compile(r"(?<![\w`.-])`?(--[a-zA-Z][\w-]*)")
FENCED = re.compile(r"^```bash\n(.*?)^```", re.S | re.M)

# Flags of other programs, as far as the pages name them. deepspeed's and torchrun's are looked up in their own source.
SLURM = {
    "--cpus-per-task", "--gpus-per-node", "--gpus-per-task", "--job-name", "--kill-on-bad-exit", "--mem", "--nodes",
    "--ntasks-per-node", "--open-mode", "--output", "--requeue", "--signal", "--time",
}  # fmt: skip
OTHERS = {
    "sbatch": SLURM,
    "srun": SLURM,
    "hf": {"--local-dir"},
    "pytest": {"--dist", "--durations", "--no-loadscope-reorder"},
    "ruff": {"--check"},
    "sglang": {"--model-path"},
    "LLaVA's loader": {"--model-path", "--model-base"},
    "docker": {"--shm-size"},
    "pip": {"--target", "--no-deps", "--no-compile"},
    "tensorboard": {"--logdir"},
    "llama-server": {"--model", "--mmproj"},
    "ollama": {"--file"},
    "venv": {"--clear"},
    "accelerate": {"--num_processes"},
    "lmms_eval": {
        "--batch_size",
        "--include_path",
        "--log_samples",
        "--model",
        "--model_args",
        "--output_path",
        "--tasks",
    },
    "any": {"--name", "--no-print-directory"},  # "--name value"; make
}


@cache
def flags_script():
    spec = importlib.util.spec_from_file_location("flags", ROOT / "run" / "dev" / "flags.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def parsers():
    return flags_script().all_parsers()


@pytest.fixture(scope="module")
def known(parsers) -> dict[str, set[str]]:
    """Flags by what stands before them in a command."""
    own = {
        name: {each for action in parser._actions for each in action.option_strings} for name, parser in parsers.items()
    }
    for name in {"encode.py", "estimate.py", "inspect_data.py"} & own.keys():  # which hand on what they don't know
        own[name] |= own["train.py"]
    own["rl.py"] = own["train.py"]
    packages = Path(importlib.util.find_spec("torch").origin).parents[1]
    sources = {
        "deepspeed": packages / "deepspeed" / "launcher" / "runner.py",
        "torchrun": packages / "torch" / "distributed" / "run.py",
        **{
            name: ROOT / "run" / "dev" / name
            for name in ("room_graph.py", "compare_trl.py", "serve_check.py", "write_pairs.py", "write_questions.py")
            if (ROOT / "run" / "dev" / name).exists()
        },
    }
    for name, module in measure.MEASUREMENTS.items():
        flags = measure.flags_of(getattr(importlib.import_module(f"measured.{module}"), name))
        own.setdefault("measure.py", set()).update(flags._option_string_actions)
    theirs = {name: set(re.findall(r"[\"'](--[\w-]+)[\"']", path.read_text())) for name, path in sources.items()}
    # LLaVA's script, whose flags are ours, and ours under Slurm
    return {**own, **theirs, "train_mem.py": own["train.py"], "slurm.sh": own["train.py"], **OTHERS}


def test_the_page_of_flags_is_what_the_code_says(parsers):
    written = (ROOT / "docs" / "flags.md").read_text()
    assert written == flags_script().page(parsers), "docs/flags.md is out of date: make docs"


def test_every_flag_is_documented(known):
    page = (ROOT / "docs" / "flags.md").read_text()
    for path in (ROOT / "run").glob("*.py"):
        for flag in known.get(path.name, set()) - {"-h", "--help"}:
            with_underscores = f"--{flag.removeprefix('--').replace('-', '_')}"  # HfArgumentParser knows both
            assert f"`{flag}`" in page or f"`{with_underscores}`" in page, f"{flag} of run/{path.name}"


def code_of(path: Path) -> list[str]:
    """Commands of a page: indented and fenced lines and spans, those that go on joined; of a script every line."""
    text = path.read_text().replace("\\\n", " ")
    if path in SCRIPTS:
        return text.splitlines()
    fenced = [line for block in FENCED.findall(text) for line in block.splitlines()]
    text = FENCED.sub("", text)
    indented = [line for line in text.splitlines() if line.startswith("    ")]
    return fenced + indented + re.findall(r"`([^`]+)`", text)


@pytest.mark.parametrize("path", [*PAGES, *SCRIPTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_every_flag_in_a_page_exists(path, known):
    every = set().union(*known.values())
    unknown = {flag for flag in FLAG.findall(path.read_text()) if flag not in every}
    assert not unknown
    programs = "|".join(map(re.escape, sorted(known, key=len, reverse=True)))
    words = re.compile(rf"(?<![\w.-])(?<!--engine )(?:[\w./$()-]+/|#)?({programs})(?=[ ]|$)|{FLAG.pattern}")
    for line in code_of(path):
        program = None
        for found in words.finditer(line.replace("#SBATCH", "sbatch")):
            program = found[1] or program
            assert found[1] or program is None or found[2] in known[program], f"{program} has no {found[2]}: {line}"


def test_ranges_are_those_that_are_checked(tmp_path):
    """A value just outside of what the help says is refused by name."""
    given = ["--deepspeed_config", str(ROOT / "ds_configs" / "zero2.json"), "--output_dir", str(tmp_path)]
    options = {option.dest: option for option in flags_script().build_parser()._actions}
    bounds = {name: each for section in every_section() for name, each in bounds_of(section).items() if each.range}
    for name, each in bounds.items():
        assert options[name].help.endswith(each.range)
        unit = 1 if each.most > 1 else 0.1
        outside = [each.least if each.above else each.least - unit]
        if each.most < MOST:
            outside.append(each.most if each.below else each.most + unit)
        for value in outside:
            with pytest.raises(ConfigError, match=f"--{name} "):
                parse_arguments([*given, f"--{name}={value}"])
    assert len(bounds) > 20


def slug(heading: str) -> str:
    """The anchor of a page's heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_links_lead_somewhere():
    for path in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", path.read_text())):
            if target.startswith("http"):
                continue
            name, _, anchor = target.partition("#")
            page = path.parent / name if name else path
            assert page.exists(), f"{path.name}: {target}"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
                assert anchor in map(slug, headings), f"{path.name}: {target}"


def test_the_index_has_every_page():
    index = (ROOT / "docs" / "README.md").read_text()
    for path in sorted((ROOT / "docs").glob("*.md")):
        assert path.name == "README.md" or f"]({path.name})" in index, path.name


def test_the_graph_of_rooms_is_up_to_date():
    spec = importlib.util.spec_from_file_location("room_graph", ROOT / "run" / "dev" / "room_graph.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.mermaid() in (ROOT / "docs" / "architecture.md").read_text(), "out of date: make docs"


def test_files_that_pages_name_exist():
    """Paths of this repository, in code spans; with * or … they name none."""
    for path in PAGES:
        for name in re.findall(r"`((?:llava_ds|run|tests|ds_configs|docs)/[\w./-]+)`", path.read_text()):
            assert (ROOT / name).exists(), f"{path.name}: {name}"


def test_names_that_the_architecture_page_gives_are_defined_in_those_files():
    """`name` (`llava_ds/file.py`)"""
    pairs = re.findall(r"`([\w.]+)`\s+\(`(llava_ds/[\w/]+\.py)`\)", (ROOT / "docs" / "architecture.md").read_text())
    assert len(pairs) > 40
    for name, file in pairs:
        defined = {
            getattr(node, "name", None) or (getattr(node, "target", None) and getattr(node.target, "id", None))
            for node in ast.walk(ast.parse((ROOT / file).read_text()))
        }
        assert set(name.split(".")) <= defined, f"{name} in {file}"


@cache
def messages() -> list[str]:
    """Every text in the package's code, with a mark for what is filled in."""
    texts = []
    for path in sorted([*(ROOT / "llava_ds").rglob("*.py"), *(ROOT / "run").glob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(str(v.value) if isinstance(v, ast.Constant) else "\0" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


def test_the_page_of_run_files_names_every_file_that_a_run_leaves():
    table = (ROOT / "docs" / "run_files.md").read_text()
    names = {*RUN_FILES, *WRITTEN_ANEW, sources.HASHES_FILE, output_lock.NAME} - {
        "evaluation*.jsonl"
    }  # beside the .json
    assert sorted(name for name in names if f"`{name}`" not in table) == []


def test_quoted_messages_are_those_that_the_code_has():
    quoted = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.M)
    assert len(quoted) > 20
    for message in quoted:
        pieces = [piece for piece in message.split("…") if piece.strip()]
        assert any(holds_in_order(text, pieces) for text in messages()), message


def holds_in_order(text: str, pieces: list[str]) -> bool:
    at = 0
    for piece in pieces:
        found = text.find(piece, at)
        if found < 0:
            return False
        at = found + len(piece)
    return True


@pytest.mark.long
def test_the_commands_of_ones_own_data_do_what_the_page_says(tmp_path):
    """Every command of docs/own_data.md, one after the other, with the tiny model."""
    for name in ("llava_ds", "run", "ds_configs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    text = (ROOT / "docs" / "own_data.md").read_text()
    blocks = FENCED.findall(text)
    assert len(blocks) > 6
    own_port = f'deepspeed() {{ command deepspeed --master_port {free_port()} "$@"; }}'  # for other tests run beside it
    lines = ["set -euo pipefail", "export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1", own_port, *blocks]
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": "."}
    done = subprocess.run(["bash", "-c", "\n".join(lines)], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "output" / "mine" / "model.safetensors").is_file()
    for run in ("mine", "forty"):
        scores = json.loads((tmp_path / "output" / run / "evaluation.json").read_text())["scores"]
        seen, blank = (right["overall"][0] / right["overall"][1] for right in scores.values())
        assert seen > blank + 0.1, (run, scores)


def test_what_other_trainers_call_a_flag_is_answered_with_ours(tmp_path):
    given = ["--deepspeed_config", str(ROOT / "ds_configs" / "zero2.json"), "--output_dir", str(tmp_path)]
    known = {option for action in flags_script().build_parser()._actions for option in action.option_strings}
    of_extensions = [by_name(flags_class(name).other_names) for name in EXTENSIONS]
    for theirs, ours in [pair for names in (ELSEWHERE, *of_extensions) for pair in names.items()]:
        assert theirs not in known and (not ours.startswith("--") or ours.split()[0] in known)
        with pytest.raises(ConfigError, match=f"{theirs}.*{re.escape(ours)}"):
            parse_arguments([*given, theirs, "1"])
    with pytest.raises(ConfigError, match="--do_train"):
        parse_arguments([*given, "--do_train", "True"])


def test_the_page_for_those_who_come_from_llava_names_what_is_not_known(tmp_path):
    page = (ROOT / "docs" / "from_llava.md").read_text()
    row = next(line for line in page.splitlines() if "`mpt_attn_impl`" in line)  # of what this trainer lacks
    known = {action.dest for action in flags_script().build_parser()._actions} | set(WITHOUT_EFFECT)
    assert not known & set(re.findall(r"`(\w+)`", row.split("|")[1]))
    same = [line.split("|")[1] for line in page.splitlines() if re.search(r"\| the same( names)? \|$", line)]
    names = set(re.findall(r"`-{0,2}(\w+)`", " ".join(same)))
    assert len(names) > 25 and names <= known
