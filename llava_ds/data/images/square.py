# S side of the tower's square
"""From a picture to the squares that the tower sees."""

import torch
from PIL import Image

from llava_ds import geometry
from llava_ds.constants import MAX_IMAGE_PIXELS, DataError
from llava_ds.data.images.resize import padded, resized
from llava_ds.geometry import Size


def to_pixels(
    image: Image.Image,
    size: int,
    aspect_ratio: str,
    mean: tuple[float, ...],
    max_pixels: int = MAX_IMAGE_PIXELS,
    fast: bool = False,
) -> torch.Tensor:
    """(3, S, S) uint8. "pad" keeps everything on the mean colour, "square" and "original" crop the centre,
    "stretch" changes the proportions.

    size: S; fast: no value differs by more than 2. Raises DataError for a picture so narrow that its resized form
    would have more than max_pixels.
    Source: LLaVA's process_images and transformers' CLIPImageProcessor (PIL), up to rescaling and normalisation.
    """
    if aspect_ratio == "pad":
        return padded(image, size, tuple(int(value * 255) for value in mean), fast).contiguous()
    if aspect_ratio == "stretch":
        return resized(image, (size, size), fast).contiguous()
    width, height = geometry.resized_size(*image.size, size)
    if width * height > max_pixels:
        raise DataError(too_narrow(image.size, (width, height)))
    left, top, right, bottom = geometry.centre_box(width, height, size)
    return resized(image, (width, height), fast)[:, top:bottom, left:right].contiguous()


def cut(image: Image.Image, size: Size, pinpoint: Size, side: int, fast: bool = False) -> list[torch.Tensor]:
    """The overview, stretched to a square, and the tiles of the picture on black, row by row: (3, S, S) uint8 each.

    side: S. Source: LLaVA's process_anyres_image, which resizes by Pillow's default for RGB, bicubic.
    """
    width, height = geometry.fitted_size(size, pinpoint)
    left, top = (pinpoint[0] - width) // 2, (pinpoint[1] - height) // 2
    canvas = torch.zeros((3, pinpoint[1], pinpoint[0]), dtype=torch.uint8)
    canvas[:, top : top + height, left : left + width] = resized(image, (width, height), fast)
    overview = resized(image, (side, side), fast)
    tiles = [
        canvas[:, y : y + side, x : x + side] for y in range(0, pinpoint[1], side) for x in range(0, pinpoint[0], side)
    ]
    return [tile.contiguous() for tile in (overview, *tiles)]


def too_narrow(size: Size, resized_to: Size) -> str:
    """Why a picture can't be resized without the padding that would fit it in."""
    return (
        f"a picture of {size[0]} x {size[1]} would be resized to {resized_to[0]} x {resized_to[1]}: "
        "leave it out, or use --image_aspect_ratio pad"
    )
