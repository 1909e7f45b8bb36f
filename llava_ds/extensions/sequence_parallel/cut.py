# T tokens of a pack, s ranks that share them, t = T / s of them on a rank, N tiles of P features each
"""Take one rank's part of a micro-batch, with only the images that its tokens need."""

import dataclasses
import itertools
from collections.abc import Sequence

import torch

from llava_ds.batch import Batch, Placing
from llava_ds.geometry import ImageOptions
from llava_ds.layouts import MediaLayout

SHARED = "tokens_shared"  # in Batch.trunk: True for a part of a pack


def fill(batch: Batch, ranks: int) -> Batch:
    """Pad the number of tokens to a multiple of the ranks, with one more sample without supervised tokens."""
    missing = -batch.input_ids.shape[1] % ranks
    if not missing:
        return batch
    ends = batch.cu_seqlens[-1:] + missing
    more, shared = torch.arange(missing).expand(*batch.position_ids.shape[:-1], -1), batch.shared
    if shared is not None:
        shared = shared._replace(
            keys=torch.cat([shared.keys, torch.arange(missing) + batch.cu_seqlens[-1]]),
            cu_keys=torch.cat([shared.cu_keys, shared.cu_keys[-1:] + missing]),
            max_keys=max(shared.max_keys, missing),
            lengths=(*shared.lengths, missing),
            own=(*shared.own, missing),
        )
    return dataclasses.replace(
        batch,
        input_ids=torch.nn.functional.pad(batch.input_ids, (0, missing)),
        position_ids=torch.cat([batch.position_ids, more], -1),
        cu_seqlens=torch.cat([batch.cu_seqlens, ends]),
        max_seqlen=max(batch.max_seqlen, missing),
        sources=torch.nn.functional.pad(batch.sources, (0, 1)),
        lengths=(*batch.lengths, missing),
        shared=shared,
    )


def cut(
    whole: Batch, options: ImageOptions, layouts: Sequence[MediaLayout], rank: int, ranks: int
) -> tuple[Batch, list[int]]:
    """Return the tokens of one of `ranks` ranks, and the numbers of the tiles that its image positions need.

    The batch is padded to a multiple of the ranks. cu_seqlens, max_seqlen and all per-sample fields describe the
    complete batch; positions count from the rank's first token. The caller has to set pixel_values to these tiles, or
    to the blank tile. Both ranks at a cut need a tile with features on both sides. A tower for whole images needs all
    tiles of an image or video moment. layouts: of the batch's images and videos, in order.
    """
    whole = fill(whole, ranks)
    length = whole.input_ids.shape[1] // ranks
    first, end = rank * length, (rank + 1) * length
    positions, num_features = whole.placing.positions, len(whole.placing.features)
    inside = (positions >= first) & (positions < end)  # (M,)
    rows = whole.placing.features[inside[:num_features]]
    tiles, tower = _tiles_at(whole, rows, options.tokens_per_tile), whole.tower
    if tower:
        tiles, shown = _whole_images(tiles, layouts)
        tower = options.tower_inputs(shown)
    predicts = (whole.target_positions >= first) & (whole.target_positions < end)
    supervised, shared = whole.by_target(predicts), whole.shared
    if shared is not None:
        row_of = (predicts.cumsum(0) - 1)[shared.row_of[supervised]]
        shared = shared._replace(row_of=row_of, tokens=shared.tokens[supervised] - first)
    batch = dataclasses.replace(
        whole,
        input_ids=whole.input_ids[:, first:end],
        position_ids=whole.position_ids[..., first:end],
        shared=shared,
        target_positions=whole.target_positions[predicts] - first,
        targets=whole.targets[supervised],
        target_samples=whole.target_samples[supervised],
        target_weights=None if whole.target_weights is None else whole.target_weights[supervised],
        tower=tower,
        trunk={**whole.trunk, SHARED: True},
        placing=_placing(whole, positions[inside] - first, rows, tiles, options.tokens_per_tile),
    )
    return batch, tiles.tolist()


def _tiles_at(whole: Batch, rows: torch.Tensor, patches: int) -> torch.Tensor:
    """Return the numbers of the tiles needed by some rows of a batch's feature table, ascending. rows: as in
    Placing.features."""
    first_pooled = len(whole.pixel_values) * patches
    is_pooled = rows >= first_pooled
    pooled = torch.unique(rows[is_pooled] - first_pooled)
    index = whole.placing.pool_index[pooled][whole.placing.pool_weight[pooled] != 0]
    return torch.unique(torch.cat([rows[~is_pooled] // patches, index // patches]))


def _whole_images(tiles: torch.Tensor, layouts: Sequence[MediaLayout]) -> tuple[torch.Tensor, list[MediaLayout]]:
    """Extend a rank's tiles to whole images, and to whole moments (groups of frames) of videos.

    tiles: indices of the tiles that the rank needs, ascending. layouts: of the batch's images and videos, in order.
    Returns the indices of the tiles for the rank's tower, and the layouts of these images and moments.
    """
    needed, found, shown, first = set(tiles.tolist()), [], [], 0
    for layout in layouts:
        step = layout.num_tiles // layout.moments
        moments = [range(i, i + step) for i in range(first, first + layout.num_tiles, step)]
        moments = [moment for moment in moments if not needed.isdisjoint(moment)]
        found += itertools.chain(*moments)
        shown += [layout.with_moments(len(moments))] * bool(moments)
        first += layout.num_tiles
    return torch.tensor(found, dtype=torch.int64), shown


def _placing(whole: Batch, positions: torch.Tensor, rows: torch.Tensor, tiles: torch.Tensor, patches: int) -> Placing:
    """Renumber some rows of a batch's feature table, and their pooled features.

    positions: of the rank's image tokens. rows: as in Placing.features. tiles: indices of the rank's tiles, ascending.
    """
    first_pooled = len(whole.pixel_values) * patches
    is_pooled = rows >= first_pooled
    pooled, pooled_at = torch.unique(rows[is_pooled] - first_pooled, return_inverse=True)
    index, weight = whole.placing.pool_index[pooled], whole.placing.pool_weight[pooled]
    used = weight != 0
    count = max(1, len(tiles))  # without any tile, the blank one is used

    def moved(features: torch.Tensor) -> torch.Tensor:
        return torch.searchsorted(tiles, features // patches) * patches + features % patches

    found = torch.empty_like(rows)
    found[~is_pooled] = moved(rows[~is_pooled])
    found[is_pooled] = count * patches + pooled_at
    index = torch.where(used, moved(index), 0) if len(tiles) else index
    return Placing(positions, found, index, weight, pools_by_max=bool(weight.isinf().any()))
