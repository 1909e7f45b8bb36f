"""Whole tensors of a model that ZeRO-3 may have partitioned."""

import contextlib
from collections.abc import Iterable, Iterator

import deepspeed
import torch
from deepspeed.runtime.torch_autocast import PARAM_COMM_DTYPE_ATTR_NAME, get_comm_dtype, has_comm_dtype
from torch import nn

from llava_ds.runtime.ranks import Ranks
from llava_ds.runtime.waiting import waiting


def gathered(parameters: Iterable[tuple[str, nn.Parameter]], ranks: Ranks) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor on CPU) on rank 0, nothing elsewhere; every rank has to run through it.

    Only one parameter is whole at a time, so memory stays at the model's share plus what rank 0 holds on to.
    """
    for name, parameter in parameters:
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            tensor = on_host(parameter) if ranks.is_first else None
        if ranks.is_first:
            yield name, tensor


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU of a weight that was gathered, which waits for the ranks that it comes from."""
    with waiting("a gathered weight"):
        return tensor.detach().to("cpu", copy=True)


@contextlib.contextmanager
def full_precision_gathers(module: nn.Module) -> Iterator[None]:
    """Let ZeRO-3 gather float32 weights in float32 even under torch's autocast.

    DeepSpeed 0.19.8 marks each parameter with the lower precision that it is gathered in; the marks are removed and
    put back.
    """
    lowered = [(p, get_comm_dtype(p)) for p in module.parameters() if has_comm_dtype(p)]
    for p, _ in lowered:
        delattr(p, PARAM_COMM_DTYPE_ATTR_NAME)
        assert get_comm_dtype(p) == p.dtype, "DeepSpeed keeps the precision of gathers elsewhere than in 0.19.8"
    try:
        yield
    finally:
        for p, dtype in lowered:
            setattr(p, PARAM_COMM_DTYPE_ATTR_NAME, dtype)
