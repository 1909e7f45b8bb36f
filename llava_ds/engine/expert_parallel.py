# E experts of a layer, ep ranks that share them
"""Expert parallelism: DeepSpeed's groups of ranks, each of which has some of every layer's experts (--ep_size).

Rank r of a group has experts r E / ep to (r + 1) E / ep of every layer, under numbers that begin at 0: by these the
engine, its hooks and DeepSpeed's files of this rank go. Everything that leaves a rank uses names of the whole model:
checkpoint layouts, export, comparisons. Source: deepspeed.moe, 0.19.8.
"""

from typing import NamedTuple

import torch
from deepspeed.utils import groups
from torch import nn

from llava_ds.model.families.upcycled import expert_layers
from llava_ds.model.families.upcycled import expert_of as parts_of
from llava_ds.runtime.mesh import Mesh

_PART = "llava_ds_experts"  # attribute of an expert's parameter


class ExpertPart(NamedTuple):
    """The place of a rank's experts: index, of ep ranks; number: of experts that a rank has."""

    index: int
    ep: int
    number: int
    group: torch.distributed.ProcessGroup | None

    def name(self, name: str, index: int | None = None) -> str:
        """The name in the whole model of what is called so on this rank, or on that of another index."""
        before, local, after = parts_of(name)
        return f"{before}{(self.index if index is None else index) * self.number + local}{after}"


def share_experts(model: nn.Module, mesh: Mesh) -> None:
    """Keep this rank's experts of every layer, and mark their parameters. All ranks call it together.

    Also makes DeepSpeed's groups, which would print that they are missing. Does nothing for a model without experts.
    """
    layers = expert_layers(model)
    if not layers:
        return
    name = f"ep_size_{mesh.ep}"
    if name not in groups._get_expert_parallel_group_dict():
        groups._create_expert_and_data_parallel(mesh.ep)
    assert groups._get_expert_parallel_rank(name) == mesh.ep_rank, "DeepSpeed lays expert groups out in another order"
    for layer in layers.values():
        number = layer.num_experts // mesh.ep
        experts = layer.deepspeed_moe.experts
        own = experts.deepspeed_experts[mesh.ep_rank * number : (mesh.ep_rank + 1) * number]
        experts.deepspeed_experts, experts.num_local_experts = own, number
        layer.ep_size = layer.deepspeed_moe.ep_size = mesh.ep
        layer.num_local_experts = layer.deepspeed_moe.num_local_experts = number
        layer.expert_group_name = layer.deepspeed_moe.ep_group_name = name
        for parameter in own.parameters():
            parameter.group_name = name
            setattr(parameter, _PART, ExpertPart(mesh.ep_rank, mesh.ep, number, mesh.ep_group))
        if mesh.ep > 1:
            BufferSize(mesh.ep_group).watch(layer.deepspeed_moe)


class BufferSize:
    """The rows for each expert in the buffers that the ranks of a group exchange: the largest capacity of any of them.

    Where tokens are dropped, DeepSpeed 0.19.8 (deepspeed/moe/sharded_moe.py) sizes them by a rank's own number of
    tokens, and packs of unequal lengths make an all-to-all of unequal sizes. A rank still drops tokens by its own
    capacity, so that they are the same ones whatever the number of ranks that share the experts.
    """

    def __init__(self, group: torch.distributed.ProcessGroup | None) -> None:
        self._group, self._rows = group, 0

    def watch(self, layer: nn.Module) -> None:
        """Set it between a layer's gate and its experts. layer: DeepSpeed's MOELayer."""
        layer.gate.register_forward_hook(self._agree)
        layer.experts.register_forward_pre_hook(self._check)

    def _agree(self, gate: nn.Module, _inputs: tuple, found: tuple) -> tuple | None:
        if not gate.drop_tokens:
            self._rows = 0  # DeepSpeed agrees on it
            return None
        loss, capacity, *rest = found  # a tensor on the CPU, for DeepSpeed computes it from Python's numbers
        largest = capacity.to(loss.device, copy=True)
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, self._group)
        self._rows = int(largest)  # the host reads it here, and DeepSpeed then a number that it has
        return (loss, torch.tensor(self._rows), *rest)

    def _check(self, _experts: nn.Module, inputs: tuple) -> None:
        rows = inputs[0].shape[2]  # (ep, experts of this rank, rows, D)
        assert self._rows in (0, rows), f"DeepSpeed exchanges {rows} rows for an expert, not the agreed {self._rows}"


def expert_part(parameter: torch.Tensor) -> ExpertPart | None:
    """The place of an expert's parameter; None for one that every rank has."""
    return getattr(parameter, _PART, None)


def expert_group(parameter: torch.Tensor) -> str | None:
    """The name by which DeepSpeed finds the ranks with copies of an expert's parameter; None for any other."""
    return getattr(parameter, "group_name", None)  # as DeepSpeed's layer marks them


def names_in_model(names: dict[nn.Parameter, str]) -> dict[nn.Parameter, str]:
    """A rank's names of its parameters, as the whole model has them."""
    return {p: name if (part := expert_part(p)) is None else part.name(name) for p, name in names.items()}


def from_owner(parameter: torch.Tensor, index: int) -> torch.Tensor:
    """What the rank of an index has in the place of this one's expert. All ranks call it together, for each in turn."""
    part = expert_part(parameter)
    if part is None or part.ep == 1:
        return parameter.detach()
    found = parameter.detach().contiguous() if index == part.index else torch.empty_like(parameter)
    torch.distributed.broadcast(found, group=part.group, group_src=index)
    return found
