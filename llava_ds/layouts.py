# P features of a tile (side x side), n tiles of one image or video, R pooled features, each of up to K patch features
"""Compute the order of an image's or video's features in a sequence, without tensors or files."""

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from llava_ds.tilings import Grid, Size

_MAX_ROWS = 64  # maximum number of layouts whose indices are cached


class ImageText(NamedTuple):
    """Text that the model's processor writes for an image or video. features: number of features per image token in
    the text."""

    text: str
    features: int
    is_video: bool = False


@dataclass(frozen=True)
class MediaLayout:
    """The layout of one image or video: its tiles, and the order of their features in a sequence.

    num_tiles, n: number of tiles for the tower (of an anyres image the overview, then the tiles row by row).
    num_tokens: positions in the sequence, newlines included. overview: True if the overview has positions.
    """

    num_tiles: int
    num_tokens: int
    side: int
    grid: tuple[int, int] | None  # tiles across and down after the overview; None: no overview, each tile is a block
    box: tuple[int, int, int, int]  # each block's features: left, top, right, bottom
    pooled: tuple[int, int] | None  # width and height to which each block is pooled; None: not pooled
    pool_stride: int | None  # for average and max pooling; None: bilinear
    newline: Literal["none", "end", "block", "row"]  # newlines follow this unit
    class_token: bool  # each tile has a first feature outside its grid
    sizes: tuple[Size, ...] = dataclasses.field(
        compare=False
    )  # the images' sizes; other sizes may give the same layout
    overview: bool = True
    pools_by_max: bool = False
    text: ImageText | None = None  # written by a model's own processor
    cells: tuple[int, int] | None = None  # tiles across and down, if they are cells of one whole image
    moments: int = 1  # moments of a video, each with equally many cells
    seconds: float = 0.0  # time between two moments
    interval: float = 1.0  # distance between their positions in the language model

    @property
    def mark(self) -> int | ImageText:
        """The value that the encoder inserts: a number of positions, or the text of the model's processor."""
        return self.num_tokens if self.text is None else self.text

    @property
    def tile_pairs(self) -> int:
        """Number of pairs of an image's cells in attention; 0 for tiles, because they are encoded separately."""
        return 0 if self.cells is None else self.moments * (self.num_tiles // self.moments) ** 2

    @property
    def is_video(self) -> bool:
        """True for a video with its own text."""
        return self.text is not None and self.text.is_video

    @property
    def grids(self) -> tuple[Grid, ...]:
        """Grids of the image's cells, or of each group of video moments whose features are consecutive, in order."""
        in_row = self.moments if self.text is None else self.text.features // (self.num_tiles // self.moments)
        return (Grid(*self.cells, in_row, self.interval),) * (self.moments // in_row)

    def with_moments(self, moments: int) -> "MediaLayout":
        """Return the layout of only some of the video's moments (groups of frames), without text between them.

        It describes the input of a tower that encodes only the moments that one sequence-parallel rank needs.
        """
        n, tokens = (moments * (count // self.moments) for count in (self.num_tiles, self.num_tokens))
        return dataclasses.replace(self, num_tiles=n, num_tokens=tokens, moments=moments, text=None)

    @property
    def rows(self) -> np.ndarray:
        """Row of each position's feature, (num_tokens,) int64: below n * P a feature of the tiles, at n * P the
        newline, above n * P a pooled feature."""
        return _indices(self)[0]

    @property
    def pool_index(self) -> np.ndarray:
        """Tile features from which each pooled feature is computed, (R, K) int64."""
        return _indices(self)[1]

    @property
    def pool_weight(self) -> np.ndarray:
        """Weights of these tile features, (R, K) float32. They add up to 1, or are infinity for max pooling."""
        return _indices(self)[2]


@lru_cache(maxsize=_MAX_ROWS)
def _indices(layout: MediaLayout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute rows, pool_index and pool_weight."""
    n, side = layout.num_tiles, layout.side
    if layout.class_token:  # all features in order
        return np.arange(layout.num_tokens), np.zeros((0, 1), np.int64), np.zeros((0, 1), np.float32)
    features = np.arange(n * side * side).reshape(n, side, side)
    overview = features[:0].reshape(-1)
    if layout.grid is not None:
        across, down = layout.grid
        overview = features[0].reshape(-1) if layout.overview else overview
        tiles = features[1:].reshape(down, across, side, side)
        features = tiles.transpose(0, 2, 1, 3).reshape(1, down * side, across * side)  # the image row by row
    left, top, right, bottom = layout.box
    blocks = features[:, top:bottom, left:right]  # (blocks, height, width)
    newline = n * side * side
    index, weight = np.zeros((0, 1), np.int64), np.zeros((0, 1), np.float32)
    if layout.pooled is not None:
        width, height = layout.pooled
        if layout.pool_stride is not None:
            index, weight = _windows(blocks, width, height, layout.pool_stride)
            weight = np.full_like(weight, np.inf) if layout.pools_by_max else weight
        else:
            index, weight = _bilinear(blocks, width, height)
        blocks = newline + 1 + np.arange(len(index)).reshape(len(blocks), height, width)
    if layout.newline == "block":
        blocks = blocks.reshape(len(blocks), 1, -1)
    if layout.newline in ("row", "block"):
        blocks = np.concatenate([blocks, np.full((*blocks.shape[:2], 1), newline)], axis=2)
    end = [newline] if layout.newline == "end" else []
    rows = np.concatenate([overview, blocks.reshape(-1), np.array(end, np.int64)])
    assert len(rows) == layout.num_tokens
    for array in (rows, index, weight):
        array.flags.writeable = False
    return rows, index, weight


def _windows(blocks: np.ndarray, width: int, height: int, stride: int) -> tuple[np.ndarray, np.ndarray]:
    """Return indices and weights of torch's avg_pool2d or max_pool2d. Edges that don't fill a window are dropped."""
    used = blocks[:, : height * stride, : width * stride].reshape(len(blocks), height, stride, width, stride)
    index = used.transpose(0, 1, 3, 2, 4).reshape(-1, stride * stride)
    return index, np.full(index.shape, 1 / stride**2, np.float32)


def _bilinear(blocks: np.ndarray, width: int, height: int) -> tuple[np.ndarray, np.ndarray]:
    """Return indices and weights equal to torch's interpolate with mode="bilinear", align_corners=False and a size."""
    top, bottom, low = _taps(blocks.shape[1], height)
    left, right, far = _taps(blocks.shape[2], width)
    corners = [
        (y, x, wy[:, None] * wx[None])
        for y, wy in ((top, 1 - low), (bottom, low))
        for x, wx in ((left, 1 - far), (right, far))
    ]
    index = np.stack([blocks[:, y[:, None], x[None]] for y, x, _ in corners], axis=-1).reshape(-1, 4)
    weight = np.stack([weight for _, _, weight in corners], axis=-1).reshape(-1, 4)
    return index, np.tile(weight, (len(blocks), 1)).astype(np.float32)


def _taps(length: int, new_length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the two old positions nearest to each new position, and the weight of the second.

    Computes in single precision with a fused multiply-add, like torch's kernels.
    """
    scale = np.float64(np.float32(length) / np.float32(new_length))
    place = (scale * (np.arange(new_length) + 0.5) - 0.5).astype(np.float32).clip(0)
    first = np.minimum(place.astype(np.int64), length - 1)
    return first, np.minimum(first + 1, length - 1), (place - first.astype(np.float32)).clip(0, 1)
