# h, w height and width of a picture
"""Pictures in another size, bicubic: by Pillow, pixel for pixel LLaVA's, or by torch, several times as fast.

Both go over the width first and then over the height, and round to 8 bits between: the pixels are those of any Pillow
before 13. torch has weights of 16 bits where Pillow has 22: a pixel may come out by 1 higher or lower after the first
pass, and by 2 after the second, whose weights add up to 1.25 in magnitude.
"""

import sys
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import torch
from PIL import Image

from llava_ds import geometry
from llava_ds.geometry import Size

_BAND_PIXELS = 4_000_000  # converted or padded at a time, so that no second copy of a large picture is made


def resized(image: Image.Image, size: Size, fast: bool = False) -> torch.Tensor:
    """(3, h, w) uint8, a view of other strides: the RGB picture in another size.

    fast: no pixel differs by more than 2 of 255. Pillow 13 by itself begins with the height where that is less work,
    and rounds otherwise: by up to 15 of 255 in a stretched overview.
    """
    if fast:
        return _by_torch(image, size, image.size, (0, 0), (0, 0, 0))
    narrow = image.resize((size[0], image.height), Image.Resampling.BICUBIC)
    return _planes(narrow.resize(size, Image.Resampling.BICUBIC))


def padded(image: Image.Image, size: int, colour: tuple[int, int, int], fast: bool = False) -> torch.Tensor:
    """(3, size, size) uint8, a view: the RGB picture in the middle of a square of the colour, resized as by resized.

    Source: LLaVA's expand2square.
    """
    side, left, top = geometry.square_padding(*image.size)
    if fast:
        return _by_torch(image, (size, size), (side, side), (left, top), colour)
    # Made and narrowed a band at a time, which changes no pixel; and all rows of padding are one row.
    row = Image.new("RGB", (side, 1), colour).resize((size, 1), Image.Resampling.BICUBIC)
    narrow = row.resize((size, side), Image.Resampling.NEAREST)
    for first, last in bands(side, image.height):
        band = Image.new("RGB", (side, last - first), colour)
        band.paste(image, (left, -first))
        narrow.paste(band.resize((size, last - first), Image.Resampling.BICUBIC), (0, top + first))
    return _planes(narrow.resize((size, size), Image.Resampling.BICUBIC))


def bands(width: int, height: int) -> Iterator[tuple[int, int]]:
    """(first, last) rows of bands of some million pixels."""
    step = max(1, _BAND_PIXELS // width)
    for first in range(0, height, step):
        yield first, min(first + step, height)


def _planes(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)  # (3, h, w)


def _by_torch(
    image: Image.Image, size: Size, canvas: Size, corner: tuple[int, int], colour: tuple[int, int, int]
) -> torch.Tensor:
    """The picture, its corner there on a canvas of the colour, all of which is resized.

    A pixel is an int32 of four bytes, as Pillow keeps it: read where it lies, for of a small picture's time the copies
    and their fresh memory would take a third.
    """
    parts = list(bands(canvas[0], image.height))
    if len(parts) == 1 and canvas == image.size:
        return _planes_of(_interpolated(_packed(image), size))
    filler = int.from_bytes(bytes((*colour, 255)), sys.byteorder, signed=True)
    narrow = torch.full((canvas[1], size[0]), filler, dtype=torch.int32)
    for first, last in parts:
        band = _packed(image if len(parts) == 1 else image.crop((0, first, image.width, last)))
        if canvas[0] > image.width:
            picture, band = band, torch.full((last - first, canvas[0]), filler, dtype=torch.int32)
            band[:, corner[0] : corner[0] + image.width] = picture
        narrow[corner[1] + first : corner[1] + last] = _interpolated(band, (size[0], last - first))
    return _planes_of(_interpolated(narrow, size))


def _packed(image: Image.Image) -> torch.Tensor:
    """(h, w) int32, the picture's own memory where it is in one piece: not to be written to."""
    try:
        pixels = pa.array(image).values
    except ValueError:  # in several, which a band is only if the environment says so (PILLOW_BLOCK_SIZE, _ALIGNMENT)
        pixels = pa.array(np.frombuffer(image.tobytes("raw", "RGBX"), np.uint8))
    return torch.from_dlpack(pixels).view(torch.int32).view(image.height, image.width)


def _planes_of(pixels: torch.Tensor) -> torch.Tensor:
    return _unpacked(pixels)[0, :3]  # (3, h, w)


def _unpacked(pixels: torch.Tensor) -> torch.Tensor:
    """(h, w) int32 to (1, 4, h, w) uint8, channels last."""
    return pixels.view(torch.uint8).view(1, *pixels.shape, 4).permute(0, 3, 1, 2)


def _interpolated(pixels: torch.Tensor, size: Size) -> torch.Tensor:
    """(h, w) int32 in another size, width and height."""
    found = torch.nn.functional.interpolate(_unpacked(pixels), size=size[::-1], mode="bicubic", antialias=True)
    return found.permute(0, 2, 3, 1).contiguous().view(torch.int32)[0, ..., 0]
