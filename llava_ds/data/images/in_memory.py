# n tiles of an image, S side of a tile
"""Tiles of images that are not read from files."""

import torch
from PIL import Image

from llava_ds.data.images.decode import aspect_ratio_of, check_resized, to_rgb
from llava_ds.data.images.resize import cut_by, to_tile
from llava_ds.data.sample import FileRef, Media
from llava_ds.geometry import ImageOptions, tiled_cut

NO_FILE = FileRef("the image")


def tiles_of(image: Image.Image, options: ImageOptions) -> torch.Tensor:
    """Return an image's tiles, (n, 3, S, S) uint8. Not for anyres. Raises DataError for an image that is too narrow."""
    shown = to_rgb(image, options.value_range)
    if options.tiling is not None:
        return cut_by(shown, tiled_cut("image", (image.size,), options), options.size, options.resample)
    ratio = aspect_ratio_of(Media("image", (NO_FILE,)), options)
    check_resized(NO_FILE, image.size, ratio, options)
    return torch.stack([to_tile(shown, ratio, options)])
