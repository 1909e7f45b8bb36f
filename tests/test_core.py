"""Sizes of what a run loads and of what one has to read, which may only fall.

A number below its bar by more than SLACK fails, too: lower the bar, so that it can't rise again unseen.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from llava_ds.runtime.launchers import free_port
from llava_ds.tiny.scene_files import write_dataset

ROOT = Path(__file__).parents[1]
PACKAGES = ("llava_ds", "run")
SLACK = 0.01

BARS = {
    "imported files": 116,
    "imported lines": 19133,
    "files at the end": 185,
    "lines at the end": 27760,
    "feature words": 61,
    "kernel files": 39,
    "kernel lines": 5819,
    "all lines": 78029,
}

# What one reads to understand training.
KERNEL = ("run/train.py", "llava_ds/train", "llava_ds/engine", "llava_ds/model", "llava_ds/batch.py")
KERNEL += tuple(f"llava_ds/data/{name}.py" for name in ("collate", "loader", "step_plan"))
KERNEL += ("llava_ds/runtime/mesh.py",)
NO_KERNEL = tuple(
    f"llava_ds/{name}/" for name in ("engine/ds_config", "engine/shards", "model/open", "train/evaluating")
)

# Words that a core without features has no use for.
FEATURES = re.compile(
    r"sequence_parallel|ulysses|autotp|pipeline|expert|router|lora|dora|critic|reward|qwen|gemma|deepstack|"
    r"(?<![a-z])(dpo|ema|grpo|ppo|vllm)(?![a-z])",
    re.IGNORECASE,
)

IMPORTED = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("train", sys.argv[1] + "/run/train.py")
spec.loader.exec_module(importlib.util.module_from_spec(spec))
own = [module for name, module in sys.modules.items() if name.partition(".")[0] == "llava_ds"]
print(json.dumps(sorted({module.__file__ for module in own if getattr(module, "__file__", None)})))
"""


# The files of the package that are loaded when run/train.py, with the flags behind it, has ended.
AT_END = """
import atexit, json, runpy, sys
from pathlib import Path
noted = Path(sys.argv.pop(1))

def note():
    own = [module for name, module in sys.modules.items() if name.partition(".")[0] == "llava_ds"]
    noted.write_text(json.dumps(sorted({module.__file__ for module in own if getattr(module, "__file__", None)})))

atexit.register(note)
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# What a start from the cache has no use for.
ENCODING = ("encode", "ready_encode", "preflight", "prompt_check", "open_records", "word_tokenizer", "shards")


def lines_of(paths: list[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


@pytest.fixture(scope="module")
def imported() -> list[Path]:
    """The files of the package that are loaded when run/train.py is imported."""
    done = subprocess.run([sys.executable, "-c", IMPORTED, str(ROOT)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return [Path(path) for path in json.loads(done.stdout.splitlines()[-1])]


def kernel() -> list[Path]:
    files = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    names = {path: path.relative_to(ROOT).as_posix() for path in files}
    return [
        path
        for path, name in names.items()
        if any(name == part or name.startswith(f"{part}/") for part in KERNEL) and not name.startswith(NO_KERNEL)
    ]


def found(imported: list[Path]) -> dict[str, int]:
    everything = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    words = [
        line for path in imported for line in path.read_text(encoding="utf-8").splitlines() if FEATURES.search(line)
    ]
    return {
        "imported files": len(imported),
        "imported lines": lines_of(imported),
        "feature words": len(words),
        "kernel files": len(kernel()),
        "kernel lines": lines_of(kernel()),
        "all lines": lines_of(everything),
    }


def refuse_other_sizes(sizes: dict[str, int]) -> None:
    grown = [f"{name}: {size}, at most {BARS[name]}" for name, size in sizes.items() if size > BARS[name]]
    shrunk = [f"{name}: lower its bar to {size}" for name, size in sizes.items() if size < BARS[name] * (1 - SLACK)]
    assert not grown + shrunk, "\n".join(grown + shrunk)


def test_what_a_run_loads_and_what_one_reads_only_shrinks(imported):
    refuse_other_sizes(found(imported))


@pytest.mark.long
def test_what_the_default_job_has_loaded_at_its_end_only_shrinks(tmp_path):
    """From a warm cache, on one rank: with export and report, and without the encoding."""
    flags = ["--cache_dir", str(tmp_path / "cache")]
    write_dataset(tmp_path / "cache" / "scenes")
    for file in (tmp_path / "cache" / "scenes").glob("*.json"):
        os.utime(file, (0, 0))  # a start does not trust a note on a file that was just written
    environment = {**os.environ, "MASTER_PORT": str(free_port())}

    def run(*words: object) -> None:
        command = [sys.executable, *map(str, words), *flags]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
        assert done.returncode == 0, done.stderr

    run(ROOT / "run" / "encode.py")
    noted = tmp_path / "loaded.json"
    job = ("--deepspeed_config", ROOT / "ds_configs" / "zero3.json", "--max_steps", 2, "--output_dir", tmp_path / "out")
    run("-c", AT_END, noted, ROOT / "run" / "train.py", *job)
    loaded = [Path(path) for path in json.loads(noted.read_text())]
    names = [path.relative_to(ROOT / "llava_ds" / "data").as_posix() for path in loaded if path.parts[-2] == "data"]
    assert [name for name in names if name.removesuffix(".py") in ENCODING] == []
    assert not any("sources" in path.parts for path in loaded)
    refuse_other_sizes({"files at the end": len(loaded), "lines at the end": lines_of(loaded)})
