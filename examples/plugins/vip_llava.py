# N image tiles of S x S pixels
"""ViP-LLaVA: visual prompts, drawn on the image, point to what a question is about.

The idea of ViP-LLaVA (arXiv 2312.00784): a box is drawn on the pixels in a colour, so that the model needs nothing new
to see it. Written from the paper. The boxes are under the record's key "prompts", [left, top, right, bottom] from 0 to
1 on the square that the tower sees; colours change from one to the next. It needs one image in a record, in one tile.
Whoever asks the exported model draws on the image first.

    --plugin examples/plugins/vip_llava.py --image_aspect_ratio square
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from llava_ds.batch import Batch
from llava_ds.config.bounds import Count
from llava_ds.config.flags import flags_of
from llava_ds.constants import DataError
from llava_ds.extensions.base import Extension, ExtensionFlags, SessionPart
from llava_ds.extensions.plugin_slots import RecordFields

_vip_llava, _ = flags_of("vip_llava")
COLOURS = ((255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0), (255, 0, 255), (0, 255, 255))


@dataclass(frozen=True)
class Flags(ExtensionFlags):
    """Flags of the drawing."""

    differs: ClassVar = "it does not draw the prompts"

    vip_llava_line: Count = _vip_llava(2, "Width of a line, in pixels.")

    def problems(self, args) -> Iterator[str]:
        if str(args.data.image_aspect_ratio).startswith("anyres"):
            yield "--plugin vip_llava.py needs images in one tile: give --image_aspect_ratio square"


class Prompts(RecordFields):
    """The key "prompts": boxes."""

    names = ("prompts",)

    def load(self, values):
        tensors = super().load(values)
        if any(each.ndim != 2 or each.shape[1] != 4 for each in tensors.values()):
            raise DataError("'prompts' is not a list of [left, top, right, bottom]")
        return tensors


def drawn(tile: torch.Tensor, boxes: torch.Tensor, line: int) -> torch.Tensor:
    """Return a tile (3, S, S) uint8 with the outlines of boxes (K, 4)."""
    tile, size = tile.clone(), tile.shape[-1]
    for number, box in enumerate((boxes.clamp(0, 1) * (size - 1)).round().int().tolist()):
        left, top, right, bottom = box
        colour = torch.tensor(COLOURS[number % len(COLOURS)], dtype=torch.uint8, device=tile.device)[:, None, None]
        area = tile[:, top : bottom + 1, left : right + 1]
        inner = area[:, line:-line, line:-line].clone()
        area[:] = colour
        area[:, line : line + inner.shape[1], line : line + inner.shape[2]] = inner
    return tile


class Drawing(SessionPart):
    """Draws before the tower sees the pixels."""

    def built(self, model) -> None:
        plain, line = model.begin, self.plan.args.own["vip_llava"].vip_llava_line
        patches = self.plan.model.tower.images.num_tokens

        def begin(batch: Batch):
            pixels, features = batch.pixel_values.clone(), batch.placing.features
            ends = batch.cu_seqlens[1:].long()
            samples = torch.bucketize(batch.placing.positions[: len(features)], ends, right=True)
            for number, boxes in enumerate(batch.extra.get("vip_llava.prompts", [])):
                if boxes is not None and (samples == number).any():
                    tile = features[samples == number][0] // patches
                    pixels[tile] = drawn(pixels[tile], boxes, line)
            return plain(dataclasses.replace(batch, pixel_values=pixels))

        model.begin = begin


extension = Extension(part=Drawing, fields=Prompts())
