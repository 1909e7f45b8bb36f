"""The axes over which ranks share a model and its data: dp, data parallelism with ZeRO, and sp, that of sequences."""

from dataclasses import dataclass

import torch

from llava_ds.constants import ConfigError
from llava_ds.runtime.ranks import Ranks


@dataclass(frozen=True)
class Mesh:
    """This rank's place on every axis. Data, gradients and counts follow the mesh; files and messages follow Ranks.

    rank = dp_rank * sp + sp_rank. dp: groups of ranks with different samples, and dp_rank the place of this rank's
    among them; sp: ranks that share the tokens of every micro-batch, and sp_rank this one's place among those, its
    neighbours; sp_group: the process group of these, None for a rank that has all tokens to itself; sp_host_group: the
    same for what lies on the host. data_group: the group over which counts and losses are summed (None: all ranks).
    """

    dp: int
    dp_rank: int
    sp: int = 1
    sp_rank: int = 0
    sp_group: torch.distributed.ProcessGroup | None = None
    sp_host_group: torch.distributed.ProcessGroup | None = None
    data_group: torch.distributed.ProcessGroup | None = None

    @classmethod
    def of(cls, ranks: Ranks, sp: int = 1) -> "Mesh":
        """Lay out all ranks. All call it together. Raises ConfigError for axes that don't fit them."""
        if ranks.world_size % sp:
            fitting = [n for n in range(1, ranks.world_size + 1) if ranks.world_size % n == 0]
            raise ConfigError(
                f"--sequence_parallel_size {sp} does not divide {ranks.world_size} ranks: give one of "
                f"{', '.join(map(str, fitting))}, or start another number of ranks"
            )
        dp, (dp_rank, sp_rank) = ranks.world_size // sp, divmod(ranks.rank, sp)
        if sp == 1:
            return cls(dp, dp_rank)
        groups = [list(range(first, first + sp)) for first in range(0, ranks.world_size, sp)]
        own, _ = torch.distributed.new_subgroups_by_enumeration(groups)
        on_host = own
        if ranks.device.type != "cpu":
            on_host, _ = torch.distributed.new_subgroups_by_enumeration(groups, backend="gloo")
        return cls(dp, dp_rank, sp, sp_rank, own, on_host)

    @property
    def grad_ranks(self) -> int:
        """Ranks over which the engine averages gradients: the factor that turns its average into a sum."""
        return self.dp * self.sp


def sum_over(group: torch.distributed.ProcessGroup | None, values: torch.Tensor) -> torch.Tensor:
    """Sum a tensor over the ranks of a group (None: all ranks), in place, and return it."""
    if torch.distributed.get_world_size(group) > 1:
        torch.distributed.all_reduce(values, group=group)
    return values
