"""Placement of the whole model's parameters on the ranks (on every rank, on one, or sliced), and gathering on rank 0.

ZeRO's own sharding of a rank's parameters is in engine/shards/pieces.py.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import deepspeed
import torch
from deepspeed.runtime.torch_autocast import PARAM_COMM_DTYPE_ATTR_NAME, get_comm_dtype, has_comm_dtype
from torch import nn

from llava_ds.extensions.base import MeshPart
from llava_ds.runtime.mesh import Group
from llava_ds.runtime.ranks import Ranks
from llava_ds.runtime.waiting import waiting

# (begin, end, period): a part of a flattened parameter, elements begin to end of every period; () for all elements.
Slice = tuple[int, int, int] | tuple[()]


class Share(NamedTuple):
    """A parameter of the whole model: its name, its full shape and this rank's slice. owner: the only rank of the
    placement's group that has the parameter (None: every rank has it, or a slice of it)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    slice: Slice = ()
    owner: int | None = None


@dataclass(frozen=True)
class Placement:
    """Placement of the whole model's parameters on the ranks. Here every rank has all; subclasses override `shares`.

    axis: the field of pieces.Layout that counts the ranks sharing the model; size: their number; index: this rank's
    index among them; group: their process group; in_data: True if their samples differ, so that ZeRO sums over them.
    """

    axis: str = "tp"
    size: int = 1
    index: int = 0
    group: Group = None
    in_data: bool = False
    buffers = ()  # names and shapes of the whole model's stored buffers, if ranks lack some

    def shares(self, model: nn.Module) -> Iterator[tuple[Share, nn.Parameter | None]]:
        """Yield every parameter of the whole model with this rank's share, in the same order on all ranks."""
        for name, parameter in model.named_parameters():
            shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 may have partitioned it
            yield Share(name, tuple(shape), parameter.dtype), parameter

    def held(self, model: nn.Module) -> dict[nn.Parameter, Share]:
        """Map this rank's parameters to their shares."""
        return {parameter: share for share, parameter in self.shares(model) if parameter is not None}

    def counted(self, model: nn.Module) -> set[nn.Parameter] | None:
        """Return the parameters whose gradients this rank contributes to a sum over the group: None (all) on the first
        rank; on other ranks, the parameters and slices that only this rank has."""
        if self.index == 0:
            return None
        return {p for p, share in self.held(model).items() if share.slice or share.owner is not None}

    def read(self, share: Share, parameter: nn.Parameter | None, ranks: Ranks) -> torch.Tensor | None:
        """Return the whole parameter on rank 0's CPU; None on the other ranks. Collective."""
        if share.owner:  # rank 0 of the group needs no transfer
            if parameter is None:
                tensor = torch.empty(share.shape, dtype=share.dtype, device=ranks.device)
            else:
                tensor = parameter.detach().contiguous()
            torch.distributed.broadcast(tensor, group=self.group, group_src=share.owner)
            return on_host(tensor) if ranks.is_first else None
        if parameter is None:
            return None
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            tensor = parameter.detach()
            if share.slice:
                parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.size)]
                torch.distributed.all_gather(parts, tensor.contiguous(), group=self.group)
                tensor = torch.cat(parts, cut_dim(tensor.shape, share.slice))
            return on_host(tensor) if ranks.is_first else None


WHOLE = Placement()


def divided(
    elements: dict[nn.Parameter, int],
    model: nn.Module,
    parts: Iterable[MeshPart],
    size_of: Callable[[str], int],
) -> dict[nn.Parameter, int]:
    """Return the number of elements of each parameter that a rank will hold. elements: the number in the whole model;
    size_of: maps an axis to its number of ranks."""
    for part in parts:
        cut = part.divides(model) if part.divides is not None else ()
        elements = {p: number // size_of(part.axis) if p in cut else number for p, number in elements.items()}
    return elements


def placement_of(model: Any) -> Placement:
    """Return the placement stored on a model. model: the engine, or the engine's model."""
    return getattr(getattr(model, "module", model), "placement", WHOLE)


def slice_of(shape: tuple[int, ...], dim: int, index: int, size: int) -> Slice:
    """Return the slice that rank `index` of `size` holds of a parameter of this shape, cut along dim."""
    period = math.prod(shape[dim:])
    share = period // size
    return index * share, (index + 1) * share, period


def cut_dim(shape: tuple[int, ...], part: Slice) -> int:
    """Return the dimension along which a slice was cut. shape: the shape of the slice."""
    return next(dim for dim in range(len(shape)) if math.prod(shape[dim:]) == part[1] - part[0])


def gathered(parameters: Iterable[tuple[str, nn.Parameter]], ranks: Ranks) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor on CPU) on rank 0, nothing on other ranks. Every rank has to exhaust the iterator.

    Only one parameter is gathered at a time.
    """
    for name, parameter in parameters:
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            tensor = on_host(parameter) if ranks.is_first else None
        if ranks.is_first:
            yield name, tensor


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a gathered weight to the CPU. Waits for the ranks that hold its shards."""
    with waiting("a gathered weight"):
        return tensor.detach().to("cpu", copy=True)


@contextlib.contextmanager
def full_precision_gathers(module: nn.Module) -> Iterator[None]:
    """Let ZeRO-3 gather float32 weights in float32 even under torch's autocast.

    DeepSpeed 0.19.8 stores the lower precision for gathers in an attribute of each parameter. This context removes the
    attribute, and restores it at its end.
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
