# h, w height and width
"""Convert images with more than 8 bits per value to 8 bits, and describe those that lose most of their information."""

import functools

import numpy as np
from PIL import Image

from llava_ds.config.bounds import OWN_RANGE, range_of_values

PART = 1 / 16  # minimum share of the range to use, and maximum share of pixels outside it
FLOAT_RANGE, INTEGER_RANGE = (0.0, 255.0), (0.0, 65535.0)  # default values of black and white
_HINT = "--image_value_range scales images of one channel (docs/images.md)"


def to_eight_bits(image: Image.Image, value_range: str | None = None) -> Image.Image:
    """Convert a deep image to 8 bits: round(255 * (value - low) / (high - low)), clipped to 0 and 255.

    value_range: as in ImageOptions. By default, low and high are 0 and 255 for floats, and for 32-bit integers without
    a value above 255; otherwise 0 and 65,535. If value_range is OWN_RANGE, an image of a single value is black. Raises
    ValueError for NaN or infinity.
    """
    values = _values(image, value_range is not None)
    if value_range is not None:
        low, high = _least_and_most(values) if value_range == OWN_RANGE else range_of_values(value_range)
        return Image.fromarray(_scaled(values, low, high))
    if values.dtype.kind == "f":
        return Image.fromarray(values.clip(0, 255).round().astype(np.uint8))
    if image.mode == "I" and values.max(initial=0) <= 255:
        return Image.fromarray(values.clip(0, 255).astype(np.uint8))
    # 16 bits to 8; Pillow's own conversion would clip at 255.
    return Image.fromarray(_sixteen_to_eight()[values.clip(0, 65535)])


def described(image: Image.Image, value_range: str | None = None) -> str:
    """Describe a decoded image that uses less than 1/16 of its range, or has more than 1/16 of its pixels outside it;
    else "". Raises ValueError as to_eight_bits does."""
    if not image.mode.startswith(("I", "F")):  # 16 bits per channel, of which Pillow reads 8
        extrema = image.getextrema()
        bands = extrema if isinstance(extrema[0], tuple) else (extrema,)
        most = max(high for _, high in bands[: 1 if image.mode == "LA" else 3])
        return f"16 bits per channel, up to {256 * most + 255} of 65535, read as 8 bits" if most < 256 * PART else ""
    values = _values(image, True)
    least, most = _least_and_most(values)
    if value_range is None:
        low, high = FLOAT_RANGE if values.dtype.kind == "f" or (image.mode == "I" and most <= 255) else INTEGER_RANGE
    else:
        low, high = (least, most) if value_range == OWN_RANGE else range_of_values(value_range)
    shown = min(most, high) - max(least, low)
    outside = np.count_nonzero((values < low) | (values > high)) / max(1, values.size)
    if shown >= PART * (high - low) and outside <= PART:
        return ""
    kind = "floats" if values.dtype.kind == "f" else "16 bits" if image.mode != "I" else "integers"
    return f"{kind} from {least:g} to {most:g}, black to white {low:g} to {high:g}"


def deep_images_line(number: int, first: list[str]) -> str:
    """Summarize images that `described` reports. first: the first descriptions."""
    more = f" and {number - len(first):,} more" if number > len(first) else ""
    have = "image uses" if number == 1 else "images use"
    return f"{number:,} {have} less than 1/16 of their range, or exceed it: {'; '.join(first)}{more}: {_HINT}"


def _values(image: Image.Image, as_stored: bool) -> np.ndarray:
    """Pixel values (h, w). as_stored: restore unsigned 32-bit integers that Pillow reads as signed."""
    values = np.asarray(image)
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise ValueError("it holds values that are not finite (NaN or infinity)")
    tags = getattr(image, "tag_v2", {})
    if as_stored and image.mode == "I" and tags.get(258) == (32,) and tags.get(339, (1,)) == (1,):
        return values.view(np.uint32)
    return values


def _least_and_most(values: np.ndarray) -> tuple[float, float]:
    return (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)


def _scaled(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """Scale to (h, w) uint8."""
    if high == low:
        return np.zeros(values.shape, np.uint8)
    scaled = (values.astype(np.float64) - low) * (255 / (high - low))
    return np.rint(scaled.clip(0, 255)).astype(np.uint8)


@functools.cache
def _sixteen_to_eight() -> np.ndarray:
    return ((np.arange(65536) + 128) // 257).astype(np.uint8)
