"""The axes over which ranks share a model and its data: pp, of a pipeline's stages, dp, of data with ZeRO, sp, of
sequences, and tp, of tensors.

Beside them ep: ranks of dp, next to each other, that share the experts of a mixture.
"""

import itertools
import math
from dataclasses import dataclass

import torch

from llava_ds.constants import ConfigError
from llava_ds.runtime.ranks import Ranks

Group = torch.distributed.ProcessGroup | None  # None: all ranks, or none beside this one, as its owner says


@dataclass(frozen=True)
class Mesh:
    """This rank's place on every axis. Data, gradients and counts follow the mesh; files and messages follow Ranks.

    rank = ((pp_rank * dp + dp_rank) * sp + sp_rank) * tp + tp_rank. dp: groups of ranks with different samples, and
    dp_rank the place of this rank's among them; sp: ranks that share the tokens of every micro-batch, and sp_rank this
    one's place among those; tp: ranks that share the language model's matrices, and tp_rank this one's place among
    those; pp: ranks that have a stage each of the layers, and pp_rank this one's stage; ep: ranks next to each other on
    the data axis that share experts, ep_group. sp_group, tp_group and
    pp_group: the process groups of these, None for a rank that has all to itself; shared_host_group: of all ranks with
    the same samples, for what lies on the host. data_group: the ranks that hold the same parameters and parts of
    matrices, over which counts, losses and gradients are summed (None: all ranks).
    """

    dp: int
    dp_rank: int
    sp: int = 1
    sp_rank: int = 0
    tp: int = 1
    tp_rank: int = 0
    pp: int = 1
    pp_rank: int = 0
    sp_group: Group = None
    tp_group: Group = None
    pp_group: Group = None
    shared_host_group: Group = None
    data_group: Group = None
    ep: int = 1
    ep_group: Group = None

    @classmethod
    def of(cls, ranks: Ranks, sp: int = 1, tp: int = 1, pp: int = 1, ep: int = 1) -> "Mesh":
        """Lay out all ranks. All call it together. Raises ConfigError for axes that don't fit them."""
        check_sizes(ranks.world_size, sp, tp, pp)
        check_experts(ranks.world_size, sp * tp * pp, ep)
        dp = ranks.world_size // (pp * sp * tp)
        rank_of = torch.arange(ranks.world_size).view(pp, dp, sp, tp)
        pp_rank, dp_rank, sp_rank, tp_rank = (
            ranks.rank // (dp * sp * tp), ranks.rank // (sp * tp) % dp, ranks.rank // tp % sp, ranks.rank % tp
        )  # fmt: skip
        is_shared, is_divided = pp * sp * tp > 1, pp * tp > 1
        return cls(
            dp,
            dp_rank,
            sp,
            sp_rank,
            tp,
            tp_rank,
            pp,
            pp_rank,
            sp_group=_own_group(rank_of.transpose(2, 3).reshape(-1, sp)) if sp > 1 else None,
            tp_group=_own_group(rank_of.reshape(-1, tp)) if tp > 1 else None,
            pp_group=_own_group(rank_of.reshape(pp, -1).T) if pp > 1 else None,
            shared_host_group=_own_group(rank_of.transpose(0, 1).reshape(dp, -1), "gloo") if is_shared else None,
            data_group=_own_group(rank_of.permute(0, 3, 1, 2).reshape(pp * tp, -1)) if is_divided else None,
            ep=ep,
            ep_group=_own_group(rank_of.reshape(-1, ep)) if ep > 1 else None,
        )

    @property
    def grad_ranks(self) -> int:
        """Ranks over which the engine averages gradients: the factor that turns its average into a sum."""
        return self.dp * self.sp

    @property
    def ep_rank(self) -> int:
        """This rank's place among those that share experts with it."""
        return self.dp_rank % self.ep

    @property
    def shared(self) -> int:
        """Ranks with the same samples."""
        return self.pp * self.sp * self.tp

    @property
    def shared_rank(self) -> int:
        """This rank's place among those with the same samples."""
        return (self.pp_rank * self.sp + self.sp_rank) * self.tp + self.tp_rank

    def complete(self, own: torch.Tensor) -> torch.Tensor:
        """Sum what the ranks that share a micro-batch's tokens have of it. Backward gives each rank's own part the
        gradient of the sum."""
        return own if self.sp == 1 else _SumOver.apply(own, self.sp_group)


class _SumOver(torch.autograd.Function):
    """Sum over ranks, each of which takes the same loss of the sum backward through its own part."""

    @staticmethod
    def forward(ctx, own: torch.Tensor, group: Group) -> torch.Tensor:
        total = own.clone()
        torch.distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, upstream: torch.Tensor) -> tuple[torch.Tensor, None]:
        return upstream, None


ALONE = Mesh(1, 0)  # of a process that trains or reads a model on its own


def check_sizes(world_size: int, sp: int, tp: int, pp: int = 1) -> None:
    """Raise ConfigError for axes that don't fit so many ranks."""
    if world_size % (sp * tp * pp) == 0:
        return
    flags = {"--sequence_parallel_size": sp, "--tensor_parallel_size": tp, "--pipeline_parallel_size": pp}
    given = [f"{flag} {size}" for flag, size in flags.items() if size > 1]
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    if len(given) == 1:
        raise ConfigError(
            f"{given[0]} does not divide {world_size} ranks: give one of {', '.join(map(str, divisors))}, or start "
            "another number of ranks"
        )
    products = (sizes for sizes in itertools.product(divisors, repeat=len(given)) if world_size % math.prod(sizes) == 0)
    fitting = [" x ".join(map(str, sizes)) for sizes in products]
    raise ConfigError(
        f"{' times '.join(given)} is {math.prod(flags.values())}, which does not divide {world_size} ranks: give one "
        f"of {', '.join(fitting)}, or start another number of ranks"
    )


def check_experts(world_size: int, shared: int, ep: int) -> None:
    """Raise ConfigError for ranks that can't share experts. shared: ranks with the same samples."""
    if ep == 1:
        return
    if shared > 1:
        raise ConfigError(
            f"--ep_size {ep} can't be combined with ranks that share samples (--sequence_parallel_size, "
            "--tensor_parallel_size, --pipeline_parallel_size): leave one of them out"
        )
    if world_size % ep:
        divisors = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        raise ConfigError(
            f"--ep_size {ep} does not divide {world_size} ranks: give one of {divisors}, or start another number of "
            "ranks"
        )


def _own_group(rows: torch.Tensor, backend: str | None = None) -> torch.distributed.ProcessGroup:
    """The group of this rank's row. rows: (groups, ranks of each); all ranks call it together."""
    own, _ = torch.distributed.new_subgroups_by_enumeration(rows.tolist(), backend=backend)
    return own


def sum_over(group: Group, values: torch.Tensor) -> torch.Tensor:
    """Sum a tensor over the ranks of a group (None: all ranks), in place, and return it."""
    if torch.distributed.get_world_size(group) > 1:
        torch.distributed.all_reduce(values, group=group)
    return values
