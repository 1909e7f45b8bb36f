"""What DeepSpeed compiles its operators with, when they are first used."""

import os
import shutil


def missing_tools(device_type: str, op: str) -> list[str]:
    """What is not here of what DeepSpeed compiles an operator with; nothing where the operator came compiled.

    On a machine with a GPU it wants CUDA's compiler for the operators of the CPU, too.
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
    """The C++ compiler that torch would take."""
    return shutil.which(os.environ.get("CXX", "c++"))


def _has_libaio() -> bool:
    """Whether a small program that uses it can be linked."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return AsyncIOBuilder().is_compatible()
