"""Weights in 4 or 8 bits, told by their class."""

import torch
from torch import nn


def is_packed(parameter: nn.Parameter) -> bool:
    """True for the weight of a layer that holds it packed."""
    return type(parameter).__name__ in ("Params4bit", "Int8Params")


def num_packed(parameter: nn.Parameter) -> int:
    """Weights in a packed parameter."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else state.shape.numel()


def is_4bit(layer: nn.Module) -> bool:
    """True for a layer whose weight is packed in 4 bits."""
    return hasattr(layer, "quant_storage")


def scales_of(layer: nn.Module) -> list[torch.Tensor]:
    """Tensors beside a packed layer's integers that its weight is computed from."""
    if not is_4bit(layer):
        return [layer.weight.SCB if layer.weight.SCB is not None else layer.state.SCB]
    state = layer.quant_state
    return [state.absmax, *([state.offset, state.state2.absmax, state.state2.code] if state.nested else [])]
