"""Every library has its own words for a device without room; each ends a command with one message."""

import pytest
import torch

from llava_ds.runtime import command, device_memory
from llava_ds.runtime.device_memory import first_line, in_use, is_out_of_memory

FULL = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB"),
    torch.AcceleratorError(
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call"
    ),
    torch.distributed.DistBackendError(
        "NCCL error in: ProcessGroupNCCL.cpp:3699, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL "
        "version 2.27.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
        "Cuda failure 2 'out of memory'"
    ),
    torch.distributed.DistBackendError(
        "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error, NCCL version 2.21.5\nncclUnhandledCudaError: Call to "
        "CUDA function failed.\nLast error:\nFailed to CUDA calloc 6291456 bytes"
    ),
    RuntimeError("NCCL WARN Failed to CUDA malloc 4194304 bytes"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN Frontend error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
    MemoryError(),
    OSError(12, "Cannot allocate memory"),  # of a fork
    RuntimeError("unable to mmap 4194304 bytes from file <model.safetensors>: Cannot allocate memory (12)"),
]
ELSE = [
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
    RuntimeError("DataLoader worker (pid 5) is killed by signal: Bus error. Workers may be out of shared memory."),
    torch.distributed.DistBackendError("NCCL error: remote process exited or there was a network error"),
    ValueError("CUDA out of memory"),
    OSError(28, "No space left on device"),
    None,
]
MAYBE = [
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    torch.distributed.DistBackendError("NCCL error in: a.cpp:1, unhandled cuda error (run with NCCL_DEBUG=INFO)"),
]


@pytest.mark.parametrize("error", FULL, ids=lambda error: str(error)[:40])
def test_a_full_device_is_recognized_in_every_librarys_words(error):
    assert is_out_of_memory(error)
    wrapped = RuntimeError("the layer failed")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped) and first_line(error)


@pytest.mark.parametrize("error", ELSE, ids=lambda error: str(error)[:40])
def test_other_errors_are_none(error):
    assert not is_out_of_memory(error)


@pytest.mark.parametrize("free", [100 * 10**6, 20 * 10**9])
@pytest.mark.parametrize("error", MAYBE, ids=lambda error: str(error)[:40])
def test_what_may_mean_something_else_counts_where_there_is_no_room(monkeypatch, error, free):
    assert not is_out_of_memory(error)  # there is no GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 * 10**9))
    assert is_out_of_memory(error) == (free < device_memory.NEARLY_FULL)


def test_the_line_that_names_memory_is_shown():
    assert first_line(FULL[2]) == "Cuda failure 2 'out of memory'"
    assert first_line(FULL[3]) == "Failed to CUDA calloc 6291456 bytes"
    assert first_line(FULL[1]) == "CUDA error: out of memory"


def test_a_device_that_can_not_be_asked_any_more_hides_no_message(monkeypatch):
    def fails(device):
        raise torch.AcceleratorError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "mem_get_info", fails)
    assert in_use(torch.device("cuda")) == "the device no longer responds"


def test_a_command_ends_with_one_message(monkeypatch):
    def main():
        raise FULL[5]

    def leave(error, program):
        raise SystemExit(f"{program}: {type(error).__name__}: {error}")

    monkeypatch.setattr(command, "exit_for_bad_input", leave)
    monkeypatch.setattr(command, "_handle_interrupts", lambda interrupt: None)
    with pytest.raises(SystemExit, match=r"(?s)run/evaluate.py: ConfigError: out of memory on cpu\n.*ALLOC_FAILED"):
        command.exit_with(main, "run/evaluate.py")
