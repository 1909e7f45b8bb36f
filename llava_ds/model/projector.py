# N image tiles, P patches per tile, C tower width, D language-model width, F placed features,
# K side of a square of patches that becomes one feature
"""The projector from tower features to the language model's embedding space, and the newline after image rows."""

import math
import re
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from llava_ds.constants import ConfigError
from llava_ds.extensions.active import choice, values_of

if TYPE_CHECKING:
    from llava_ds.extensions.plugin_slots import ProjectorKind


class Projector(nn.Module):
    """Projector of any kind, (N, P, C) to (N, P, D). Layers have the names that follow "mm_projector." in LLaVA.

    "pooler" makes one feature of 2 x 2 patches, "..._psK" and "..._avgK" one of K x K.
    Source: LLaVA-NeXT's build_vision_projector.
    """

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.layers(features)


class Newline(nn.Module):
    """The learned embedding after each row of an image (LLaVA's image_newline), initialised as in LLaVA.

    It is a module so that ZeRO-3 gathers it when it is called.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(width) / width**0.5)

    def forward(self, features: torch.Tensor, length: int) -> torch.Tensor:
        """Append newlines to features (F, D) up to (length, D). The embedding's gradient is summed in float32."""
        return with_newlines(self.embedding, features, length)


def with_newlines(embedding: torch.Tensor, features: torch.Tensor, length: int) -> torch.Tensor:
    """Append the embedding (D,) to features (F, D) up to (length, D)."""
    return torch.cat([features, embedding.to(features.dtype).expand(length - len(features), -1)])


class ResBlock(nn.Module):
    """LLaVA's SimpleResBlock, (..., D) to (..., D). The residual is added after the norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.pre_norm = nn.LayerNorm(width)
        self.proj = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        features = self.pre_norm(features)
        return features + self.proj(features)


class Pooler(nn.Module):
    """LLaVA-NeXT's PoolerProjector: a convolution over squares of four patches, (N, P, C) to (N, P/4, D).

    If the grid's side is odd, the last row and column are left out.
    """

    def __init__(self, tower_width: int, width: int) -> None:
        super().__init__()
        self.conv_pool = nn.Conv2d(tower_width, width, kernel_size=POOLER_STRIDE, stride=POOLER_STRIDE)
        self.proj = nn.Sequential(nn.GELU(), nn.Linear(width, width))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        side = math.isqrt(features.shape[1])
        grid = features.transpose(1, 2).unflatten(2, (side, side))  # (N, C, side, side)
        return self.proj(self.conv_pool(grid).flatten(2).transpose(1, 2))


class Shuffled(nn.Sequential):
    """A pixel shuffle, then layers: (N, P, C) to (N, P / K**2, D). The shuffle does not change the layers' names."""

    def __init__(self, stride: int, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.stride = stride

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return super().forward(space_to_depth(features, self.stride))


class Averaged(nn.Sequential):
    """A mean over squares, then layers: (N, P, C) to (N, P / K**2, D). The mean does not change the layers' names."""

    def __init__(self, stride: int, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.stride = stride

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        n, patches, width = features.shape
        squares = space_to_depth(features, self.stride).view(n, patches // self.stride**2, self.stride**2, width)
        return super().forward(squares.mean(2))


def space_to_depth(features: torch.Tensor, stride: int) -> torch.Tensor:
    """Concatenate each square of K x K patches, row by row, to one feature: (N, P, C) to (N, P / K**2, K**2 * C).

    Source: transformers' Idefics3Connector.pixel_shuffle.
    """
    n, patches, width = features.shape
    side = math.isqrt(patches) // stride  # squares in a row
    squares = features.reshape(n, side, stride, side, stride, width).transpose(2, 3)
    return squares.reshape(n, side**2, stride**2 * width)


def build_projector(kind: str, tower_width: int, width: int) -> Projector:
    """Build a projector with torch's default initialisation. Raises ConfigError for an invalid kind."""
    if kind == "identity" and tower_width != width:
        raise ConfigError(
            "--mm_projector_type identity needs a tower as wide as the language model, but the widths are "
            f"{tower_width} and {width}: give mlp2x_gelu"
        )
    if kind in SIMPLE:
        return Projector(SIMPLE[kind](tower_width, width))
    if own := _own_kind(kind):
        module, stride = own[0].build(own[1], tower_width, width), square_stride(kind)
        module.register_forward_hook(partial(_check_own_shape, kind=kind, stride=stride, width=width))
        return Projector(nn.Sequential(OrderedDict(own=module)))
    found = _MLP.fullmatch(kind)
    if found is None:
        known = ", ".join([PROJECTOR_KINDS, *values_of("mm_projector_type")])
        raise ConfigError(f"--mm_projector_type {kind} is unknown: give {known}")
    stride = square_stride(kind)
    layers: list[nn.Module] = [nn.Linear(tower_width * (1 if found[3] == "avg" else stride**2), width)]
    for _ in range(1, int(found[1])):
        layers += [nn.GELU(), nn.Linear(width, width)]
    layers += [ResBlock(width) for _ in range(int(found[2] or 0))]
    if stride == 1:
        return Projector(nn.Sequential(*layers))
    return Projector((Averaged if found[3] == "avg" else Shuffled)(stride, *layers))


def _check_own_shape(_, inputs: tuple, output: torch.Tensor, *, kind: str, stride: int, width: int) -> None:
    """Raise ConfigError unless an extension's projector returned (N, P / stride**2, width)."""
    n, patches, _ = inputs[0].shape
    expected = (n, (math.isqrt(patches) // stride) ** 2, width)
    found = tuple(output.shape) if isinstance(output, torch.Tensor) else f"of a {type(output).__name__}, no tensor"
    if found != expected:
        raise ConfigError(
            f"--mm_projector_type {kind}: its forward() returned the shape {found}, expected {expected}: "
            f"{patches} patches per tile in squares of {stride} x {stride} (stride()), and the language model's width"
        )


def square_stride(kind: str) -> int:
    """Return K of a projector with a pixel shuffle or a mean, or of an extension's projector; 1 for other kinds."""
    if own := _own_kind(kind):
        return own[0].stride(own[1])
    found = _MLP.fullmatch(kind)
    return 1 if found is None else int(found[4] or 1)


def _own_kind(kind: str) -> "tuple[ProjectorKind, str] | None":
    """Return the extension's projector kind and the text after the colon; None for the core's kinds."""
    name, _, option = kind.partition(":")
    return (choice("mm_projector_type", name), option) if name in values_of("mm_projector_type") else None


def feature_stride(kind: str) -> int:
    """Return the side, in patches, of the square that becomes one projected feature."""
    return POOLER_STRIDE if kind == "pooler" else square_stride(kind)


_MLP = re.compile(r"mlp([1-9]\d?)x(?:_res([1-9]\d?)x)?_gelu(?:_(ps|avg)([2-9]))?")
POOLER_STRIDE = 2
SIMPLE = {
    "linear": lambda tower_width, width: nn.Sequential(nn.Linear(tower_width, width)),
    "identity": lambda tower_width, width: nn.Identity(),
    "pooler": Pooler,
}
PROJECTOR_KINDS = (
    "linear, mlpNx_gelu, mlpNx_resMx_gelu, either followed by _psK or _avgK, pooler or identity, with numbers for "
    "N, M and K"
)
