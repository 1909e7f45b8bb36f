# N image tiles, P patches, Q kept ones, C tower width, D language-model width
"""PruMerge: only the most telling patches become tokens, and the others are merged into them.

The idea of LLaVA-PruMerge (arXiv 2403.15388): a few patches stand out from the rest of an image; they are kept, and
every other patch is averaged into the kept one that it resembles most. Written from the paper. It keeps P / K**2
patches of every tile, because the number of an image's tokens is known before its content is; and it measures how far
a patch is from the tile's mean, where the paper takes the class token's attention.

    --plugin examples/plugins/prumerge.py --mm_projector_type prumerge:2
"""

import torch
from torch import nn
from torch.nn import functional

from llava_ds.constants import ConfigError
from llava_ds.extensions.base import Extension
from llava_ds.extensions.plugin_slots import ProjectorKind


class Merged(nn.Module):
    """(N, P, C) to (N, Q, D), kept patches in their order."""

    def __init__(self, stride: int, tower_width: int, width: int) -> None:
        super().__init__()
        self.stride = stride
        self.mlp = nn.Sequential(nn.Linear(tower_width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        patches, width = features.shape[1:]
        keys = functional.normalize(features.detach().float(), dim=2)  # choices have no gradient
        distance = 1 - functional.cosine_similarity(keys, keys.mean(1, keepdim=True), dim=2)  # (N, P)
        kept = distance.topk(patches // self.stride**2, dim=1).indices.sort(1).values  # (N, Q)
        kept_keys = keys.gather(1, kept[..., None].expand(-1, -1, width))
        nearest = (keys @ kept_keys.transpose(1, 2)).argmax(2)  # (N, P), in Q; a kept patch is its own
        members = functional.one_hot(nearest, kept.shape[1]).to(features.dtype)  # (N, P, Q)
        sums = members.transpose(1, 2) @ features
        return self.mlp(sums / members.sum(1)[..., None].clamp(min=1))


class PruMerge(ProjectorKind):
    """prumerge:K keeps one of K * K patches; 2 without a number."""

    def stride(self, option: str) -> int:
        if option and not (option.isdecimal() and int(option) > 0):
            raise ConfigError(f"--mm_projector_type prumerge:{option}: give a whole number, like :2")
        return int(option or 2)

    def build(self, option: str, tower_width: int, width: int) -> nn.Module:
        return Merged(self.stride(option), tower_width, width)


extension = Extension(choices={"mm_projector_type": PruMerge()})
