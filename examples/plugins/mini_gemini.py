# N image tiles, P patches, C and E the towers' widths, W = 9 patches around one, D language-model width
"""Mini-Gemini: the tokens of one tower mine a second tower's features around them.

The idea of Mini-Gemini (arXiv 2403.18814): low-resolution features are queries, high-resolution ones around each are
keys and values, and what is found is added to the query. Written from the paper. The second tower is the second folder
of --vision_tower, which has to make the same number of patches; the number is the first one's width.

    --plugin examples/plugins/mini_gemini.py --mm_projector_type mini_gemini:1024 --vision_tower clip,convnext
"""

import math

import torch
from torch import nn
from torch.nn import functional

from llava_ds.constants import ConfigError
from llava_ds.extensions.base import Extension
from llava_ds.extensions.plugin_slots import ProjectorKind

WINDOW = 3  # patches in a row around one


class Mining(nn.Module):
    """(N, P, C + E) to (N, P, D)."""

    def __init__(self, first: int, second: int, width: int) -> None:
        super().__init__()
        self.first = first
        self.query_norm, self.key_norm = nn.LayerNorm(first), nn.LayerNorm(second)
        self.query = nn.Linear(first, first)
        self.key = nn.Linear(second, first, bias=False)  # a bias would change no softmax
        self.value = nn.Linear(second, first)
        self.mlp = nn.Sequential(nn.Linear(first, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        low, high = features[..., : self.first], self.key_norm(features[..., self.first :])
        side = math.isqrt(features.shape[1])
        keys, values = (self._around(layer(high), side) for layer in (self.key, self.value))  # (N, P, W, C)
        scores = (keys @ self.query(self.query_norm(low))[..., None]).squeeze(3) / math.sqrt(self.first)
        is_there = self._around(torch.ones_like(high[..., :1]), side)[..., 0] > 0  # False beyond the border
        weights = scores.masked_fill(~is_there, -torch.inf).softmax(2)  # (N, P, W)
        return self.mlp(low + (weights[..., None] * values).sum(2))

    def _around(self, features: torch.Tensor, side: int) -> torch.Tensor:
        """The patches around each, zeros beyond the border: (N, P, C) to (N, P, W, C)."""
        grid = features.transpose(1, 2).unflatten(2, (side, side))
        found = functional.unfold(grid, WINDOW, padding=WINDOW // 2)  # (N, C * W, P)
        return found.unflatten(1, (features.shape[2], WINDOW**2)).permute(0, 3, 2, 1)


class MiniGemini(ProjectorKind):
    """mini_gemini:C, with the width of the first tower."""

    def build(self, option: str, tower_width: int, width: int) -> nn.Module:
        if not (option.isdecimal() and 0 < int(option) < tower_width):
            raise ConfigError(
                f"--mm_projector_type mini_gemini:{option}: give the first tower's width, less than the {tower_width} "
                "of both, and two folders to --vision_tower"
            )
        return Mining(int(option), tower_width - int(option), width)


extension = Extension(choices={"mm_projector_type": MiniGemini()})
