"""Sizes of what a run loads and of what one has to read, which may only fall.

A number below its bar by more than SLACK fails, too: lower the bar, so that it can't rise again unseen.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("llava_ds", "run")
SLACK = 0.01

BARS = {
    "imported files": 322,
    "imported lines": 54560,
    "feature words": 1690,
    "kernel files": 105,
    "kernel lines": 15812,
    "all lines": 68121,
}

# What one reads to understand training.
KERNEL = ("run/train.py", "llava_ds/train", "llava_ds/engine", "llava_ds/model", "llava_ds/batch.py")
KERNEL += tuple(f"llava_ds/data/{name}.py" for name in ("collate", "loader", "step_plan"))
KERNEL += ("llava_ds/runtime/mesh.py",)
NO_KERNEL = ("llava_ds/engine/ds_config/", "llava_ds/model/open/")

# Words that a core without features has no use for.
FEATURES = re.compile(
    r"sequence_parallel|ulysses|autotp|pipeline|expert|router|lora|dora|dpo|grpo|ppo|critic|reward|(?<![a-z])ema(?![a-z])|"
    r"qwen|gemma|deepstack|vllm",
    re.IGNORECASE,
)

IMPORTED = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("train", sys.argv[1] + "/run/train.py")
spec.loader.exec_module(importlib.util.module_from_spec(spec))
own = [module for name, module in sys.modules.items() if name.partition(".")[0] == "llava_ds"]
print(json.dumps(sorted({module.__file__ for module in own if getattr(module, "__file__", None)})))
"""


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


def test_what_a_run_loads_and_what_one_reads_only_shrinks(imported):
    sizes = found(imported)
    grown = [f"{name}: {size}, at most {BARS[name]}" for name, size in sizes.items() if size > BARS[name]]
    shrunk = [f"{name}: lower its bar to {size}" for name, size in sizes.items() if size < BARS[name] * (1 - SLACK)]
    assert not grown + shrunk, "\n".join(grown + shrunk)
