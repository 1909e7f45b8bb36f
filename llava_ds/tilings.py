"""Tiles that images are cut into: sizes, their order, and the text in an image's place. No pixels, no files.

A tiling says into which tiles an image of a size is cut, so that lengths are known without decoding it.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

Size = tuple[int, int]  # width, height


@dataclass(frozen=True)
class Cut:
    """Steps from an image to its tiles.

    steps: sizes that it is resized to, one after the other; grid: tiles across and down of the last one, row by row;
    overview_from: the image that is resized to one more tile, which comes last (0: the one before all steps, 1: the one
    after the first); None without.
    """

    steps: tuple[Size, ...]
    grid: tuple[int, int]
    overview_from: int | None = None

    @property
    def num_tiles(self) -> int:
        """Tiles, with the overview."""
        return self.grid[0] * self.grid[1] + (self.overview_from is not None)


class Tiling(Protocol):
    """What cuts images into tiles. side: of a tile in pixels; image_token: stands in a conversation for as many
    features as an image has for each, None where image positions have no text; placeholder: what the chat template
    writes for an image; takes_whole_images: tiles are the cells of an image, which a tower sees as a whole."""

    side: int
    image_token: str | None
    placeholder: str | None
    takes_whole_images: bool

    def cut(self, size: Size) -> Cut:
        """Return the tiles of an image. Raises DataError for one that can't be cut."""

    def text(self, cut: Cut) -> str:
        """Return the text in the image's place."""


@dataclass(frozen=True)
class AskedSize:
    """Size of an image, or of each frame of a video, by the settings of its part of a message.

    least, most: pixels, of a frame for a video; total: pixels of a video, of which two frames count once; resized:
    width and height before they are rounded to cells. None where the part has no such setting.
    Source: fetch_image and fetch_video of qwen-vl-utils, whose bounds take the place of those that are not given.
    """

    least: float | None = None
    most: float | None = None
    total: float | None = None
    resized: Size | None = None


class Grid(NamedTuple):
    """Cells of an image, or of a video's moments whose features are in a row, in a sequence.

    across, down: of a moment; moments: of time; interval: between their positions in the language model.
    """

    across: int
    down: int
    moments: int = 1
    interval: float = 1.0


@dataclass(frozen=True)
class FlexTiling:
    """Cells of SigLIP 2 NaFlex: the image in its own shape, at as many cells as there may be, each one feature.

    side: of a cell in pixels; merge: patches along it; most: cells of an image.
    Source: transformers' Siglip2ImageProcessor, whose cells are single patches.
    """

    image_token: ClassVar[None] = None
    placeholder: ClassVar[None] = None
    takes_whole_images: ClassVar[bool] = True

    side: int
    merge: int
    most: int

    window: ClassVar[None] = None  # all patches of an image see each other

    def cut(self, size: Size) -> Cut:
        """The cells of an image."""
        least, largest = _FLEX_STEP / 10, 100.0  # scales, between which the right one is searched for
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
