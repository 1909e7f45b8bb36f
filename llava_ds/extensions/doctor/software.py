"""Check the installed software: package versions, compiler, DeepSpeed's operators, and attention kernels."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import io
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator

from llava_ds.extensions.doctor.requirements import OK, PROBLEM, WARNING, Finding, Requirements, output_of
from llava_ds.files.writing import can_be_made

INSTALL = "pip install -c constraints.txt -e ."
# Operators to report even if the JSON doesn't need them.
OPS = {
    "cpu_adam": "offload of the optimizer",
    "fused_adam": "an Adam in the DeepSpeed JSON",
    "async_io": "offload to NVMe",
}
LOCK_AGE_S = 30 * 60  # the longest build takes minutes


def check_python(required: Requirements) -> Iterator[Finding]:
    from packaging.specifiers import SpecifierSet

    found, needed = "{}.{}.{}".format(*sys.version_info), ""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # check_packages warns
        needed = importlib.metadata.metadata("llava_ds")["Requires-Python"]
    if SpecifierSet(needed).contains(found):
        yield Finding(OK, f"{found}, {sys.executable}")
    else:
        yield Finding(PROBLEM, f"found {found}, but {needed} is needed", f"create the environment with Python {needed}")


def check_packages(required: Requirements) -> Iterator[Finding]:
    """Compare installed versions with the requirements in setup.py."""
    from packaging.requirements import Requirement

    try:
        requires = importlib.metadata.requires("llava_ds")
    except importlib.metadata.PackageNotFoundError:
        yield Finding(WARNING, "llava_ds is not installed: its requirements are unknown", INSTALL)
        return
    present = []
    for requirement in map(Requirement, requires):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue  # belongs to an extra
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(PROBLEM, f"{requirement.name} is not installed", INSTALL)
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            yield Finding(PROBLEM, f"{requirement.name} is {version}, but {requirement} is needed", INSTALL)
        elif requirement.specifier:
            present.append(f"{requirement.name} {version}")
    if present:
        yield Finding(OK, ", ".join(present))


def check_imports(required: Requirements) -> Iterator[Finding]:
    """Import the packages, because even in the right version a compiled part may fail to load."""
    names = ["torch", *["torchvision"] * (importlib.util.find_spec("torchvision") is not None), "deepspeed"]
    for name in [*names, "transformers"]:
        try:
            module = importlib.import_module(name)
            if name == "transformers":
                module.LlavaForConditionalGeneration  # noqa: B018 (transformers imports its modules when they are used)
        except Exception as error:  # any exception would also stop training
            remedy = f"{INSTALL}; if that does not help, in a new environment"
            if name == "torchvision":
                remedy = "pip uninstall torchvision (not needed here), or install the one for this torch build"
            yield Finding(PROBLEM, f"import {name}: {_first_line(error)}", remedy)
            return
    yield Finding(OK, ", ".join([*names, "transformers"]))


def check_configuration(required: Requirements) -> Iterator[Finding]:
    """Check that run/train.py accepts the DeepSpeed JSON on this machine, with default flags."""
    if required.ds_config is None:
        yield Finding(OK, "no DeepSpeed JSON was given: --deepspeed_config checks one")
    elif required.config_problems:
        yield from required.config_problems
    else:
        stage = required.config["zero_optimization"].get("stage", 0)
        yield Finding(OK, f"{required.ds_config} can be used: ZeRO-{stage}, on {required.device_type}")


def check_compiler(required: Requirements) -> Iterator[Finding]:
    """Check the tools with which DeepSpeed compiles its operators on first use."""
    import torch
    from torch.utils.cpp_extension import CUDA_HOME

    to_build = [op for op in required.ops if not _is_built(op)]
    level = PROBLEM if to_build else WARNING
    why = f"{', '.join(to_build)} would be compiled" if to_build else "only offload and optimizers in the JSON compile"
    cxx, found = os.environ.get("CXX", "c++"), []
    for command, remedy in (
        (cxx, "apt-get install g++ (dnf install gcc-c++), or set CXX"),
        ("ninja", "pip install ninja, and have the environment's bin folder on PATH"),
    ):
        path = shutil.which(command)
        if version := path and output_of(path, "--version"):
            found.append(version.splitlines()[0] if command == cxx else f"{command} {version}")
        else:
            yield Finding(level, f"no {command}: {why}", remedy)
    if (wanted := torch.version.cuda) is not None:
        level = level if required.device_type == "cuda" else WARNING  # without a GPU, nvcc compiles nothing
        match = re.search(r"release (\d+)\.\d+", (CUDA_HOME and output_of(f"{CUDA_HOME}/bin/nvcc", "-V")) or "")
        nvcc = match and match[0].removeprefix("release ")
        if match and match[1] == wanted.split(".")[0]:
            found.append(f"nvcc {nvcc}")
        else:
            there = f"nvcc is CUDA {nvcc}, torch was built with {wanted}" if match else "no nvcc"
            yield Finding(level, f"{there}: {why}", f"install the CUDA toolkit {wanted}, and set CUDA_HOME to it")
    if found:
        yield Finding(OK, ", ".join(found))


def check_built_operators(required: Requirements) -> Iterator[Finding]:
    """Check the folder of compiled operators and the locks in it: torch waits forever for stale ones."""
    from llava_ds.engine.ds_config.native_ops import extensions_folder

    folder = extensions_folder()
    if not can_be_made(str(folder)):
        level = PROBLEM if required.ops else WARNING
        yield Finding(level, f"{folder} can't be written to", "set TORCH_EXTENSIONS_DIR to a writable folder")
        return
    yield Finding(OK, str(folder))
    for lock in sorted(folder.glob("*/lock")):
        age_s, op = time.time() - lock.stat().st_mtime, lock.parent.name
        if age_s < LOCK_AGE_S:
            found = f"{lock} is {age_s / 60:.0f} min old: {op} is being built, or the build was interrupted"
            yield Finding(WARNING, found, "if no other process builds it now, delete that file")
        else:
            found = f"{lock} is left from a build that was interrupted: torch would wait for it forever"
            yield Finding(PROBLEM if op in required.ops else WARNING, found, "delete that file")


def check_operators(required: Requirements) -> Iterator[Finding]:
    """Check that the needed DeepSpeed operators can be loaded or compiled, without compiling them."""
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder.all_ops import ALL_OPS
    from deepspeed.ops.op_builder.builder import probe_is_compatible

    for op in dict.fromkeys([*required.ops, *OPS]):
        wanted = f"{required.ops[op]} needs it" if op in required.ops else f"only {OPS[op]} needs it"
        with contextlib.redirect_stdout(io.StringIO()) as printed:  # DeepSpeed prints its reasons
            fits = op in ALL_OPS and probe_is_compatible(ALL_OPS[op], verbose=True)
        if installed_ops.get(op):
            yield Finding(OK, f"{op} came with DeepSpeed ({wanted})")
        elif fits:
            state = "is built" if _is_built(op) else "would be compiled on its first use, in minutes"
            yield Finding(OK, f"{op} {state} ({wanted})")
        elif op not in required.ops:
            yield Finding(OK, f"{op} can't be compiled here ({wanted})")
        else:
            reason = re.sub(r"\x1b\[\d+m|\[WARNING\]", "", printed.getvalue()).strip().splitlines()
            found = f"{op} can't be compiled here, but {wanted}" + (f": {reason[0].strip()}" if reason else "")
            libaio = "apt-get install libaio-dev (dnf install libaio-devel)"
            remedy = libaio if op == "async_io" else "see the compiler check"
            yield Finding(PROBLEM, found, f"{remedy}, or do without {required.ops[op]}")


def check_attention(required: Requirements) -> Iterator[Finding]:
    """Check that a kernel for attention within packed samples is installed, required on GPUs only."""
    import torch

    level = PROBLEM if torch.cuda.is_available() else WARNING
    if importlib.util.find_spec("flash_attn") is not None:
        try:
            yield Finding(OK, f"flash-attn {importlib.import_module('flash_attn').__version__}")
        except Exception as error:  # a build for another torch can raise anything
            found = f"flash-attn is installed but can't be imported: {_first_line(error)}"
            yield Finding(level, found, "pip uninstall flash-attn, or rebuild it for this torch")
    elif importlib.util.find_spec("torch.nn.attention.varlen") is not None:
        yield Finding(OK, "torch's own varlen attention; flash-attn is not installed, and not needed")
    else:
        yield Finding(level, "neither flash-attn nor torch.nn.attention.varlen", INSTALL)


def _is_built(op: str) -> bool:
    """True if an earlier run compiled the operator, or DeepSpeed's installation includes it."""
    from deepspeed.git_version_info import installed_ops

    from llava_ds.engine.ds_config.native_ops import extensions_folder

    return bool(installed_ops.get(op)) or any((extensions_folder() / op).glob("*.so"))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
