"""TF32: fp32 products that CUDA may compute with 10 bits of mantissa, in cuBLAS (matrices) and cuDNN (convolutions).

By itself torch allows it to cuDNN and not to cuBLAS. In the patch convolution of a tower it moves logits by more than
export's comparison allows, so both follow --tf32. It has no effect on CPUs, older GPUs than Ampere and half precision.
"""

import contextlib
from collections.abc import Iterator

import torch


def allow_tf32(allowed: bool) -> None:
    """Set the switches of both libraries for this process."""
    _switch(allowed, allowed)


def tf32_allowed() -> bool:
    """True if matrix products may use it."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


@contextlib.contextmanager
def exact_fp32() -> Iterator[None]:
    """Compute without TF32, whatever --tf32 says."""
    before = tf32_allowed(), torch.backends.cudnn.conv.fp32_precision == "tf32"
    _switch(False, False)
    try:
        yield
    finally:
        _switch(*before)


def _switch(matmul: bool, cudnn: bool) -> None:
    # torch 2.9 to 2.13 know each switch by two names. The older one sets both, but leaves cuDNN's new one at "none";
    # with the newer one alone, code that asks by the older, as torch.compile does, gets an error about a mixture.
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn
    torch.backends.cuda.matmul.fp32_precision = "tf32" if matmul else "ieee"
    for operation in (torch.backends.cudnn.conv, torch.backends.cudnn.rnn):
        operation.fp32_precision = "tf32" if cudnn else "ieee"
