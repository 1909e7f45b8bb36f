"""--deterministic: kernels on GPUs that give the same bits whenever they are given the same numbers.

Without it, backward of attention and of gathers adds up in the order in which blocks of threads happen to finish.
"""

import os
import re
from collections.abc import MutableMapping

import torch

from llava_ds.constants import ConfigError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # cuBLAS chooses by it when it makes its workspace, at the first product
WORKSPACES = (":4096:8", ":16:8")  # with which it computes alike each time (cuBLAS documentation, 2.1.4)


def use_deterministic_kernels(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set all that torch, cuBLAS and cuDNN ask, before CUDA's first use. Raises ConfigError for another workspace.

    SDPA's and torch's varlen kernels then take their deterministic backward, and an operation without one raises.
    flash-attn is asked for its own (model/attention.py).
    """
    if environment.setdefault(WORKSPACE, WORKSPACES[0]) not in WORKSPACES:
        raise ConfigError(
            f"--deterministic needs {WORKSPACE} to be {' or '.join(WORKSPACES)}, this is {environment[WORKSPACE]}: "
            "unset it"
        )
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # nothing reads such memory here
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True


def about_nondeterministic(error: BaseException) -> str | None:
    """The message for an operation that --deterministic refuses; None for other errors."""
    found = re.search(r"^(\S+) does not have a deterministic implementation", str(error), re.MULTILINE)
    if not isinstance(error, RuntimeError) or found is None:
        return None
    return (
        f"--deterministic: {found[1]}, which this model uses, has no deterministic form in torch {torch.__version__}. "
        "Leave the flag out: a resume then equals the whole run up to rounding on GPUs"
    )
