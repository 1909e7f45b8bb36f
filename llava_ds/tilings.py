"""Tilings of images: sizes, order, and placeholder text. No pixels, no files.

A tiling computes the tiles of an image from its size, so that lengths are known without decoding.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

Size = tuple[int, int]  # width, height


@dataclass(frozen=True)
class Cut:
    """Steps from an image to its tiles.

    steps: sizes to which it is resized in sequence; grid: tiles across and down of the last size, row by row;
    overview_from: index of the image that is resized to one further, last tile (0: the original, 1: after the first
    step), or None.
    """

    steps: tuple[Size, ...]
    grid: tuple[int, int]
    overview_from: int | None = None

    @property
    def num_tiles(self) -> int:
        """Number of tiles, overview included."""
        return self.grid[0] * self.grid[1] + (self.overview_from is not None)


class Tiling(Protocol):
    """Rule that cuts images into tiles.

    side: pixels of a tile; image_token: placeholder in a conversation, one per group of features, None if image
    positions have no text; placeholder: the chat template's text for an image; takes_whole_images: tiles are the cells
    of an image, and the tower takes the image as a whole.
    """

    side: int
    image_token: str | None
    placeholder: str | None
    takes_whole_images: bool

    def cut(self, size: Size) -> Cut:
        """Compute the tiles of an image. Raises DataError for one that can't be cut."""

    def text(self, cut: Cut) -> str:
        """Placeholder text of the image."""


@dataclass(frozen=True)
class AskedSize:
    """Size of an image, or of each video frame, from the settings of its part of a message.

    least, most: pixels, per frame for a video; total: pixels of a video, counting two frames as one; resized: width and
    height before rounding to cells. None for settings that are missing.
    Source: fetch_image and fetch_video of qwen-vl-utils. Missing bounds take its defaults.
    """

    least: float | None = None
    most: float | None = None
    total: float | None = None
    resized: Size | None = None


class Grid(NamedTuple):
    """Cells of an image, or of a video's moments with consecutive features, in a sequence.

    across, down: per moment; moments: in time; interval: between their positions in the language model.
    """

    across: int
    down: int
    moments: int = 1
    interval: float = 1.0


@dataclass(frozen=True)
class FlexTiling:
    """Cells of SigLIP 2 NaFlex: the image in its own shape, with as many cells as allowed, one feature each.

    side: of a cell in pixels; merge: patches along a side; most: cells of an image.
    Source: transformers' Siglip2ImageProcessor, whose cells are single patches.
    """

    image_token: ClassVar[None] = None
    placeholder: ClassVar[None] = None
    takes_whole_images: ClassVar[bool] = True

    side: int
    merge: int
    most: int

    window: ClassVar[None] = None  # all patches of an image attend to each other

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


_FLEX_STEP = 1e-5
