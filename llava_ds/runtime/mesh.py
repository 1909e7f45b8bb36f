"""The axes over which ranks share a model and its data; today one: dp, data parallelism with ZeRO."""

from dataclasses import dataclass

import torch

from llava_ds.runtime.ranks import Ranks


@dataclass(frozen=True)
class Mesh:
    """This rank's place on every axis. Data, gradients and counts follow the mesh; files and messages follow Ranks.

    dp: ranks with different samples; dp_rank: this one's place among them; data_group: the process group over which
    counts and losses are summed (None: all ranks).
    """

    dp: int
    dp_rank: int
    data_group: torch.distributed.ProcessGroup | None = None

    @classmethod
    def of(cls, ranks: Ranks) -> "Mesh":
        """Lay out all ranks on the one axis."""
        return cls(dp=ranks.world_size, dp_rank=ranks.rank)

    @property
    def grad_ranks(self) -> int:
        """Ranks over which the engine averages gradients: the factor that turns its average into a sum."""
        return self.dp


def sum_over(group: torch.distributed.ProcessGroup | None, values: torch.Tensor) -> torch.Tensor:
    """Sum a tensor over the ranks of a group (None: all ranks), in place, and return it."""
    if torch.distributed.get_world_size(group) > 1:
        torch.distributed.all_reduce(values, group=group)
    return values
