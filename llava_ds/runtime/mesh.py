"""The mesh axes over which ranks share a model and its data: dp (data parallelism with ZeRO), axes that extensions
add, and axes inside dp."""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from llava_ds.constants import ConfigError
from llava_ds.extensions.base import Axis, MeshPart
from llava_ds.runtime.ranks import Ranks

Group = torch.distributed.ProcessGroup | None  # None: all ranks, or this rank alone, depending on the field
DATA = "dp"


class Place(NamedTuple):
    """This rank's index on an axis of `size` ranks. group: process group of these ranks, None for one rank.
    divides_model: see Axis."""

    index: int = 0
    size: int = 1
    group: Group = None
    divides_model: bool = False


@dataclass(frozen=True)
class Mesh:
    """This rank's place on every axis. Data, gradients and counts follow the mesh; files and messages follow Ranks.

    dp: number of rank groups with different samples. dp_rank: index of this rank's group. places: this rank's place on
    every axis outside dp, by name. in_data: its place on every axis inside dp. shared_host_group: gloo group of all
    ranks with the same samples. data_group: group of the ranks that hold the same part of the model, over which counts,
    losses and gradients are summed (None: all ranks). parts: the extensions' functions for their axes.
    """

    dp: int
    dp_rank: int
    places: Mapping[str, Place] = field(default_factory=dict)
    shared_host_group: Group = None
    data_group: Group = None
    in_data: Mapping[str, Place] = field(default_factory=dict)
    parts: tuple[MeshPart, ...] = ()

    @classmethod
    def of(cls, ranks: Ranks, axes: Sequence[Axis] = (), parts: tuple[MeshPart, ...] = ()) -> "Mesh":
        """Place all ranks on the axes, in the axes' order. Collective. Raises ConfigError if the sizes don't fit."""
        check_sizes(ranks.world_size, axes)
        inner, axes = [axis for axis in axes if axis.in_data], [axis for axis in axes if not axis.in_data]
        shared = math.prod(axis.size for axis in axes)
        dp = ranks.world_size // shared
        laid_out = sorted([(axis.order, axis.name, axis.size) for axis in axes] + [(0, DATA, dp)])
        names, sizes = [name for _, name, _ in laid_out], [size for _, _, size in laid_out]
        grid = torch.arange(ranks.world_size).view(sizes)
        own, rest = {}, ranks.rank
        for name, size in zip(reversed(names), reversed(sizes)):
            rest, own[name] = divmod(rest, size)

        def group_along(along: Collection[str], backend: str | None = None) -> Group:
            """Return the group of ranks that differ from this one only on these axes."""
            others = [i for i, name in enumerate(names) if name not in along]
            inside = [i for i, name in enumerate(names) if name in along]
            rows = grid.permute(*others, *inside).reshape(-1, math.prod(sizes[i] for i in inside))
            return _own_group(rows, backend)

        divided = [axis.name for axis in axes if axis.divides_model]
        alike = [name for name in names if name not in divided]
        assert len(alike) <= 2, f"two axes share tokens: {alike}"
        return cls(
            dp,
            own[DATA],
            {a.name: Place(own[a.name], a.size, group_along([a.name]), a.divides_model) for a in axes},
            shared_host_group=group_along([a.name for a in axes], "gloo") if axes else None,
            data_group=group_along(alike) if divided else None,
            in_data={
                a.name: Place(own[DATA] % a.size, a.size, _own_group(grid.reshape(-1, a.size)), a.divides_model)
                for a in inner
            },
            parts=parts,
        )

    def at(self, axis: str) -> Place:
        """Return this rank's place on an axis; index 0 and size 1 if the mesh lacks the axis."""
        return self.places.get(axis) or self.in_data.get(axis, Place())

    @property
    def part(self) -> Place:
        """This rank's place among the ranks that share every micro-batch's tokens."""
        return next((place for place in self.places.values() if not place.divides_model), Place())

    @property
    def grad_ranks(self) -> int:
        """Number of ranks over which the engine averages gradients; the average times it is the sum."""
        return self.dp * self.part.size

    @property
    def shared(self) -> int:
        """Number of ranks with the same samples."""
        return math.prod(place.size for place in self.places.values())

    @property
    def shared_rank(self) -> int:
        """This rank's index among the ranks with the same samples."""
        found = 0
        for place in self.places.values():
            found = found * place.size + place.index
        return found

    @property
    def is_divided(self) -> bool:
        """True if the axes divide the model, so that no rank has all of it even at ZeRO stage 0."""
        return any(place.divides_model for place in (*self.places.values(), *self.in_data.values()))

    def adapt(self, model: torch.nn.Module) -> None:
        """Change a model in place, after its weights are loaded, to compute this rank's part of a micro-batch."""
        for part in self.parts:
            if part.adapt is not None:
                part.adapt(model, self)

    def complete(self, own: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks that share a micro-batch's tokens. In backward, each rank's summand gets the gradient of
        the sum."""
        return own if self.part.size == 1 else _SumOver.apply(own, self.part.group)


class _SumOver(torch.autograd.Function):
    """Sum over ranks. Backward passes the gradient unchanged, because every rank computes the same loss from the
    sum."""

    @staticmethod
    def forward(ctx, own: torch.Tensor, group: Group) -> torch.Tensor:
        total = own.clone()
        torch.distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, upstream: torch.Tensor) -> tuple[torch.Tensor, None]:
        return upstream, None


ALONE = Mesh(1, 0)  # for a single process


def check_sizes(world_size: int, axes: Sequence[Axis]) -> None:
    """Raise ConfigError if the axes' sizes don't fit the number of ranks."""
    inner, axes = [axis for axis in axes if axis.in_data], [axis for axis in axes if not axis.in_data]
    product = math.prod(axis.size for axis in axes)
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    given = [f"--{axis.flag} {axis.size}" for axis in axes]
    if world_size % product:
        if len(given) == 1:
            raise _not_dividing(given[0], world_size, divisors)
        products = (p for p in itertools.product(divisors, repeat=len(given)) if world_size % math.prod(p) == 0)
        fitting = [" x ".join(map(str, sizes)) for sizes in products]
        raise ConfigError(
            f"{' times '.join(given)} is {product} and does not divide {world_size} ranks: give one of "
            f"{', '.join(fitting)}, or start another number of ranks"
        )
    for axis in inner:
        if axes:
            raise ConfigError(
                f"--{axis.flag} {axis.size} can't be combined with ranks that share samples "
                f"({', '.join(f'--{each.flag}' for each in axes)}): leave one of them out"
            )
        if world_size % axis.size:
            raise _not_dividing(f"--{axis.flag} {axis.size}", world_size, divisors)


def _not_dividing(given: str, world_size: int, divisors: Sequence[int]) -> ConfigError:
    return ConfigError(
        f"{given} does not divide {world_size} ranks: give one of {', '.join(map(str, divisors))}, or start another "
        "number of ranks"
    )


def _own_group(rows: torch.Tensor, backend: str | None = None) -> torch.distributed.ProcessGroup:
    """Create a group per row, and return the one with this rank. rows: (groups, ranks per group). Collective."""
    own, _ = torch.distributed.new_subgroups_by_enumeration(rows.tolist(), backend=backend)
    return own


def sum_over(group: Group, values: torch.Tensor) -> torch.Tensor:
    """Sum a tensor over the ranks of a group (None: all ranks), in place, and return it."""
    if torch.distributed.get_world_size(group) > 1:
        torch.distributed.all_reduce(values, group=group)
    return values
