"""Weights in 4 or 8 bits, told by their class."""

from torch import nn


def is_packed(parameter: nn.Parameter) -> bool:
    """True for the weight of a layer that quantize_layers made."""
    return type(parameter).__name__ in ("Params4bit", "Int8Params")


def num_packed(parameter: nn.Parameter) -> int:
    """Weights in a packed parameter."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else state.shape.numel()
