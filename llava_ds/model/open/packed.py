"""Packed weights in 4 or 8 bits, recognised by their class."""

import torch
from torch import nn


def is_packed(parameter: nn.Parameter) -> bool:
    """True for a packed weight."""
    return type(parameter).__name__ in ("Params4bit", "Int8Params")


def num_packed(parameter: nn.Parameter) -> int:
    """Return the number of weights in a packed parameter."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else state.shape.numel()


def is_4bit(layer: nn.Module) -> bool:
    """True for a layer whose weight is packed in 4 bits."""
    return hasattr(layer, "quant_storage")


def scales_of(layer: nn.Module) -> list[torch.Tensor]:
    """Return the scales of a packed layer: the tensors that its weight is computed from, without the integers."""
    if not is_4bit(layer):
        return [layer.weight.SCB if layer.weight.SCB is not None else layer.state.SCB]
    state = layer.quant_state
    return [state.absmax, *([state.offset, state.state2.absmax, state.state2.code] if state.nested else [])]
