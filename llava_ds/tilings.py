"""Tilings of images: sizes, order, and placeholder text. No pixels, no files.

A tiling computes the tiles of an image from its size, so that lengths are known without decoding.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

Size = tuple[int, int]  # width, height


@dataclass(frozen=True)
class Cut:
    """Steps from an image to its tiles.

    steps: sizes to which it is resized in sequence; grid: tiles across and down of the last size, row by row;
    overview_from: index of the image that is resized to one more, last tile (0: the original, 1: after the first step),
    or None.
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
class RequestedSize:
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
