"""A moving average of the trained weights, stored as an optimizer state, so checkpoints and re-sharding include it.

After every step, average = decay * average + (1 - decay) * weight in fp32. It starts from the weights after step 1.
"""

from collections.abc import Iterator

import deepspeed
import torch
from torch import nn

from llava_ds.engine.placement import placement_of
from llava_ds.engine.shards.pieces import REPLICATED, layout_of, masters
from llava_ds.runtime.mesh import Mesh, sum_over
from llava_ds.runtime.waiting import waiting

STATE = "ema"


@torch.no_grad()
def update_averages(engine, decay: float) -> None:
    """Update the averages after a step.

    Each rank averages only its own shard. Averages begin with the first step that is not skipped.
    """
    optimizer = engine.basic_optimizer
    has_none = type(optimizer).__name__ == "SGD" and not any(group["momentum"] for group in optimizer.param_groups)
    for master in masters(engine):
        state = optimizer.state[master] if has_none else optimizer.state.get(master)
        if not state and not has_none:  # adding ours now would make the optimizer skip initializing its own states
            continue
        if STATE not in state:
            state[STATE] = master.detach().clone().float()
        else:
            state[STATE].lerp_(master.float(), 1 - decay)


@torch.no_grad()
def take_averages(engine, mesh: Mesh) -> None:
    """Set the model's weights to their averages, after training. Collective.

    Raises RuntimeError if no step was averaged.
    """
    for parameter, values in _averages(engine, mesh):
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=hasattr(parameter, "ds_id")):
            parameter.copy_(values.view_as(parameter))


def _averages(engine, mesh: Mesh) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Yield each trained parameter of this rank with its flat average, gathered over ZeRO's shards. Collective."""
    layout, states = layout_of(engine), engine.basic_optimizer.state
    own: dict[str, list[tuple[torch.Tensor, object]]] = {}
    for master, slot in zip(masters(engine), layout.slots):
        for piece in slot:
            if STATE not in states.get(master, {}):
                raise RuntimeError(f"{type(engine.basic_optimizer).__name__} has no average of {piece.name}")
            own.setdefault(piece.name, []).append((states[master][STATE].view(-1), piece))
    for parameter, share in placement_of(engine).held(engine.module).items():
        if not parameter.requires_grad:
            continue
        whole = torch.zeros(getattr(parameter, "ds_numel", parameter.numel()), device=engine.device)
        for values, piece in own.get(share.name, []):
            part = values[piece.offset : piece.offset + piece.length]
            whole[piece.start : piece.start + piece.length] = part.to(whole.device)
        if layout.kind not in REPLICATED:
            with waiting("averaged weights"):
                whole = sum_over(mesh.data_group, whole)
        yield parameter, whole
