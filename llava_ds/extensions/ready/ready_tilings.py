"""Compute how ready models' processors tile an image, and the text that replaces it, without reading pixels."""

import math
from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar

from llava_ds.constants import DataError
from llava_ds.tilings import Cut, RequestedSize, Size

MAX_SIDE = 4096  # pixels of the longer side of an image in Idefics3's or SmolVLM's processor
MAX_SHAPE = 200  # maximum ratio of the sides of an image in Qwen-VL's processor


class Tiles:
    """Tiles that the tower encodes as separate images."""

    takes_whole_images: ClassVar[bool] = False

    @property
    def placeholder(self) -> str:
        """The token that the chat template writes for an image."""
        return self.image_token


class Cells(Tiles):
    """Cells of an image. The tower encodes all cells of an image together."""

    takes_whole_images: ClassVar[bool] = True


@dataclass(frozen=True)
class SplitTiling(Tiles):
    """Tiles of Idefics3 and SmolVLM: scale to longest_edge, stretch to whole tiles, and append an overview.

    side: tile size in pixels. longest_edge: in pixels. splits: False to stretch every image to one tile. image_token:
    token of a feature. around: token around tiles. overview: token before the overview. Source: transformers'
    Idefics3ImageProcessor and Idefics3Processor.
    """

    side: int
    longest_edge: int
    splits: bool
    image_token: str = "<image>"
    around: str = "<fake_token_around_image>"
    overview: str = "<global-img>"

    def cut(self, size: Size) -> Cut:
        """Return the tiles of an image."""
        scaled = _below(_to_longest(size, self.longest_edge), MAX_SIDE)
        if not self.splits:
            return Cut((scaled, (self.side, self.side)), (1, 1))
        (width, height), side = scaled, self.side
        if width >= height:
            across = math.ceil(width / side)
            down = math.ceil(int(across * side / (width / height)) / side)
        else:
            down = math.ceil(height / side)
            across = math.ceil(int(down * side * (width / height)) / side)
        whole = across * side, down * side
        return Cut((scaled, whole), (across, down), 2 if (across, down) != (1, 1) else None)

    def text(self, cut: Cut) -> str:
        """Return the text that replaces the image; one image_token represents all features of a tile."""
        last = f"{self.around}{self.overview}{self.image_token}{self.around}"
        if cut.overview_from is None:
            return last
        rows = (
            "".join(f"{self.around}<row_{row}_col_{column}>{self.image_token}" for column in _from_one(cut.grid[0]))
            for row in _from_one(cut.grid[1])
        )
        return "".join(f"{row}\n" for row in rows) + f"\n{last}"


@dataclass(frozen=True)
class CanvasTiling(Tiles):
    """Tiles of InternVL: stretch to the grid with the closest shape; append an overview if it has several tiles.

    side: tile size in pixels. least, most: limits on tiles per grid. splits: False to stretch every image to one tile.
    image_token: token of a feature. start, end: tokens around an image. Source: transformers' GotOcr2ImageProcessor and
    InternVLProcessor.
    """

    side: int
    least: int
    most: int
    splits: bool
    image_token: str
    start: str
    end: str

    def cut(self, size: Size) -> Cut:
        """Return the tiles of an image."""
        across, down = self._grid(size) if self.splits and self.most > 1 else (1, 1)
        overview = 0 if (across, down) != (1, 1) else None
        return Cut(((across * self.side, down * self.side),), (across, down), overview)

    def text(self, cut: Cut) -> str:
        """Return the text that replaces the image; one image_token represents all features of a tile."""
        return f"{self.start}{self.image_token * cut.num_tiles}{self.end}"

    def _grid(self, size: Size) -> tuple[int, int]:
        """Return the grid closest in shape; on ties, the largest of which the image fills more than half."""
        shape, pixels = size[0] / size[1], size[0] * size[1]
        best, smallest = (1, 1), math.inf
        for grid in _grids(self.least, self.most):
            difference = abs(shape - grid[0] / grid[1])
            fills = pixels > 0.5 * self.side * self.side * grid[0] * grid[1]
            if difference < smallest or (difference == smallest and fills):
                best, smallest = grid, difference
        return best


@dataclass(frozen=True)
class SquareTiling(Tiles):
    """The tile of Gemma 3: stretch the image to a square. Two line breaks precede and follow its features.

    side: tile size in pixels. image_token: token of a feature. start, end: tokens around an image; the chat template
    writes only the start token. Source: transformers' Gemma3Processor, without pan and scan.
    """

    side: int
    image_token: str
    start: str
    end: str

    @property
    def placeholder(self) -> str:
        """The token that the chat template writes for an image."""
        return self.start

    def cut(self, size: Size) -> Cut:
        """Return the tile of an image."""
        return Cut(((self.side, self.side),), (1, 1))

    def text(self, cut: Cut) -> str:
        """Return the text that replaces the image; one image_token represents all of its features."""
        return f"\n\n{self.start}{self.image_token}{self.end}\n\n"


def cut_to_requested_size(
    asked: RequestedSize, size: Size, side: int, most: float, num_frames: int | None = None
) -> Cut:
    """Return the cells of an image, or of num_frames frames, at a requested size. most: maximum number of pixels."""
    if asked.resized is not None:
        return _cut_between(asked.resized, side, _LEAST_CELLS * side**2, _MOST_CELLS * side**2)
    cells = _LEAST_CELLS if num_frames is None else _LEAST_FRAME_CELLS
    least = min(cells * side**2, asked.most or math.inf) if asked.least is None else asked.least
    most = min(most, _MOST_CELLS * side**2) if least <= most else _MOST_CELLS * side**2
    if num_frames is not None:
        total = _MOST_VIDEO_CELLS * side**2 if asked.total is None else asked.total
        most = max(min(most, _MOST_FRAME_CELLS * side**2, total / num_frames * 2), int(least * 1.05))
        most = most if asked.most is None else min(most, asked.most)
    elif asked.most is not None:
        most = asked.most
    if least > most:
        raise DataError(
            f"requires a size of at least {least:,.0f} and at most {most:,.0f} pixels: give 'min_pixels' and "
            "'max_pixels' that an image can have"
        )
    return _cut_between(size, side, least, most)


# Default limits on the cells per image, frame and video.
_LEAST_CELLS, _MOST_CELLS, _LEAST_FRAME_CELLS, _MOST_FRAME_CELLS = 4, 16384, 128, 768
_MOST_VIDEO_CELLS = 0.9 * 128_000


def _cut_between(size: Size, side: int, least: float, most: float) -> Cut:
    """Return the cells of an image with `least` to `most` pixels.

    Source: qwen-vl-utils' smart_resize; it differs from transformers' for images of less than half a cell.
    """
    _refuse_narrow(size)
    across, down = (max(1, round(length / side)) for length in size)
    if across * down * side**2 > most:
        scale = math.sqrt(size[0] * size[1] / most)
        across, down = (max(1, math.floor(length / scale / side)) for length in size)
    elif across * down * side**2 < least:
        scale = math.sqrt(least / (size[0] * size[1]))
        across, down = (math.ceil(length * scale / side) for length in size)
    return Cut(((across * side, down * side),), (across, down))


@dataclass(frozen=True)
class CellTiling(Cells):
    """Cells of Qwen-VL: resize to multiples of a cell's side, near the original size. Each cell is one feature.

    side: cell size in pixels. merge: patches along a cell. least, most: limits on an image's pixels. image_token: token
    that represents all features of an image. window: cells along one side of the tower's attention windows, or None.
    table: positions along one side of the tower's learned position table, or None. asked: a size that replaces the
    limits. Source: transformers' smart_resize and Qwen2VLProcessor.
    """

    side: int
    merge: int
    least: int
    most: int
    image_token: str
    window: int | None = None
    table: int | None = None
    asked: RequestedSize | None = field(default=None, repr=False)

    def cut(self, size: Size) -> Cut:
        """Return the cells of an image. Raises DataError for a shape that the processor refuses."""
        if self.asked is not None:
            return cut_to_requested_size(self.asked, size, self.side, self.most)
        _refuse_narrow(size)
        return _cut_to_cells(size, self.side, self.least, self.most)

    def text(self, cut: Cut) -> str:
        """Return the text that replaces the image; one image_token represents all of its features."""
        return self.image_token


@dataclass(frozen=True)
class FrameCells:
    """Cells of a frame in Qwen-VL's videos. The more frames, the fewer pixels each one may have.

    side: cell size in pixels. moment: consecutive frames per cell. least, most: limits on the pixels of a frame or, if
    in_all, of all frames together. cap: an additional limit on features per frame if in_all, otherwise per video
    (cap_pixels_per_frame). image_token: token of all features. start, end: tokens around it. asked: a size that
    replaces the limits. Source: transformers' Qwen2VLVideoProcessor and Qwen3VLVideoProcessor.
    """

    side: int
    moment: int
    least: int
    most: int
    in_all: bool
    image_token: str
    cap: int | None = None
    start: str = ""
    end: str = ""
    asked: RequestedSize | None = field(default=None, repr=False)

    def cut(self, size: Size, num_frames: int) -> Cut:
        """Return the cells of each frame of a video. Raises DataError for one that the processor refuses."""
        side = self.side
        if self.asked is not None and not (self.in_all and num_frames < self.moment):
            num_frames = math.ceil(num_frames / self.moment) * self.moment
            return cut_to_requested_size(self.asked, size, side, math.inf if self.in_all else self.most, num_frames)
        if not self.in_all:
            _refuse_narrow(size)
            return _cut_to_cells(size, side, self.least, self._most_of_a_frame(num_frames))
        if num_frames < self.moment:
            raise DataError(
                f"a video has {num_frames} frames to use, and the model's processor refuses fewer than {self.moment}: "
                "raise --video_fps, or leave it out"
            )
        if min(size) < side:
            scale = side / min(size)
            size = int(size[0] * scale), int(size[1] * scale)
        _refuse_narrow(size)
        most = self.most if self.cap is None else self._most_of_a_frame(num_frames) * num_frames
        rounded = round(num_frames / self.moment) * self.moment
        return _cut_to_cells(size, side, self.least, most, num_frames, rounded)

    def _most_of_a_frame(self, num_frames: int) -> int:
        if self.cap is None:
            return self.most
        floor, capped = int(self.least * 1.05), self.cap * self.side**2
        if self.in_all:
            return max(min(capped, self.most // num_frames), floor)
        return max(min(self.most, int(capped * 0.9) * self.moment // num_frames), floor)

    def text(self, cut: Cut) -> str:
        """Return the placeholder text of one moment; one image_token represents all its features."""
        return f"{self.start}{self.image_token}{self.end}"


@dataclass(frozen=True)
class BudgetTiling(Cells):
    """Cells of Gemma 4: resize to the largest size within `most` cells, keeping the shape. A cell is a feature.

    side: cell size in pixels. merge: patches along a cell. most: maximum cells per image. image_token: token of all
    features of an image. start, end: tokens around it. Source: transformers' get_aspect_ratio_preserving_size and
    Gemma4Processor.
    """

    side: int
    merge: int
    most: int
    image_token: str
    start: str
    end: str

    window: ClassVar[None] = None  # all patches of an image attend to each other
    table: ClassVar[None] = None  # positions are whole numbers

    def cut(self, size: Size) -> Cut:
        """Return the cells of an image."""
        (width, height), patch = size, self.side // self.merge
        # Round in units of patches, like transformers, to get the same sizes.
        scale = math.sqrt(self.most * self.merge**2 * patch**2 / (width * height))
        across, down = (math.floor(scale * length / self.side) for length in size)
        if down == 0:
            across, down = min(math.floor(width / height), self.most), 1
        elif across == 0:
            across, down = 1, min(math.floor(height / width), self.most)
        return Cut(((across * self.side, down * self.side),), (across, down))

    def text(self, cut: Cut) -> str:
        """Return the text that replaces the image; one image_token represents all of its features."""
        return f"{self.start}{self.image_token}{self.end}"


def _refuse_narrow(size: Size) -> None:
    if max(size) > MAX_SHAPE * min(size):
        raise DataError(
            f"an image of {size[0]} x {size[1]} is more than {MAX_SHAPE} times longer than wide, and the model's "
            "processor refuses: leave it out"
        )


def _cut_to_cells(size: Size, side: int, least: int, most: int, frames: int = 1, rounded: int = 1) -> Cut:
    """Return the cells of an image, or of each of `frames` frames with `least` to `most` pixels in total.

    rounded: the number of frames used when comparing with the limits.
    """
    width, height = size
    across, down = round(width / side), round(height / side)
    if rounded * across * down * side**2 > most:
        scale = math.sqrt(frames * width * height / most)
        across, down = (max(1, math.floor(length / scale / side)) for length in size)
    elif rounded * across * down * side**2 < least:
        scale = math.sqrt(least / (frames * width * height))
        across, down = (math.ceil(length * scale / side) for length in size)
    return Cut(((across * side, down * side),), (across, down))


@cache
def _grids(least: int, most: int) -> tuple[tuple[int, int], ...]:
    """Return the grids of least to most tiles, the smallest first."""
    sides = _from_one(most)
    return tuple(
        sorted(
            ((across, down) for across in sides for down in sides if least <= across * down <= most),
            key=lambda grid: grid[0] * grid[1],
        )
    )


def _from_one(count: int) -> range:
    return range(1, count + 1)


def _to_longest(size: Size, edge: int) -> Size:
    """Return the size with its longer side at `edge` pixels; the shorter one is even, or 1."""
    width, height = size
    if width >= height:
        short = int(edge / (width / height))
        return edge, max(1, short + short % 2)
    short = int(edge * (width / height))
    return max(1, short + short % 2), edge


def _below(size: Size, most: int) -> Size:
    """Return the size scaled down to at most `most` pixels per side."""
    width, height = size
    if max(size) <= most:
        return size
    if width >= height:
        return most, max(1, int(most / (width / height)))
    return max(1, int(most * (width / height))), most
