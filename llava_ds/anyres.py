"""LLaVA-NeXT's arithmetic for cutting images into tiles. Reads no files."""

import ast
import math
import re

from llava_ds.constants import ConfigError, in_short
from llava_ds.tilings import Size

MAX_GRID_SIDE = 100  # tiles: 10,000 grids, compared with LLaVA-NeXT's 36
DEFAULT_GRIDS = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))  # tiles across and down, in LLaVA-NeXT's order


def parse_pinpoints(text: str | None, size: int) -> tuple[Size, ...]:
    """Parse --image_grid_pinpoints to (width, height) in pixels. The first of equally good ones is chosen.

    text: LLaVA's list "[(336,672),(672,336)]", LLaVA-NeXT's range of grids "(1x1),...,(6x6)", or None for LLaVA-NeXT's
    five grids. size: side of a tile. Raises ConfigError for other texts, and for sides that are not multiples of size.
    """
    if text is None:
        return tuple((across * size, down * size) for across, down in DEFAULT_GRIDS)
    if re.fullmatch(r"[\s\[]*\(\d+x\d+\)[\s,.()\dx]*[\s\]]*", text):
        grids = [(across, down) for across, down in re.findall(r"\((\d+)x(\d+)\)", text)]
        if any(len(tiles) > len(str(MAX_GRID_SIDE)) or int(tiles) > MAX_GRID_SIDE for grid in grids for tiles in grid):
            raise ConfigError(
                f"--image_grid_pinpoints {in_short(text)} names a grid with more than {MAX_GRID_SIDE} tiles in a row "
                "or column: give smaller ones, like (1x1),...,(6x6)"
            )
        (first_across, first_down), (last_across, last_down) = (tuple(map(int, grid)) for grid in (grids[0], grids[-1]))
        found = [
            (across * size, down * size)
            for across in range(first_across, last_across + 1)
            for down in range(first_down, last_down + 1)
        ]
    else:
        try:
            found = [(width, height) for width, height in ast.literal_eval(text)]
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            found = []
    fits = all(type(side) is int and side > 0 and side % size == 0 for pinpoint in found for side in pinpoint)
    if not found or not fits:
        raise ConfigError(
            f"--image_grid_pinpoints {in_short(repr(text))} can't be used: give multiples of the tower's "
            f"{size} pixels, like [({size},{2 * size}),({2 * size},{size})], or a range of grids like (1x1),...,(3x3)"
        )
    return tuple(found)


def best_pinpoint(size: Size, pinpoints: tuple[Size, ...]) -> Size:
    """Choose the pinpoint that keeps most pixels of an image and, among equal ones, has the fewest unused pixels.

    Source: LLaVA's select_best_resolution.
    """
    width, height = size
    best, most_pixels, least_wasted = pinpoints[0], 0, math.inf
    for across, down in pinpoints:
        scale = min(across / width, down / height)
        pixels = min(int(width * scale) * int(height * scale), width * height)
        wasted = across * down - pixels
        if pixels > most_pixels or (pixels == most_pixels and wasted < least_wasted):
            best, most_pixels, least_wasted = (across, down), pixels, wasted
    return best


def fitted_size(size: Size, target: Size) -> Size:
    """Compute the size (width, height) of an image scaled to fit into the target size.

    Source: LLaVA's resize_and_pad_image.
    """
    (width, height), (across, down) = size, target
    by_width, by_height = across / width, down / height
    if by_width < by_height:
        return across, min(math.ceil(height * by_width), down)
    return min(math.ceil(width * by_height), across), down


def unpadded_box(size: Size, across: int, down: int) -> tuple[int, int, int, int]:
    """Compute the box (left, top, right, bottom) of the features that are not padding, in a grid of `across` x `down`.

    The box may be empty for a very narrow image. Source: LLaVA's unpad_image (it rounds the image's size down).
    """
    width, height = size
    if width / height > across / down:
        padding = (down - int(height * (across / width))) // 2
        return 0, padding, across, down - padding
    padding = (across - int(width * (down / height))) // 2
    return padding, 0, across - padding, down


def scaled_down(width: int, height: int, max_tiles: int | None, side: int) -> tuple[int, int] | None:
    """Compute the size to which width x height features are scaled if they exceed max_tiles; None if they don't."""
    if max_tiles is None:
        return None
    times = math.sqrt(height * width / (max_tiles * side**2))
    if times <= 1.1:
        return None
    return max(1, int(width // times)), max(1, int(height // times))  # without max, a side of 0 crashes LLaVA-NeXT
