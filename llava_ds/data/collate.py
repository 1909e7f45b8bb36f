# T tokens of all samples laid end to end, M image positions, S supervised positions, N tiles, P patches each,
# n tiles of one picture or video, R pooled features made of up to K others
"""Samples laid end to end: encoded ids and uint8 pictures to a Batch."""

from dataclasses import dataclass

import numpy as np
import torch

from llava_ds.batch import Batch
from llava_ds.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX
from llava_ds.geometry import ImageOptions, MediaLayout


@dataclass(frozen=True)
class LoadedSample:
    """input_ids and labels (length,) int64, IMAGE_TOKEN_INDEX at image positions.

    media: per picture or video in reading order, its tiles (n, 3, S, S) uint8 and their layout; source: the number of
    the data source that it is from.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    media: list[tuple[torch.Tensor, MediaLayout]]
    source: int = 0


def collate(samples: list[LoadedSample], options: ImageOptions) -> Batch:
    """One micro-batch of any samples, or of none.

    A rank with nothing to do takes part with one token that is not supervised, and a batch without pictures with one
    blank picture that is placed nowhere: both count for nothing, and the ranks' collectives match.
    """
    if not samples:
        token = torch.zeros(1, dtype=torch.int64)
        samples = [LoadedSample(token, torch.full_like(token, IGNORE_INDEX), [])]

    lengths = torch.tensor([len(sample.input_ids) for sample in samples])
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.cat([sample.input_ids for sample in samples])  # (T,)
    labels = torch.cat([sample.labels for sample in samples])  # (T,)
    labels[cu_seqlens[:-1]] = IGNORE_INDEX  # what comes before a sample's first token is another sample
    supervised = (labels != IGNORE_INDEX).nonzero()[:, 0]  # (S,)
    sources = torch.tensor([sample.source for sample in samples])

    is_image = ids == IMAGE_TOKEN_INDEX
    pixels = [tiles for sample in samples for tiles, _ in sample.media]
    if not pixels:
        pixels = [torch.zeros(1, 3, options.size, options.size, dtype=torch.uint8)]
    pixel_values = torch.cat(pixels)  # (N, 3, S, S)
    rows, pool_index, pool_weight = _rows(samples, len(pixel_values), options.tokens_per_tile)
    positions = is_image.nonzero()[:, 0]  # (M,)
    is_newline = rows < 0
    return Batch(
        input_ids=ids.masked_fill(is_image, 0)[None],
        position_ids=torch.cat([torch.arange(length) for length in lengths.tolist()])[None],
        cu_seqlens=cu_seqlens.to(torch.int32),
        max_seqlen=int(lengths.max()),
        target_positions=supervised - 1,
        targets=labels[supervised],
        target_sources=sources.repeat_interleave(lengths)[supervised],
        pixel_values=pixel_values,
        pool_index=pool_index,
        pool_weight=pool_weight,
        image_positions=torch.cat([positions[~is_newline], positions[is_newline]]),
        feature_index=rows[~is_newline],
        pools_by_max=any(layout.pools_by_max for sample in samples for _, layout in sample.media),
    )


def _rows(samples: list[LoadedSample], num_tiles: int, patches: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What stands at each image position (M,), and pool_index and pool_weight (R, K): the layouts' indices, moved.

    Rows are those of the N * P features with the pooled ones behind them, -1 for a newline. A sample cut inside a
    picture uses its first rows only.
    """
    rows, indices, weights = [np.zeros(0, np.int64)], [], []
    tiles = pooled = 0
    for sample in samples:
        own = [np.zeros(0, np.int64)]
        for _, layout in sample.media:
            newline = layout.num_tiles * patches
            first_pooled = num_tiles * patches + pooled
            local = layout.rows
            moved = np.where(local < newline, local + tiles * patches, local - newline - 1 + first_pooled)
            own.append(np.where(local == newline, -1, moved))
            indices.append(layout.pool_index + tiles * patches)
            weights.append(layout.pool_weight)
            tiles += layout.num_tiles
            pooled += len(layout.pool_index)
        wanted = int((sample.input_ids == IMAGE_TOKEN_INDEX).sum())
        rows.append(np.concatenate(own)[:wanted])
    return torch.from_numpy(np.concatenate(rows)), _stacked(indices, np.int64), _stacked(weights, np.float32)


def _stacked(parts: list[np.ndarray], dtype: type) -> torch.Tensor:
    """(R, K), zeros where a part is made of fewer others than the widest."""
    wide = max((part.shape[1] for part in parts), default=1)
    stacked = np.zeros((sum(map(len, parts)), wide), dtype)
    first = 0
    for part in parts:
        stacked[first : first + len(part), : part.shape[1]] = part
        first += len(part)
    return torch.from_numpy(stacked)
