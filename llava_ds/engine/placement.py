"""Where the parameters of the whole model lie: on every rank, on one of several, or cut into slices.

ZeRO's shards are no part of it: engine/pieces.py describes them, of whatever a rank has.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import deepspeed
import torch
from torch import nn

from llava_ds.engine.gather import on_host
from llava_ds.runtime.mesh import Group
from llava_ds.runtime.ranks import Ranks

# A part of a parameter laid flat: the numbers from begin to end of every period; () for all.
Slice = tuple[int, int, int] | tuple[()]


class Share(NamedTuple):
    """A parameter of the whole model: its name and shape there, the slice that this rank has, and the rank of the
    placement's group that owns it (None: every rank has it, or a slice of it)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    slice: Slice = ()
    owner: int | None = None


@dataclass(frozen=True)
class Placement:
    """Every rank has every parameter; subclasses override `shares`.

    axis: the field of pieces.Layout with the number of ranks that have the model together; size: this number; index: of
    this rank among them; group: these ranks; in_data: they have different samples, so that ZeRO sums over them itself.
    """

    axis: str = "tp"
    size: int = 1
    index: int = 0
    group: Group = None
    in_data: bool = False

    def shares(self, model: nn.Module) -> Iterator[tuple[Share, nn.Parameter | None]]:
        """Yield all parameters of the whole model, on all ranks in one order, each with what this rank has of it."""
        for name, parameter in model.named_parameters():
            yield Share(name, held_shape(parameter), parameter.dtype), parameter

    def held(self, model: nn.Module) -> dict[nn.Parameter, Share]:
        """Map this rank's parameters to their shares."""
        return {parameter: share for share, parameter in self.shares(model) if parameter is not None}

    def counted(self, model: nn.Module) -> set[nn.Parameter] | None:
        """Return the parameters whose gradients this rank counts in a sum over the group: what it alone has, and the
        first rank everything (None)."""
        if self.index == 0:
            return None
        return {p for p, share in self.held(model).items() if share.slice or share.owner is not None}

    def read(self, share: Share, parameter: nn.Parameter | None, ranks: Ranks) -> torch.Tensor | None:
        """Return the whole parameter, on rank 0's CPU; None on the other ranks. All ranks call it together."""
        if share.owner:  # the first rank has its own
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


def place(model: nn.Module, placement: Placement) -> None:
    """Note where a model's parameters lie."""
    model.placement = placement


def placement_of(model: Any) -> Placement:
    """Return the placement of a model's parameters. model: an engine's, or the engine."""
    return getattr(getattr(model, "module", model), "placement", WHOLE)


def held_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the shape of a parameter that ZeRO may have partitioned."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def slice_of(shape: tuple[int, ...], dim: int, index: int, size: int) -> Slice:
    """Return the slice that rank index has of a parameter of this shape, cut along a dimension for so many ranks."""
    period = math.prod(shape[dim:])
    share = period // size
    return index * share, (index + 1) * share, period


def cut_dim(shape: tuple[int, ...], part: Slice) -> int:
    """Return the dimension along which a slice was cut. shape: of the slice."""
    return next(dim for dim in range(len(shape)) if math.prod(shape[dim:]) == part[1] - part[0])
