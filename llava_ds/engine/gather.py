"""Whole tensors out of a model that may be partitioned, one after the other."""

from collections.abc import Iterable, Iterator

import deepspeed
import torch
from torch import nn

from llava_ds.runtime.ranks import Ranks


def gathered(parameters: Iterable[tuple[str, nn.Parameter]], ranks: Ranks) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor on CPU) on rank 0, nothing elsewhere; every rank has to run through it.

    Only one parameter is whole at a time, so memory stays at the model's share plus what rank 0 keeps.
    """
    for name, parameter in parameters:
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            tensor = parameter.detach().to("cpu", copy=True) if ranks.is_first else None
        if ranks.is_first:
            yield name, tensor
