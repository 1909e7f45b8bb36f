"""TF32: fp32 products that CUDA may compute with 10 bits of mantissa, in cuBLAS (matrices) and cuDNN (convolutions).

By default torch allows it for cuDNN and not for cuBLAS. In a tower's patch convolution it moves logits by more than
export's comparison allows, so both follow --tf32. No effect on CPUs, GPUs before Ampere, and half precision.
"""

import contextlib
from collections.abc import Iterator

import torch


def allow_tf32(allowed: bool) -> None:
    """Set the switches of both libraries for this process."""
    _switch(allowed, allowed)


def tf32_allowed() -> bool:
    """Return True if matrix products may use TF32."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


@contextlib.contextmanager
def exact_fp32() -> Iterator[None]:
    """Compute without TF32 within the block, whatever --tf32 says."""
    before = tf32_allowed(), torch.backends.cudnn.conv.fp32_precision == "tf32"
    _switch(False, False)
    try:
        yield
    finally:
        _switch(*before)


def _switch(matmul: bool, cudnn: bool) -> None:
    # torch 2.9 to 2.13 have two names for each switch. The older one sets both, but leaves cuDNN's newer one at "none";
    # if only the newer one is set, code that reads the older one (torch.compile) raises an error about a mixture.
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn
    torch.backends.cuda.matmul.fp32_precision = "tf32" if matmul else "ieee"
    for operation in (torch.backends.cudnn.conv, torch.backends.cudnn.rnn):
        operation.fp32_precision = "tf32" if cudnn else "ieee"
