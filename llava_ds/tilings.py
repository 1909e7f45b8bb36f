"""Tilings of images: number and order of tiles, and placeholder text.

A tiling needs only an image's size, so sample lengths can be computed without decoding images.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

Size = tuple[int, int]  # width, height


@dataclass(frozen=True)
class Cut:
    """Steps from an image to its tiles.

    steps: sizes to which the image is resized one after the other. grid: number of tiles across and down in the last
    size, in row order. overview_from: index of the image that is resized to the overview, the last tile (0: the
    original, 1: the result of the first step), or None.
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

    side: side of a tile in pixels. image_token: placeholder token in a conversation, one per group of features; None if
    image positions have no text. placeholder: text of the chat template for an image. takes_whole_images: True if the
    tower encodes an image as a whole, and the tiles are only its cells.
    """

    side: int
    image_token: str | None
    placeholder: str | None
    takes_whole_images: bool

    def cut(self, size: Size) -> Cut:
        """Compute the tiles of an image of this size. Raises DataError if it can't be cut."""

    def text(self, cut: Cut) -> str:
        """Return the placeholder text of an image."""


@dataclass(frozen=True)
class RequestedSize:
    """Size of an image, or of each video frame, as set in its part of a message; None for missing settings.

    least, most: minimum and maximum pixels of an image or frame. total: maximum pixels of a video, counting two frames
    as one. resized: width and height before rounding to cells.
    Source: fetch_image and fetch_video of qwen-vl-utils. Missing bounds take its defaults.
    """

    least: float | None = None
    most: float | None = None
    total: float | None = None
    resized: Size | None = None


class Grid(NamedTuple):
    """Cells of an image, or of video moments whose features are consecutive in a sequence.

    across, down: cells of a moment; moments: number of moments; interval: distance between their position ids.
    """

    across: int
    down: int
    moments: int = 1
    interval: float = 1.0
