# R regions of a pack, N image tiles, P patches, C tower width, D language-model width
"""Osprey: a region's own features stand at a mark in the text.

The idea of Osprey (arXiv 2312.10032): a text names a region of the image by a mark, and the features under the region's
mask are pooled and take the place of the mark's token. Written from the paper. The masks are boxes under the record's
key "regions", [left, top, right, bottom] from 0 to 1 on the square that the tower sees, in the order of the marks; the
mark is one token of the vocabulary. It needs one image in a record, in one tile. Answers of transformers' class don't
have the regions.

    --plugin examples/plugins/osprey.py --osprey_mark "<mask>" --image_aspect_ratio square
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from llava_ds.batch import Batch
from llava_ds.config.flags import flags_of
from llava_ds.constants import ConfigError, DataError
from llava_ds.extensions.base import Extension, ExtensionFlags, SessionPart
from llava_ds.extensions.plugin_slots import RecordFields

_osprey, _ = flags_of("osprey")


@dataclass(frozen=True)
class Flags(ExtensionFlags):
    """Flags of the regions."""

    differs: ClassVar = "transformers' class has no features of regions"

    osprey_mark: str | None = _osprey(None, "The token of the vocabulary that marks a region in a text.")

    def problems(self, args) -> Iterator[str]:
        if self.osprey_mark is None:
            yield "--osprey_mark is missing: give a token of the vocabulary"
        if str(args.data.image_aspect_ratio).startswith("anyres"):
            yield "--plugin osprey.py needs images in one tile: give --image_aspect_ratio square"


class Regions(RecordFields):
    """The key "regions": boxes."""

    names = ("regions",)

    def load(self, values):
        tensors = super().load(values)
        if any(each.ndim != 2 or each.shape[1] != 4 for each in tensors.values()):
            raise DataError("'regions' is not a list of [left, top, right, bottom]")
        return tensors


def head(text_config, tower, args) -> nn.Module:
    """Maps pooled features (R, C) to embeddings (R, D)."""
    width = text_config.hidden_size
    return nn.Sequential(nn.LayerNorm(tower.width), nn.Linear(tower.width, width), nn.GELU(), nn.Linear(width, width))


class Marks(SessionPart):
    """Puts the regions' features into the embeddings that the language model begins with."""

    def built(self, model) -> None:
        mark, tokenizer = self.plan.args.own["osprey"].osprey_mark, self.plan.model.tokenizer
        if mark not in tokenizer.get_vocab():
            raise ConfigError(f"--osprey_mark {mark} is no token of the vocabulary: give one, like '#'")
        number, plain = tokenizer.get_vocab()[mark], model.begin
        model.vision_tower.register_forward_hook(self._keep)

        def begin(batch: Batch):
            embeds, options = plain(batch)  # (1, T, D)
            at = ((batch.input_ids[0] == number) & self._has_regions(batch)).nonzero()[:, 0]  # (R,)
            found = model.own_osprey(self._pooled(batch, at, number))
            return embeds.index_copy(1, at, found[None].to(embeds.dtype)), options

        model.begin = begin

    def _keep(self, tower: nn.Module, inputs: tuple, features: torch.Tensor) -> None:
        self._features = features  # (N, P, C)

    def _has_regions(self, batch: Batch) -> torch.Tensor:
        """Return the tokens whose sample has regions, (T,) bool."""
        given = batch.extra.get("osprey.regions", [None] * (len(batch.cu_seqlens) - 1))
        there = torch.tensor([each is not None for each in given], device=batch.input_ids.device)
        return there.repeat_interleave(batch.cu_seqlens.diff())

    def _pooled(self, batch: Batch, at: torch.Tensor, number: int) -> torch.Tensor:
        """Return the mean feature under each region, (R, C)."""
        _, patches, width = self._features.shape
        ends = batch.cu_seqlens[1:].long()
        samples = torch.bucketize(at, ends, right=True)
        boxes = [each for each in batch.extra.get("osprey.regions", []) if each is not None]
        if sum(map(len, boxes)) != len(at):
            raise DataError(f"a micro-batch has {sum(map(len, boxes))} regions and {len(at)} marks in its texts")
        if not boxes:
            return self._features.new_zeros(0, width)
        # The tile of a sample is the one that its first placed feature is from.
        placed = torch.bucketize(batch.placing.positions[: len(batch.placing.features)], ends, right=True)
        first = (placed[None] == samples[:, None]).int().argmax(1)  # (R,)
        tiles = batch.placing.features.index_select(0, first) // patches
        side = round(patches**0.5)
        centres = (torch.arange(side, device=at.device) + 0.5) / side
        left, top, right, bottom = torch.cat(boxes).to(at.device).unbind(1)
        across = (centres >= left[:, None]) & (centres <= right[:, None])  # (R, side)
        down = (centres >= top[:, None]) & (centres <= bottom[:, None])
        inside = (down[:, :, None] & across[:, None]).flatten(1).to(self._features.dtype)  # (R, P)
        inside = torch.where(inside.any(1, keepdim=True), inside, torch.ones_like(inside))  # too small for a patch
        return (inside[..., None] * self._features.index_select(0, tiles)).sum(1) / inside.sum(1, keepdim=True)


extension = Extension(module=head, part=Marks, fields=Regions())
