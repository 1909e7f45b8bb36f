"""Build and load the library for make test-cuda: CUDA paths on fake tensors. Needs g++, no GPU, and to be loaded before
torch.

A conftest.py that imports both hooks from here loads it.
"""

import ctypes
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("fake_cuda.cpp")
CACHE = Path(sys.prefix) / "cache" / "fake_cuda"  # the environment's own, as the library is for its torch


def load() -> str | None:
    """Load the library, built if it is not yet. Returns the reason why not; None if it is there."""
    if "torch" in sys.modules:
        return "torch is imported already: run these tests by themselves, with make test-cuda"
    if shutil.which("g++") is None:
        return "there is no g++"
    digest = hashlib.sha256(SOURCE.read_bytes() + version("torch").encode()).hexdigest()[:16]
    library = CACHE / f"{digest}.so"
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # workers of pytest-xdist start together
        if not library.exists():
            build(library)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    return None


def build(library: Path) -> None:
    torch = Path(importlib.util.find_spec("torch").origin).parent  # without importing it
    unfinished = library.with_suffix(f".{os.getpid()}")
    command = ["g++", "-O1", "-fPIC", "-shared", "-std=c++20", f"-I{torch}/include", "-o", str(unfinished), str(SOURCE)]
    command += [f"-L{torch}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch}/lib"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise pytest.UsageError(
            f"{SOURCE.name} was not built (g++ ended with {done.returncode}): {' '.join(command)}\n"
            f"{done.stderr[-3000:]}"
        )
    unfinished.replace(library)


WHY_NOT: list[str | None] = []  # once it is known: the reason why the library is not there, None if it is


def pytest_configure(config: pytest.Config) -> None:
    """Load the library, but only where tests marked cuda are asked for: others run without it."""
    if not WHY_NOT:
        asked = re.search(r"(?<!not )\bcuda\b", config.getoption("markexpr") or "")
        WHY_NOT.append(load() if asked else "run with -m cuda")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if WHY_NOT[0]:
        pytest.skip(WHY_NOT[0])
