"""Recognise out-of-memory errors, and describe how much of a device's memory is in use."""

import contextlib
import errno
import re

import torch

from llava_ds.runtime.ranks import local_ranks

GB = 10**9
NEARLY_FULL = 512 * 10**6  # bytes; if less is free, libraries can't allocate their workspaces
# Out-of-memory messages of CUDA, its libraries, NCCL, Triton and torch's CPU allocator.
SURE = re.compile(
    r"(CUDA|HIP|Cuda|NCCL|nccl|Triton)\b.*out of memory|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY"
    r"|(CUBLAS|CUBLASLT|CUDNN|CUSOLVER|CUSPARSE|CUFFT)_\w*ALLOC(ATION)?_FAILED"
    r"|Failed to (CUDA|Cuda|cuda) (host )?(malloc|calloc|alloc)"
    r"|DefaultCPUAllocator: (can't allocate|not enough) memory|Cannot allocate memory",  # the last: from the system
    re.DOTALL,
)
# Messages that may mean a full device, or another fault.
LIKELY = re.compile(
    r"CUBLAS_STATUS_NOT_INITIALIZED|CUDNN_STATUS_NOT_INITIALIZED|CUDNN_STATUS_INTERNAL_ERROR"
    r"|ncclUnhandledCudaError|unhandled cuda error"
)


def is_out_of_memory(error: BaseException | None, device: torch.device | None = None) -> bool:
    """Return True if an error, or the error that caused it, means that memory ran out.

    device: checked for free memory if the error is ambiguous; None: torch's current device.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):  # the system had no memory for a process or a mapping
        return error.errno == errno.ENOMEM
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    if SURE.search(text) or (LIKELY.search(text) and _is_nearly_full(device)):
        return True
    return is_out_of_memory(error.__cause__, device)


def _is_nearly_full(device: torch.device | None) -> bool:
    with contextlib.suppress(RuntimeError):  # the error may have left CUDA unusable
        if torch.cuda.is_available():
            return torch.cuda.mem_get_info(device)[0] < NEARLY_FULL
    return False


def in_use(device: torch.device) -> str:
    """Describe the use of the device's memory."""
    if device.type == "cuda":
        try:
            free, total = torch.cuda.mem_get_info(device)
        except RuntimeError:
            return "the device no longer responds"
        return (
            f"{torch.cuda.memory_allocated(device) / GB:.1f} GB in use, "
            f"{torch.cuda.memory_reserved(device) / GB:.1f} reserved, {free / GB:.1f} of {total / GB:.1f} free"
        )
    import psutil

    memory = psutil.virtual_memory()
    used = psutil.Process().memory_info().rss
    return f"{used / GB:.1f} GB in use, {memory.available / GB:.1f} of {memory.total / GB:.1f} free on this machine"


def first_line(error: BaseException) -> str:
    """Return the most telling line of an error: the one that mentions memory, else the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    named = [line for line in lines if SURE.search(line) or "out of memory" in line]
    return named[0] if named else lines[0]


def without_memory(error: BaseException) -> str:
    """Return a general message for a command that ran out of memory."""
    device = torch.device("cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu")
    return (
        f"out of memory on {device}\n  {in_use(device)}: {first_line(error)}\n  nvidia-smi and top show what else "
        "takes memory. To need less: more GPUs or a higher ZeRO stage, half precision, a smaller model or fewer and "
        "smaller images; python run/estimate.py --help"
    )


def free_memory(device: torch.device) -> float:
    """Return a GPU's free memory, or on a CPU each rank's share of the available memory, in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    import psutil

    return psutil.virtual_memory().available / local_ranks()
