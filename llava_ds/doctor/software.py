"""Checks of what is installed: packages that fit each other, the compiler, DeepSpeed's operators, attention."""

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

from llava_ds.doctor.requirements import OK, PROBLEM, WARNING, Finding, Requirements, output_of
from llava_ds.files.writing import can_be_made

INSTALL = "pip install -c constraints.txt -e ."
# Operators that are reported even if the JSON doesn't need them.
OPS = {
    "cpu_adam": "offload of the optimizer",
    "fused_adam": "an Adam in the DeepSpeed JSON",
    "async_io": "offload to NVMe",
}
LOCK_AGE_S = 30 * 60  # the longest build takes minutes


def check_python(required: Requirements) -> list[Finding]:
    from packaging.specifiers import SpecifierSet

    found = "{}.{}.{}".format(*sys.version_info)
    try:
        needed = importlib.metadata.metadata("llava_ds")["Requires-Python"]
    except importlib.metadata.PackageNotFoundError:
        needed = ""  # check_packages warns
    if not SpecifierSet(needed).contains(found):
        return [Finding(PROBLEM, f"{found}, and {needed} is needed", f"make the environment with Python {needed}")]
    return [Finding(OK, f"{found}, {sys.executable}")]


def check_packages(required: Requirements) -> list[Finding]:
    """Compare the installed versions with those that setup.py requires."""
    from packaging.requirements import Requirement

    try:
        requires = importlib.metadata.requires("llava_ds")
    except importlib.metadata.PackageNotFoundError:
        return [Finding(WARNING, "llava_ds is not installed: the versions that it needs are unknown", INSTALL)]
    present, findings = [], []
    for requirement in map(Requirement, requires):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue  # of an extra
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            findings.append(Finding(PROBLEM, f"{requirement.name} is not installed", INSTALL))
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            findings.append(Finding(PROBLEM, f"{requirement.name} is {version}, and {requirement} is needed", INSTALL))
        elif requirement.specifier:
            present.append(f"{requirement.name} {version}")
    return [Finding(OK, ", ".join(present)), *findings] if present else findings


def check_imports(required: Requirements) -> list[Finding]:
    """Import the packages: the right version may still have a compiled part that doesn't load."""
    names = ["torch", "deepspeed"]
    if importlib.util.find_spec("torchvision") is not None:
        names.insert(1, "torchvision")
    for name in [*names, "transformers"]:
        try:
            module = importlib.import_module(name)
            if name == "transformers":
                module.LlavaForConditionalGeneration  # noqa: B018 (transformers imports its modules when they are used)
        except Exception as error:  # whatever it is, training would fail with it too
            remedy = f"{INSTALL}; in an environment of its own, if that does not help"
            if name == "torchvision":
                remedy = "pip uninstall torchvision, which nothing here needs, or install the one of torch's own build"
            return [Finding(PROBLEM, f"import {name}: {_first_line(error)}", remedy)]
    return [Finding(OK, ", ".join([*names, "transformers"]))]


def check_configuration(required: Requirements) -> list[Finding]:
    """Check that run/train.py would take the DeepSpeed JSON on this machine, with default flags."""
    if required.ds_config is None:
        return [Finding(OK, "no DeepSpeed JSON was given: --deepspeed_config checks one")]
    if required.config_problems:
        return required.config_problems
    stage = required.config["zero_optimization"].get("stage", 0)
    return [Finding(OK, f"{required.ds_config} can be used: ZeRO-{stage}, on {required.device_type}")]


def check_compiler(required: Requirements) -> list[Finding]:
    """Check the tools by which DeepSpeed compiles its operators on their first use."""
    import torch
    from torch.utils.cpp_extension import CUDA_HOME

    to_build = [op for op in required.ops if not _is_built(op)]
    level = PROBLEM if to_build else WARNING
    why = f"{', '.join(to_build)} would be compiled" if to_build else "only offload and optimizers in the JSON compile"
    findings, found = [], []
    cxx = os.environ.get("CXX", "c++")
    for command, remedy in (
        (cxx, "apt-get install g++ (dnf install gcc-c++), or set CXX"),
        ("ninja", "pip install ninja, and have the environment's bin folder on PATH"),
    ):
        path = shutil.which(command)
        version = path and output_of(path, "--version")
        if version:
            found.append(version.splitlines()[0] if command == cxx else f"{command} {version}")
        else:
            findings.append(Finding(level, f"no {command}: {why}", remedy))
    if torch.version.cuda is not None:
        level = level if required.device_type == "cuda" else WARNING  # without a GPU nothing is compiled by it
        text = CUDA_HOME and output_of(f"{CUDA_HOME}/bin/nvcc", "-V")
        match = text and re.search(r"release (\d+)\.(\d+)", text)
        wanted = f"the CUDA toolkit {torch.version.cuda}"
        if not match:
            findings.append(Finding(level, f"no nvcc: {why}", f"install {wanted}, and set CUDA_HOME to it"))
        elif match[1] != torch.version.cuda.split(".")[0]:
            there = f"nvcc is CUDA {match[1]}.{match[2]}, torch was built with {torch.version.cuda}"
            findings.append(Finding(level, f"{there}: {why}", f"install {wanted}, and set CUDA_HOME to it"))
        else:
            found.append(f"nvcc {match[1]}.{match[2]}")
    return [Finding(OK, ", ".join(found)), *findings] if found else findings


def check_built_operators(required: Requirements) -> list[Finding]:
    """Check the folder of compiled operators, and locks in it on which torch would wait forever."""
    from llava_ds.engine.native_ops import extensions_folder

    folder = extensions_folder()
    if not can_be_made(str(folder)):
        level = PROBLEM if required.ops else WARNING
        return [Finding(level, f"{folder} can't be written to", "set TORCH_EXTENSIONS_DIR to a folder of your own")]
    findings = [Finding(OK, str(folder))]
    for lock in sorted(folder.glob("*/lock")):
        age_s = time.time() - lock.stat().st_mtime
        if age_s < LOCK_AGE_S:
            found = (
                f"{lock} is {age_s / 60:.0f} min old: {lock.parent.name} is being built, or the build was interrupted"
            )
            findings.append(Finding(WARNING, found, "if no other process builds it now, delete that file"))
        else:
            level = PROBLEM if lock.parent.name in required.ops else WARNING
            found = f"{lock} is left from a build that was interrupted: torch would wait for it forever"
            findings.append(Finding(level, found, "delete that file"))
    return findings


def check_operators(required: Requirements) -> list[Finding]:
    """Check that DeepSpeed could load or compile the operators that are needed, without compiling them."""
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder.all_ops import ALL_OPS
    from deepspeed.ops.op_builder.builder import probe_is_compatible

    findings = []
    for op in dict.fromkeys([*required.ops, *OPS]):
        wanted = f"{required.ops[op]} needs it" if op in required.ops else f"only {OPS[op]} needs it"
        with contextlib.redirect_stdout(io.StringIO()) as printed:  # DeepSpeed prints its reasons
            fits = op in ALL_OPS and probe_is_compatible(ALL_OPS[op], verbose=True)
        if installed_ops.get(op):
            findings.append(Finding(OK, f"{op} came with DeepSpeed ({wanted})"))
        elif fits:
            state = "is built" if _is_built(op) else "would be compiled on its first use, in minutes"
            findings.append(Finding(OK, f"{op} {state} ({wanted})"))
        elif op not in required.ops:
            findings.append(Finding(OK, f"{op} can't be compiled here ({wanted})"))
        else:
            reason = re.sub(r"\x1b\[\d+m|\[WARNING\]", "", printed.getvalue()).strip().splitlines()
            remedy = (
                "apt-get install libaio-dev (dnf install libaio-devel)" if op == "async_io" else "see the compiler's"
            )
            found = f"{op} can't be compiled here, and {wanted}" + (f": {reason[0].strip()}" if reason else "")
            findings.append(Finding(PROBLEM, found, f"{remedy}, or do without {required.ops[op]}"))
    return findings


def check_attention(required: Requirements) -> list[Finding]:
    """Check that GPUs have an attention for packed samples; on CPUs torch's own does."""
    import torch

    if importlib.util.find_spec("flash_attn") is not None:
        try:
            version = importlib.import_module("flash_attn").__version__
        except Exception as error:  # it is compiled: a build for another torch fails in its own ways
            level = PROBLEM if torch.cuda.is_available() else WARNING
            found = f"flash-attn is installed but can't be imported: {_first_line(error)}"
            return [Finding(level, found, "pip uninstall flash-attn, or rebuild it for this torch")]
        return [Finding(OK, f"flash-attn {version}")]
    if importlib.util.find_spec("torch.nn.attention.varlen") is not None:
        return [Finding(OK, "torch's own varlen attention; flash-attn is not installed, and not needed")]
    level = PROBLEM if torch.cuda.is_available() else WARNING
    return [Finding(level, "neither flash-attn nor torch.nn.attention.varlen", INSTALL)]


def _is_built(op: str) -> bool:
    """True if an earlier run has compiled the operator, or DeepSpeed was installed with it."""
    from deepspeed.git_version_info import installed_ops

    from llava_ds.engine.native_ops import extensions_folder

    return bool(installed_ops.get(op)) or any((extensions_folder() / op).glob("*.so"))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
