# E experts of a layer, ep ranks that share them
"""Expert parallelism: each rank of a DeepSpeed expert group holds a part of every layer's experts (--ep_size).

Rank r of a group holds experts r E / ep to (r + 1) E / ep of every layer, numbered from 0 on that rank: the engine, its
hooks and this rank's DeepSpeed files use the local numbers. Checkpoint layouts, export and comparisons use the names of
the whole model. Source: deepspeed.moe, 0.19.8.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from deepspeed.utils import groups
from torch import nn

from llava_ds.engine.placement import Placement, Share
from llava_ds.extensions.mixtures.upcycled import expert_layers, expert_of
from llava_ds.runtime.mesh import Mesh

AXIS = "ep"


@dataclass(frozen=True)
class SharedExperts(Placement):
    """Placement with `number` experts per layer on each rank and a full copy of all other parameters."""

    number: int = 1

    def shares(self, model: nn.Module) -> Iterator[tuple[Share, nn.Parameter | None]]:
        """Yield all parameters. An expert of this rank yields one entry per rank of the group."""
        for share, parameter in super().shares(model):
            if (parts := expert_of(share.name)) is None:
                yield share, parameter
                continue
            before, local, after = parts
            for index in range(self.size):
                name = f"{before}{index * self.number + local}{after}"
                yield share._replace(name=name, owner=index), parameter if index == self.index else None


def share_experts(model: nn.Module, mesh: Mesh) -> None:
    """Keep this rank's experts of every layer, and record which ranks hold the other experts. Collective.

    Also creates DeepSpeed's expert groups to avoid a warning. Does nothing for a model without experts.
    """
    layers, ep = expert_layers(model), mesh.at(AXIS)
    if not layers:
        return
    name = f"ep_size_{ep.size}"
    if name not in groups._get_expert_parallel_group_dict():
        groups._create_expert_and_data_parallel(ep.size)
    assert groups._get_expert_parallel_rank(name) == ep.index, "DeepSpeed orders the ranks of expert groups differently"
    for layer in layers.values():
        number = layer.num_experts // ep.size
        experts = layer.deepspeed_moe.experts
        own = experts.deepspeed_experts[ep.index * number : (ep.index + 1) * number]
        experts.deepspeed_experts, experts.num_local_experts = own, number
        layer.ep_size = layer.deepspeed_moe.ep_size = ep.size
        layer.num_local_experts = layer.deepspeed_moe.num_local_experts = number
        layer.expert_group_name = layer.deepspeed_moe.ep_group_name = name
        for parameter in own.parameters():
            parameter.group_name = name
        if ep.size > 1:
            BufferSize(ep.group).watch(layer.deepspeed_moe)
    if ep.size > 1:
        model.placement = SharedExperts(AXIS, ep.size, ep.index, ep.group, in_data=True, number=number)


class BufferSize:
    """Agree on the rows per expert in the group's exchange buffers: the largest capacity on any rank.

    When tokens are dropped, DeepSpeed 0.19.8 (deepspeed/moe/sharded_moe.py) sizes buffers by each rank's token count,
    so packs of unequal length make the all-to-all uneven. Each rank still drops tokens by its own capacity.
    """

    def __init__(self, group: torch.distributed.ProcessGroup | None) -> None:
        self._group, self._rows = group, 0

    def watch(self, layer: nn.Module) -> None:
        """Hook the agreement in between a layer's gate and its experts. layer: DeepSpeed's MOELayer."""
        layer.gate.register_forward_hook(self._agree)
        layer.experts.register_forward_pre_hook(self._check)

    def _agree(self, gate: nn.Module, _inputs: tuple, found: tuple) -> tuple | None:
        if not gate.drop_tokens:
            self._rows = 0  # DeepSpeed already makes capacities equal
            return None
        loss, capacity, *rest = found  # a CPU tensor, because DeepSpeed computes it from Python numbers
        largest = capacity.to(loss.device, copy=True)
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, self._group)
        self._rows = int(largest)  # one host sync; DeepSpeed then reads a CPU tensor
        return (loss, torch.tensor(self._rows), *rest)

    def _check(self, _experts: nn.Module, inputs: tuple) -> None:
        rows = inputs[0].shape[2]  # (ep, experts of this rank, rows, D)
        assert self._rows in (0, rows), f"DeepSpeed exchanges {rows} rows for an expert, not the agreed {self._rows}"


def with_groups_of_experts(groups_of_all: list[dict]) -> list[dict]:
    """Split each optimizer group into its dense part and its expert parts.

    DeepSpeed needs expert groups marked and named by the process group that holds their copies.
    """
    split = []
    for group in groups_of_all:
        names = [expert_group(p) for p in group["params"]]
        for name in dict.fromkeys([None, *names]):
            params = [p for p, own in zip(group["params"], names) if own == name]
            if params:
                marks = {} if name is None else {"name": name, "moe": True}
                split.append({**group, **marks, "params": params})
    return split


def expert_group(parameter: torch.Tensor) -> str | None:
    """Return the name of the process group that holds copies of an expert parameter; None for other parameters."""
    return getattr(parameter, "group_name", None)  # set by DeepSpeed's expert layer
