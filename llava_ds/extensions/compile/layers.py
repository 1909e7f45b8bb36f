"""torch.compile, layer by layer."""

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


def compile_layers(model: nn.Module, backend: str | None) -> int:
    """Compile the repeated layers of tower and language model for any length. Returns their number.

    Layers instead of the model: they are all alike, so one compilation serves all, and under ZeRO-3 parameters are
    gathered in hooks around layers.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        layer.forward = torch.compile(layer.forward, backend=backend or "inductor", dynamic=True)
    return len(layers)
