"""Switches for TF32: fp32 products with 10 bits of mantissa in cuBLAS (matrices) and cuDNN (convolutions).

By default torch allows TF32 in cuDNN but not in cuBLAS. In a tower's patch convolution, TF32 changes logits by more
than the export check tolerates, so --tf32 sets both. No effect on CPUs, GPUs before Ampere, and half precision.
"""

import contextlib
from collections.abc import Iterator

import torch


def allow_tf32(allowed: bool) -> None:
    """Allow or forbid TF32 in both libraries, for this process."""
    _switch(allowed, allowed)


def tf32_allowed() -> bool:
    """Return True if matrix products may use TF32."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


@contextlib.contextmanager
def exact_fp32() -> Iterator[None]:
    """Compute without TF32 within the block, even with --tf32."""
    before = tf32_allowed(), torch.backends.cudnn.conv.fp32_precision == "tf32"
    _switch(False, False)
    try:
        yield
    finally:
        _switch(*before)


def _switch(matmul: bool, cudnn: bool) -> None:
    # torch 2.9 to 2.13 have an old and a new switch per library. Setting the old one sets the new one too, except in
    # cuDNN. If only the new one is set, code that reads the old one (torch.compile) raises an error about mixed use.
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn
    torch.backends.cuda.matmul.fp32_precision = "tf32" if matmul else "ieee"
    for operation in (torch.backends.cudnn.conv, torch.backends.cudnn.rnn):
        operation.fp32_precision = "tf32" if cudnn else "ieee"
