# N image tiles, P patches, Q = P / K**2 regions of K x K patches, C tower width, D language-model width
"""TokenPacker: a projector whose coarse tokens attend to the patches of their region.

The idea of TokenPacker (arXiv 2407.02392): an image is averaged to fewer, coarse features; each is a query that draws
the details of its K x K patches in by cross-attention, and becomes one token. Written from the paper; it takes the
features of one layer of the tower, the paper those of several.

    --plugin examples/plugins/token_packer.py --mm_projector_type token_packer:2
"""

import math

import torch
from torch import nn

from llava_ds.constants import ConfigError
from llava_ds.extensions.base import Extension
from llava_ds.extensions.plugin_slots import ProjectorKind
from llava_ds.model.projector import space_to_depth


class Packer(nn.Module):
    """(N, P, C) to (N, Q, D)."""

    def __init__(self, stride: int, tower_width: int, width: int) -> None:
        super().__init__()
        self.stride = stride
        self.coarse_norm, self.fine_norm = nn.LayerNorm(tower_width), nn.LayerNorm(tower_width)
        self.query = nn.Linear(tower_width, tower_width)
        self.key = nn.Linear(tower_width, tower_width, bias=False)  # a bias would change no softmax
        self.value = nn.Linear(tower_width, tower_width)
        self.out = nn.Linear(tower_width, tower_width)
        self.mlp = nn.Sequential(nn.Linear(tower_width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        n, patches, width = features.shape
        regions = space_to_depth(features, self.stride).view(n, patches // self.stride**2, self.stride**2, width)
        coarse, fine = regions.mean(2, keepdim=True), self.fine_norm(regions)  # (N, Q, 1, C), (N, Q, K * K, C)
        scores = self.query(self.coarse_norm(coarse)) @ self.key(fine).transpose(2, 3) / math.sqrt(width)
        detail = self.out(scores.softmax(3) @ self.value(fine))  # (N, Q, 1, C)
        return self.mlp((coarse + detail).squeeze(2))


class TokenPacker(ProjectorKind):
    """token_packer:K makes one token of K x K patches; 2 without a number."""

    def stride(self, option: str) -> int:
        if option and not (option.isdecimal() and int(option) > 0):
            raise ConfigError(f"--mm_projector_type token_packer:{option}: give the side of a region, like :2")
        return int(option or 2)

    def build(self, option: str, tower_width: int, width: int) -> nn.Module:
        return Packer(self.stride(option), tower_width, width)


extension = Extension(choices={"mm_projector_type": TokenPacker()})
