# T tokens of all samples laid end to end, M image positions, S supervised positions, N tiles, P patches each,
# n tiles of one image or video, R pooled features, each of up to K patch features
"""Collate encoded samples and their uint8 tiles, laid end to end, into a Batch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from llava_ds.batch import Batch, Inputs, Placing
from llava_ds.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX
from llava_ds.extensions.active import no_fields
from llava_ds.geometry import ImageOptions
from llava_ds.layouts import MediaLayout


@dataclass(frozen=True)
class LoadedSample:
    """One encoded sample. input_ids and labels (length,) int64, with IMAGE_TOKEN_INDEX at image positions.

    media: per image or video in reading order, its tiles (n, 3, S, S) uint8 (or (n, 3, T * S, S) with T frames per
    tile, or an object that decodes them) and its layout. Samples that share an image hold the same object, so that its
    features are computed once. source: index of the sample's data source; weights (length,) float32: loss weight of
    each token, None if all are 1; extra, own: additional numbers and tensors, by their names in Batch.extra; shared:
    number of leading tokens, with all images, that are computed in the nearest earlier sample with shared 0.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    media: list[tuple[torch.Tensor, MediaLayout]]
    source: int = 0
    weights: torch.Tensor | None = None
    extra: Mapping[str, float] = field(default_factory=dict)
    shared: int = 0
    own: Mapping[str, torch.Tensor | None] = field(default_factory=no_fields)

    @property
    def samples(self) -> tuple["LoadedSample", ...]:
        """The samples of this item: itself."""
        return (self,)

    @property
    def num_targets(self) -> int:
        """Number of supervised tokens. The first token is never predicted."""
        return int((self.labels[1:] != IGNORE_INDEX).sum())


@dataclass(frozen=True)
class LoadedPair:
    """Two answers to one conversation, over the same images."""

    chosen: LoadedSample
    rejected: LoadedSample

    @property
    def samples(self) -> tuple[LoadedSample, ...]:
        """Both samples, the chosen one first."""
        return self.chosen, self.rejected


class ItemCounts(NamedTuple):
    """Counts of one item, a sample or a pair. samples: number of its samples; other fields as in Counts."""

    samples: int
    tokens: int
    targets: int
    pairs: int
    tiles: int
    tile_pairs: int


def counts_of(item: LoadedSample | LoadedPair) -> ItemCounts:
    """Count the work that an item adds to a step. A shared image counts once."""
    lengths, shared = zip(*((len(sample.input_ids), sample.shared) for sample in item.samples))
    owners = [sample for sample in item.samples if not sample.shared]
    layouts = {id(one): layout for sample in owners for one, layout in sample.media}.values()
    return ItemCounts(
        samples=len(item.samples),
        tokens=sum(lengths) - sum(shared),
        targets=sum(sample.num_targets for sample in item.samples),
        pairs=sum(n * (n + 1) // 2 for n in lengths) - sum(n * (n + 1) // 2 for n in shared),
        tiles=sum(layout.num_tiles for layout in layouts),
        tile_pairs=sum(layout.tile_pairs for layout in layouts),
    )


def collate(samples: list[LoadedSample], options: ImageOptions, with_pixels: bool = True) -> Batch:
    """Collate samples (possibly none) into one micro-batch. with_pixels: False leaves the tiles empty, (N, 3, 0, 0).

    Without samples, the batch gets one unsupervised token; without images, one unused blank tile. They don't change the
    loss, and let all ranks call the same collectives.
    """
    if not samples:
        token = torch.zeros(1, dtype=torch.int64)
        samples = [LoadedSample(token, torch.full_like(token, IGNORE_INDEX), [])]

    lengths = torch.tensor([len(sample.input_ids) for sample in samples])
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.cat([sample.input_ids for sample in samples])  # (T,)
    labels = torch.cat([sample.labels for sample in samples])  # (T,)
    labels[cu_seqlens[:-1]] = IGNORE_INDEX  # a sample's first token would be predicted from the previous sample
    supervised = (labels != IGNORE_INDEX).nonzero()[:, 0]  # (S,)

    is_image = ids == IMAGE_TOKEN_INDEX
    distinct = {id(tiles): (tiles, layout) for sample in samples for tiles, layout in sample.media}
    layouts = {key: layout for key, (_, layout) in distinct.items()}
    if with_pixels:
        tiles = [tiles for tiles, _ in distinct.values()] or [blank_tile(options.size)]
        pixel_values = of_one_height(tiles)  # (N, 3, H, S)
    else:
        num_tiles = sum(layout.num_tiles for layout in layouts.values())
        pixel_values = torch.zeros(max(1, num_tiles), 3, 0, 0, dtype=torch.uint8)
    rows_of, pool_index, pool_weight = _feature_table(layouts, len(pixel_values), options.tokens_per_tile)
    rows = torch.from_numpy(np.concatenate([_rows(sample, rows_of) for sample in samples]))  # (M,)
    positions = is_image.nonzero()[:, 0]  # (M,)
    is_newline = rows < 0
    batch = Batch(
        input_ids=ids.masked_fill(is_image, 0)[None],
        position_ids=_position_ids(samples, options),
        cu_seqlens=cu_seqlens.to(torch.int32),
        max_seqlen=int(lengths.max()),
        sources=torch.tensor([sample.source for sample in samples]),
        target_positions=supervised - 1,
        targets=labels[supervised],
        target_samples=torch.arange(len(samples)).repeat_interleave(lengths)[supervised],
        target_weights=_weights(samples, supervised),
        pixel_values=pixel_values,
        placing=Placing(
            positions=torch.cat([positions[~is_newline], positions[is_newline]]),
            features=rows[~is_newline],
            pool_index=pool_index,
            pool_weight=pool_weight,
            pools_by_max=any(layout.pools_by_max for layout in layouts.values()),
        ),
        lengths=tuple(lengths.tolist()),
        tower=options.tower_inputs(list(layouts.values())),
        trunk=options.trunk_inputs(is_image, cu_seqlens),
        extra=_extra(samples),
    )
    if not any(sample.shared for sample in samples):
        return batch
    from llava_ds.data.shared_prompts import share_prompts

    return share_prompts(batch, [sample.shared for sample in samples], options)


def _position_ids(samples: list[LoadedSample], options: ImageOptions) -> torch.Tensor:
    """Return position ids (1, T), or (3, 1, T) if positions have three axes."""
    parts = [options.position_ids(sample.input_ids, [layout for _, layout in sample.media]) for sample in samples]
    if parts[0] is not None:
        return torch.cat(parts, 1)[:, None]
    return torch.cat([torch.arange(len(sample.input_ids)) for sample in samples])[None]


def of_one_height(tiles: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate all tiles. A video tile stacks its frames vertically; image tiles next to such videos are repeated to
    that height."""
    height = max(each.shape[2] for each in tiles)
    times = [height // each.shape[2] for each in tiles]
    return torch.cat([each if n == 1 else each.repeat(1, 1, n, 1) for each, n in zip(tiles, times)])


def padded_left(rows: torch.Tensor, samples: list[LoadedSample]) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn samples laid end to end (T, ...) into left-padded rows (B, L, ...) and a mask (B, L), 0 at the padding."""
    parts = rows.split([len(sample.input_ids) for sample in samples])
    tokens = [torch.ones(len(part), dtype=torch.int64, device=rows.device) for part in parts]
    padded, mask = (pad_sequence(each, batch_first=True, padding_side="left") for each in (parts, tokens))
    return padded, mask


def blank_tile(size: int) -> torch.Tensor:
    """A black tile (1, 3, S, S), the tower's input for a batch without images."""
    return torch.zeros(1, 3, size, size, dtype=torch.uint8)


def _extra(samples: list[LoadedSample]) -> Inputs:
    """Collect the samples' extra values by name: numbers as (samples,) float64, 0 if missing; tensors as a list."""
    names = dict.fromkeys(name for sample in samples for name in sample.extra)
    numbers = {name: [sample.extra.get(name, 0.0) for sample in samples] for name in names}
    own = {name: [sample.own.get(name) for sample in samples] for sample in samples for name in sample.own}
    return own | {name: torch.tensor(each, dtype=torch.float64) for name, each in numbers.items()}


def _weights(samples: list[LoadedSample], supervised: torch.Tensor) -> torch.Tensor | None:
    """Return the loss weights of the supervised positions, (S,) float32; None if all are 1."""
    if all(sample.weights is None for sample in samples):
        return None
    parts = [torch.ones(len(one.labels)) if one.weights is None else one.weights for one in samples]
    return torch.cat(parts)[supervised]


def _feature_table(
    layouts: dict[int, MediaLayout], num_tiles: int, patches: int
) -> tuple[dict[int, np.ndarray], torch.Tensor, torch.Tensor]:
    """Return the feature rows that each image or video uses, and pool_index and pool_weight (R, K).

    Rows index the N * P patch features of all tiles, followed by all pooled features; -1 is a newline. pool_index
    indexes the patch features.
    """
    rows, indices, weights = {}, [], []
    tiles = pooled = 0
    for key, layout in layouts.items():
        newline = layout.num_tiles * patches
        first_pooled = num_tiles * patches + pooled
        local = layout.rows
        moved = np.where(local < newline, local + tiles * patches, local - newline - 1 + first_pooled)
        rows[key] = np.where(local == newline, -1, moved)
        indices.append(layout.pool_index + tiles * patches)
        weights.append(layout.pool_weight)
        tiles += layout.num_tiles
        pooled += len(layout.pool_index)
    return rows, _stacked(indices, np.int64), _stacked(weights, np.float32)


def _rows(sample: LoadedSample, rows_of: dict[int, np.ndarray]) -> np.ndarray:
    """Feature rows at a sample's image positions. A sample truncated inside an image uses its first rows only."""
    wanted = int((sample.input_ids == IMAGE_TOKEN_INDEX).sum())
    return np.concatenate([np.zeros(0, np.int64), *(rows_of[id(tiles)] for tiles, _ in sample.media)])[:wanted]


def _stacked(parts: list[np.ndarray], dtype: type) -> torch.Tensor:
    """Stack parts into (R, K), padding narrower ones with zeros."""
    wide = max((part.shape[1] for part in parts), default=1)
    stacked = np.zeros((sum(map(len, parts)), wide), dtype)
    first = 0
    for part in parts:
        stacked[first : first + len(part), : part.shape[1]] = part
        first += len(part)
    return torch.from_numpy(stacked)
