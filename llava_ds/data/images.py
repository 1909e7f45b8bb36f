"""Pictures from disk to uint8 squares. Normalisation happens on the device, in the tower."""

import warnings

import numpy as np
import torch
from PIL import Image, ImageOps

from llava_ds import geometry
from llava_ds.constants import MAX_IMAGE_PIXELS, DataError


def load_image(path: str, max_pixels: int = MAX_IMAGE_PIXELS) -> Image.Image:
    """An RGB picture, turned as its EXIF data says, its transparent parts white.

    The size is read from the header and checked before anything is decoded. Raises DataError with the path.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # max_pixels is the bound here
            with Image.open(path) as image:
                width, height = image.size
                if width * height > max_pixels:
                    raise DataError(
                        f"{path} has {width} x {height} pixels, more than the bound of {max_pixels}: "
                        "scale it down or leave it out (training has --max_image_pixels to raise the bound)"
                    )
                image.load()
                return to_rgb(ImageOps.exif_transpose(image))
    except DataError:
        raise
    except Image.DecompressionBombError as error:
        raise DataError(f"{path}: {error}") from error
    except Exception as error:  # Pillow's decoders raise almost any type on broken files
        raise DataError(
            f"{path} can't be read as a picture ({type(error).__name__}: {error}): replace it or leave it out"
        ) from error


def to_rgb(image: Image.Image) -> Image.Image:
    """The picture as a person would see it on white, in RGB."""
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        values = np.asarray(image, dtype=np.float64)
        if image.mode.startswith("I;16") or (image.mode == "I" and values.max(initial=0) > 255):
            values = values / 257  # 16 bits to 8; Pillow's own conversion would cut everything above 255 off
        image = Image.fromarray(values.clip(0, 255).round().astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        ground = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(ground, image).convert("RGB")
    return image.convert("RGB")


def to_pixels(
    image: Image.Image, size: int, aspect_ratio: str, mean: tuple[float, ...], max_pixels: int = MAX_IMAGE_PIXELS
) -> torch.Tensor:
    """(3, size, size) uint8. aspect_ratio "square" crops the centre, "pad" keeps everything on the mean colour.

    Raises DataError for a picture so narrow that its resized form would have more than max_pixels.
    Source: LLaVA's process_images and transformers' CLIPImageProcessor (PIL), up to rescaling and normalisation.
    """
    if aspect_ratio == "pad":
        image = _expand_to_square(image, tuple(int(value * 255) for value in mean))
    width, height = geometry.resized_size(*image.size, size)
    if width * height > max_pixels:
        raise DataError(
            f"a picture of {image.size} would be resized to {width} x {height}: use --image_aspect_ratio pad"
        )
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    image = image.crop(geometry.centre_box(*image.size, size))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def _expand_to_square(image: Image.Image, colour: tuple[int, ...]) -> Image.Image:
    side, left, top = geometry.square_padding(*image.size)
    if image.size == (side, side):
        return image
    square = Image.new("RGB", (side, side), colour)
    square.paste(image, (left, top))
    return square
