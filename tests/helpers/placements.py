"""A small module with the names of a LlavaModel, and what every placement of it has to keep."""

import math

import torch
from torch import nn

from llava_ds.engine.placement import Placement

LAYER, EXPERTS = "language_model.model.layers.0", "mlp.deepspeed_moe.experts.deepspeed_experts"
SHAPES = {
    f"{LAYER}.self_attn.q_proj.weight": (4, 6),
    f"{LAYER}.self_attn.q_proj.bias": (4,),
    f"{LAYER}.self_attn.o_proj.weight": (6, 4),
    f"{LAYER}.norm.weight": (6,),
    **{f"{LAYER}.{EXPERTS}.{expert}.up_proj.weight": (3, 6) for expert in range(4)},
    "projector.weight": (6, 5),
}


def module_of(shapes: dict[str, tuple[int, ...]]) -> nn.Module:
    """A module whose parameters have these names."""
    model = nn.Module()
    for name, shape in shapes.items():
        *path, last = name.split(".")
        inner = model
        for part in path:
            if not hasattr(inner, part):
                inner.add_module(part, nn.Module())
            inner = getattr(inner, part)
        inner.register_parameter(last, nn.Parameter(torch.zeros(shape)))
    return model


def check_that_each_number_counts_once(ranks: list[tuple[Placement, nn.Module]]) -> None:
    """Assert that all ranks have the same parameter names, and that exactly one rank counts each number. ranks:
    placement and module per rank."""
    named = [[(s.name, s.shape, s.dtype, s.owner) for s, _ in each.shares(model)] for each, model in ranks]
    assert all(names == named[0] for names in named)
    assert {name: shape for name, shape, _, _ in named[0]} == SHAPES and len(named[0]) == len(SHAPES)
    counts = {name: torch.zeros(math.prod(shape)) for name, shape in SHAPES.items()}
    for placement, model in ranks:
        counted = placement.counted(model)
        for parameter, share in placement.held(model).items():
            if counted is None or parameter in counted:
                begin, end, period = share.slice or (0, 1, 1)
                own = counts[share.name].view(-1, period)[:, begin:end]
                assert own.numel() == parameter.numel()
                own += 1
    assert all(torch.equal(count, torch.ones_like(count)) for count in counts.values())


def check_owners(ranks: list[tuple[Placement, nn.Module]]) -> None:
    """Assert that every parameter is with its owner alone."""
    held = [{share.name for share in placement.held(model).values()} for placement, model in ranks]
    for share, _ in ranks[0][0].shares(ranks[0][1]):
        has = [rank for rank, names in enumerate(held) if share.name in names]
        assert has == ([0, 1] if share.owner is None else [share.owner])
