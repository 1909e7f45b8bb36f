# h, w height and width of an image, S side of the tower's square
"""Resize images to tiles: with Pillow, pixel for pixel as in LLaVA, or with torch, several times as fast.

Both resize the width first and then the height, and round to 8 bits in between, like any Pillow before 13. torch's
filter weights have 16 bits, Pillow's 22: a pixel may differ by 1 after the first pass, and by 2 after the second (the
weights' magnitudes add up to 1.25).
"""

import sys
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import torch
from PIL import Image

from llava_ds import geometry
from llava_ds.constants import DataError
from llava_ds.geometry import BICUBIC, BILINEAR, ImageOptions, Size
from llava_ds.tilings import Cut

_BAND_PIXELS = 4_000_000  # pixels converted or padded at a time, so that a large image is never copied whole


def to_tile(image: Image.Image, aspect_ratio: str, options: ImageOptions) -> torch.Tensor:
    """Make one tile of a whole image, (3, S, S) uint8.

    aspect_ratio: "pad" pads to a square in the mean colour; "square" and "original" crop the centre; "stretch" changes
    the proportions.

    With fast decoding, values differ from Pillow's by at most 2. Raises DataError for an image so narrow that its
    resized form would have more than max_pixels.
    Source: LLaVA's process_images and transformers' CLIPImageProcessor (PIL), up to rescaling and normalisation.
    """
    size, fast, resample = options.size, options.fast_decoding, options.square_resample
    if aspect_ratio == "pad":
        return padded(image, size, tuple(int(value * 255) for value in options.mean), fast, resample).contiguous()
    if aspect_ratio == "stretch":
        return resized(image, (size, size), fast, resample).contiguous()
    width, height = geometry.resized_size(*image.size, options.scaled_side)
    if width * height > options.max_pixels:
        raise DataError(too_narrow(image.size, (width, height)))
    left, top, right, bottom = geometry.centre_box(width, height, size)
    return resized(image, (width, height), fast, resample)[:, top:bottom, left:right].contiguous()


def cut_tiles(image: Image.Image, size: Size, pinpoint: Size, side: int, fast: bool = False) -> list[torch.Tensor]:
    """Cut an anyres image into tiles, (3, S, S) uint8 each: a stretched overview, then tiles row by row, padded black.

    side: S. Source: LLaVA's process_anyres_image. It resizes by Pillow's default for RGB, bicubic.
    """
    from llava_ds.anyres import fitted_size

    width, height = fitted_size(size, pinpoint)
    left, top = (pinpoint[0] - width) // 2, (pinpoint[1] - height) // 2
    canvas = torch.zeros((3, pinpoint[1], pinpoint[0]), dtype=torch.uint8)
    canvas[:, top : top + height, left : left + width] = resized(image, (width, height), fast)
    overview = resized(image, (side, side), fast)
    tiles = [
        canvas[:, y : y + side, x : x + side] for y in range(0, pinpoint[1], side) for x in range(0, pinpoint[0], side)
    ]
    return [tile.contiguous() for tile in (overview, *tiles)]


def cut_by(image: Image.Image, cut: Cut, side: int, resample: int) -> torch.Tensor:
    """Cut an image into tiles by a tiling's Cut, (n, 3, S, S) uint8. side: S; resample: Pillow's filter number.

    Source: transformers' image processors that use Pillow only.
    """
    images = [image]
    for size in cut.steps:
        images.append(images[-1].resize(size, resample))
    across, down = cut.grid
    whole = _planes(images[-1]).reshape(3, down, side, across, side)
    tiles = whole.permute(1, 3, 0, 2, 4).reshape(-1, 3, side, side)
    if cut.overview_from is None:
        return tiles
    return torch.cat([tiles, _planes(images[cut.overview_from].resize((side, side), resample))[None]])


def too_narrow(size: Size, resized_to: Size) -> str:
    """Build the message for an image that can only be resized with padding."""
    return (
        f"an image of {size[0]} x {size[1]} would be resized to {resized_to[0]} x {resized_to[1]}: "
        "leave it out, or use --image_aspect_ratio pad"
    )


def resized(image: Image.Image, size: Size, fast: bool = False, resample: int = BICUBIC) -> torch.Tensor:
    """Resize an RGB image to (3, h, w) uint8, a non-contiguous view. resample: Pillow's filter number.

    fast: use torch; pixels differ by at most 2 of 255. Each pass is a call, because Pillow 13 by itself resizes the
    height first if that is less work, and then differs by up to 15 of 255 in a stretched overview.
    """
    if fast:
        return _by_torch(image, size, (image.size, (0, 0), (0, 0, 0)), resample)
    narrow = image.resize((size[0], image.height), resample)
    return _planes(narrow.resize(size, resample))


def padded(
    image: Image.Image, size: int, colour: tuple[int, int, int], fast: bool = False, resample: int = BICUBIC
) -> torch.Tensor:
    """Pad an RGB image to a square of the given colour and resize it: (3, size, size) uint8, a view. resample: as in
    resized.

    Source: LLaVA's expand2square.
    """
    side, left, top = geometry.square_padding(*image.size)
    if fast:
        return _by_torch(image, (size, size), ((side, side), (left, top), colour), resample)
    # Resizing in bands changes no pixel, because all rows of padding are equal.
    row = Image.new("RGB", (side, 1), colour).resize((size, 1), resample)
    narrow = row.resize((size, side), Image.Resampling.NEAREST)
    for first, last in bands(side, image.height):
        band = Image.new("RGB", (side, last - first), colour)
        band.paste(image, (left, -first))
        narrow.paste(band.resize((size, last - first), resample), (0, top + first))
    return _planes(narrow.resize((size, size), resample))


def bands(width: int, height: int) -> Iterator[tuple[int, int]]:
    """Yield (first, end) rows of bands of a few million pixels."""
    step = max(1, _BAND_PIXELS // width)
    for first in range(0, height, step):
        yield first, min(first + step, height)


def _planes(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)  # (3, h, w)


def _by_torch(
    image: Image.Image, size: Size, ground: tuple[Size, tuple[int, int], tuple[int, int, int]], resample: int
) -> torch.Tensor:
    """Resize an image on a canvas. ground: the canvas size, the image's corner on it, and the canvas colour.

    A pixel is an int32 of four bytes in Pillow's own memory: copies would take a third of a small image's time.
    """
    canvas, corner, colour = ground
    parts = list(bands(canvas[0], image.height))
    if len(parts) == 1 and canvas == image.size:
        return _planes_of(_interpolated(_packed(image), size, resample))
    filler = int.from_bytes(bytes((*colour, 255)), sys.byteorder, signed=True)
    narrow = torch.full((canvas[1], size[0]), filler, dtype=torch.int32)
    for first, last in parts:
        band = _packed(image if len(parts) == 1 else image.crop((0, first, image.width, last)))
        if canvas[0] > image.width:
            pixels, band = band, torch.full((last - first, canvas[0]), filler, dtype=torch.int32)
            band[:, corner[0] : corner[0] + image.width] = pixels
        narrow[corner[1] + first : corner[1] + last] = _interpolated(band, (size[0], last - first), resample)
    return _planes_of(_interpolated(narrow, size, resample))


def _packed(image: Image.Image) -> torch.Tensor:
    """View the pixels as (h, w) int32, in the image's own memory if that is one block. Don't write to the result."""
    try:
        pixels = pa.array(image).values
    except ValueError:  # several blocks, as with PILLOW_BLOCK_SIZE and PILLOW_ALIGNMENT
        pixels = pa.array(np.frombuffer(image.tobytes("raw", "RGBX"), np.uint8))
    return torch.from_dlpack(pixels).view(torch.int32).view(image.height, image.width)


def _planes_of(pixels: torch.Tensor) -> torch.Tensor:
    return _unpacked(pixels)[0, :3]  # (3, h, w)


def _unpacked(pixels: torch.Tensor) -> torch.Tensor:
    """View (h, w) int32 as (1, 4, h, w) uint8, channels last."""
    return pixels.view(torch.uint8).view(1, *pixels.shape, 4).permute(0, 3, 1, 2)


def _interpolated(pixels: torch.Tensor, size: Size, resample: int) -> torch.Tensor:
    """Resize (h, w) int32 pixels to a size (width, height)."""
    mode = {BILINEAR: "bilinear", BICUBIC: "bicubic"}[resample]
    found = torch.nn.functional.interpolate(_unpacked(pixels), size=size[::-1], mode=mode, antialias=True)
    return found.permute(0, 2, 3, 1).contiguous().view(torch.int32)[0, ..., 0]
