"""Images in their own shape, for --mm_native_resolution: their cells, and the inputs that the tower needs for them."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from llava_ds.config.arguments import Arguments
from llava_ds.constants import ConfigError
from llava_ds.geometry import ImageSpec, TiledImageOptions
from llava_ds.layouts import MediaLayout
from llava_ds.tilings import Cut, Size

_FLEX_STEP = 1e-5  # precision of the search for the scale


@dataclass(frozen=True)
class FlexTiling:
    """Cuts images in their own shape into as many cells as allowed, for SigLIP 2 NaFlex. A cell gives one feature.

    side: side of a cell in pixels; merge: number of patches along a side; most: maximum number of cells per image.
    Source: transformers' Siglip2ImageProcessor, whose cells are single patches.
    """

    image_token: ClassVar[None] = None
    placeholder: ClassVar[None] = None
    takes_whole_images: ClassVar[bool] = True
    window: ClassVar[None] = None  # all patches of an image attend to each other

    side: int
    merge: int
    most: int

    def cut(self, size: Size) -> Cut:
        """Compute the cells of an image."""
        least, largest = _FLEX_STEP / 10, 100.0  # bounds for the scale search
        while largest - least >= _FLEX_STEP:
            scale = (least + largest) / 2
            across, down = self._cells(size, scale)
            if across * down <= self.most:
                least = scale
            else:
                largest = scale
        across, down = self._cells(size, least)
        return Cut(((across * self.side, down * self.side),), (across, down))

    def _cells(self, size: Size, scale: float) -> tuple[int, int]:
        width, height = (max(1, math.ceil(length * scale / self.side)) for length in size)
        return width, height


@dataclass(frozen=True)
class NativeImageOptions(TiledImageOptions):
    """Options of images in their own shape, for --mm_native_resolution. Their tiles are cells."""

    def tower_inputs(self, layouts: Sequence[MediaLayout]) -> dict[str, object]:
        """Return shapes (patches down and across of each image), cu_seqlens (images + 1,) int32 (start offsets of the
        images' patches), and max_seqlen (most patches of an image)."""
        merge, cells = self.tiling.merge, [layout.cells for layout in layouts] or [(1, 1)]  # (1, 1) for the blank tile
        shapes = tuple((down * merge, across * merge) for across, down in cells)
        lengths = torch.tensor([0, *(down * across for down, across in shapes)])
        return {"shapes": shapes, "cu_seqlens": lengths.cumsum(0).to(torch.int32), "max_seqlen": int(lengths.max())}


def native_options(args: Arguments, spec: ImageSpec, tiling: FlexTiling) -> NativeImageOptions:
    """Build image options for images in their own shape. Raises ConfigError for flags that change the shape."""
    model, data, most = args.model, args.data, tiling.most
    if data.max_pixels is not None:
        most = data.max_pixels // tiling.side**2
    others = {
        f"--image_aspect_ratio {data.image_aspect_ratio}": data.image_aspect_ratio != "square",
        f"--mm_patch_merge_type {model.mm_patch_merge_type}": model.mm_patch_merge_type != "flat",
        f"--fast_image_decoding {data.fast_image_decoding}": data.fast_image_decoding,
        f"--min_pixels {data.min_pixels}": data.min_pixels is not None,
        f"--max_pixels {data.max_pixels}": most < 1,
        f"--video_min_pixels {data.video_min_pixels}": data.video_min_pixels is not None,
        f"--video_max_pixels {data.video_max_pixels}": data.video_max_pixels is not None,
    }
    if problems := [flag for flag, is_other in others.items() if is_other]:
        raise ConfigError(
            f"--mm_native_resolution True with {', '.join(problems)}: every image keeps its own shape, with at most "
            f"--max_pixels, {tiling.side**2} or more: leave the others out"
        )
    tiling = dataclasses.replace(tiling, most=most)
    return NativeImageOptions(
        spec.size,
        spec.patch_size,
        spec.mean,
        max_pixels=data.max_image_pixels,
        value_range=data.image_value_range,
        tiling=tiling,
        resample=spec.resample,
    )
