"""torch.compile, layer by layer."""

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


def compile_layers(model: nn.Module, backend: str | None) -> int:
    """Compile the repeated layers of tower and language model for any length. Returns how many there are.

    Layers and not the whole, because they are all alike (one compilation serves all), and because under ZeRO-3 the
    gathering of parameters happens in hooks around them.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        layer.forward = torch.compile(layer.forward, backend=backend or "inductor", dynamic=True)
    return len(layers)
