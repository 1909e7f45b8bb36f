# N image tiles, P patches per tile, C tower width, D language-model width,
# F features that are placed
"""The projector from the tower's features to the language model's embedding space, and what stands between its rows."""

import torch
from torch import nn

from llava_ds.constants import ConfigError


class Projector(nn.Module):
    """A stack of layers whose names are LLaVA's: "0" and "2" are linear, "1" is the GELU between them.

    (N, P, C) to (N, P, D). Source: LLaVA's build_vision_projector.
    """

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.layers(features)


class Newline(nn.Module):
    """The learned embedding behind the rows of a picture (LLaVA's image_newline), drawn as LLaVA draws it.

    A module of its own, so that ZeRO-3 gathers it exactly where it is used.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(width) / width**0.5)

    def forward(self, features: torch.Tensor, length: int) -> torch.Tensor:
        """(F, D) followed by as many newlines as make it (length, D); the gradient of those is one sum in float32."""
        return with_newlines(self.embedding, features, length)


def with_newlines(embedding: torch.Tensor, features: torch.Tensor, length: int) -> torch.Tensor:
    """(D,) and (F, D): the features, followed by as many embeddings as make it (length, D)."""
    return torch.cat([features, embedding.to(features.dtype).expand(length - len(features), -1)])


def _linear(tower_width: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(tower_width, width))


def _mlp2x_gelu(tower_width: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(tower_width, width), nn.GELU(), nn.Linear(width, width))


PROJECTORS = {"linear": _linear, "mlp2x_gelu": _mlp2x_gelu}


def build_projector(kind: str, tower_width: int, width: int) -> Projector:
    """A projector with torch's default initialisation. Raises ConfigError for an unknown kind."""
    if kind not in PROJECTORS:
        raise ConfigError(f"--mm_projector_type {kind!r} is unknown: choose from {', '.join(PROJECTORS)}")
    return Projector(PROJECTORS[kind](tower_width, width))
