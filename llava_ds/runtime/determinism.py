"""--deterministic: GPU kernels that return the same bits for the same inputs.

Without it, the backward passes of attention and of gathers add in the order in which thread blocks finish.
"""

import os
import re
from collections.abc import MutableMapping

import torch

from llava_ds.constants import ConfigError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # read by cuBLAS when it creates its workspace, at the first matrix product
WORKSPACES = (":4096:8", ":16:8")  # the settings with reproducible results (cuBLAS documentation, 2.1.4)


def use_deterministic_kernels(environment: MutableMapping[str, str] = os.environ) -> None:
    """Make torch, cuBLAS and cuDNN deterministic; call it before CUDA's first use.

    SDPA and torch's varlen attention then use their deterministic backward pass. An operation without a deterministic
    implementation raises RuntimeError. flash-attn has its own switch (model/attention.py).
    Raises ConfigError if CUBLAS_WORKSPACE_CONFIG has a value without reproducible results.
    """
    if environment.setdefault(WORKSPACE, WORKSPACES[0]) not in WORKSPACES:
        raise ConfigError(
            f"--deterministic needs {WORKSPACE} to be {' or '.join(WORKSPACES)}, but it is {environment[WORKSPACE]}: "
            "unset it"
        )
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # nothing here reads uninitialized memory
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True


def about_nondeterministic(error: BaseException) -> str | None:
    """Return the message for an operation that --deterministic refuses; None for other errors."""
    found = re.search(r"^(\S+) does not have a deterministic implementation", str(error), re.MULTILINE)
    if not isinstance(error, RuntimeError) or found is None:
        return None
    return (
        f"--deterministic: torch {torch.__version__} has no deterministic form of {found[1]}, and this model uses it. "
        "Leave the flag out: a resumed run then equals an uninterrupted one up to rounding on GPUs"
    )
