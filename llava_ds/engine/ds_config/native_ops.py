"""Find the tools with which DeepSpeed compiles its operators on first use, and the folder of compiled operators."""

import os
import shutil
import sys
from pathlib import Path


def missing_tools(device_type: str, op: str) -> list[str]:
    """Return the missing tools for compiling an operator; [] if it was installed with DeepSpeed.

    On a machine with a GPU, CPU operators also need CUDA's compiler.
    """
    from deepspeed.git_version_info import installed_ops
    from torch.utils import cpp_extension

    if installed_ops.get(op, False):
        return []
    tools = {"ninja": shutil.which("ninja"), "g++": compiler()}
    if device_type == "cuda":
        tools["nvcc"] = cpp_extension.CUDA_HOME or shutil.which("nvcc")
    missing = [tool for tool, found in reversed(tools.items()) if not found]
    if op == "async_io" and not missing and not _has_libaio():
        missing.append("libaio with its headers (libaio-dev, libaio-devel)")
    return missing


def compiler() -> str | None:
    """Return the C++ compiler that torch would use."""
    return shutil.which(os.environ.get("CXX", "c++"))


def _has_libaio() -> bool:
    """True if a small program can be linked with libaio."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return AsyncIOBuilder().is_compatible()


def compiling_notes(operators: list[str]) -> list[str]:
    """Return notes to print before DeepSpeed compiles operators, or waits for another process that does so."""
    from deepspeed.git_version_info import installed_ops

    notes = []
    for op in operators:
        folder = extensions_folder() / op
        if installed_ops.get(op, False) or ((folder / f"{op}.so").exists() and not (folder / "lock").exists()):
            continue
        notes.append(f"DeepSpeed compiles its {op} when it starts; this takes minutes, once")
        if (folder / "lock").exists():
            notes.append(
                f"{folder / 'lock'} exists: another process is compiling it, or was killed while doing so; in the "
                "second case delete that file, because torch waits for it forever"
            )
    return notes


def extensions_folder() -> Path:
    """Return torch's folder of compiled extensions for this Python and CUDA. Source: torch, utils/cpp_extension.py."""
    import torch
    from torch.utils.cpp_extension import get_default_build_root

    if folder := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(folder)
    kind = "cpu" if torch.version.cuda is None else "cu" + torch.version.cuda.replace(".", "")
    if torch.version.hip is not None:
        kind = "rocm" + torch.version.hip.replace(".", "")
    python = "py{}{}{}".format(*sys.version_info[:2], getattr(sys, "abiflags", ""))
    return Path(get_default_build_root()) / f"{python}_{kind}"
