# T tokens of a pack, s ranks that share them, t = T / s of them on a rank, N tiles of P features each
"""A rank's part of a micro-batch, with the images in it only."""

import dataclasses
from typing import NamedTuple

import torch

from llava_ds.batch import Batch, Placing
from llava_ds.geometry import ImageOptions

SHARED = "tokens_shared"  # in Batch.trunk: True for a part of a pack


def fill(batch: Batch, ranks: int) -> Batch:
    """Pad the number of tokens to a multiple of the ranks, with one more sample without supervised tokens."""
    missing = -batch.input_ids.shape[1] % ranks
    if not missing:
        return batch
    ends = batch.cu_seqlens[-1:] + missing
    return dataclasses.replace(
        batch,
        input_ids=torch.nn.functional.pad(batch.input_ids, (0, missing)),
        position_ids=torch.cat([batch.position_ids, torch.arange(missing)[None]], 1),
        cu_seqlens=torch.cat([batch.cu_seqlens, ends]),
        max_seqlen=max(batch.max_seqlen, missing),
        sources=torch.nn.functional.pad(batch.sources, (0, 1)),
    )


def cut(whole: Batch, options: ImageOptions, rank: int, ranks: int) -> tuple[Batch, list[int]]:
    """Return the tokens of one of `ranks` ranks, and the numbers of the tiles that its image positions need.

    The batch is padded to a multiple of the ranks. cu_seqlens, max_seqlen and all per-sample fields remain the complete
    batch's; positions count from the rank's first token. pixel_values is not set: the caller sets it to these tiles, in
    order, or to the blank one. A tile with features on both sides of a cut is needed on both.
    """
    whole = fill(whole, ranks)
    length = whole.input_ids.shape[1] // ranks
    first, end = rank * length, (rank + 1) * length
    positions, num_features = whole.placing.positions, len(whole.placing.features)
    inside = (positions >= first) & (positions < end)  # (M,)
    placed = _placed(whole, whole.placing.features[inside[:num_features]], options.tokens_per_tile)
    supervised = (whole.target_positions >= first) & (whole.target_positions < end)
    batch = dataclasses.replace(
        whole,
        input_ids=whole.input_ids[:, first:end],
        position_ids=whole.position_ids[:, first:end],
        target_positions=whole.target_positions[supervised] - first,
        targets=whole.targets[supervised],
        target_samples=whole.target_samples[supervised],
        target_weights=None if whole.target_weights is None else whole.target_weights[supervised],
        trunk={**whole.trunk, SHARED: True},
        placing=Placing(
            positions=positions[inside] - first,
            features=placed.rows,
            pool_index=placed.pool_index,
            pool_weight=placed.pool_weight,
            pools_by_max=bool(placed.pool_weight.isinf().any()),
        ),
    )
    return batch, placed.tiles.tolist()


class _Placed(NamedTuple):
    """Placing for the needed tiles. tiles: their numbers, ascending; other fields as in Placing, renumbered."""

    tiles: torch.Tensor
    rows: torch.Tensor
    pool_index: torch.Tensor
    pool_weight: torch.Tensor


def _placed(whole: Batch, rows: torch.Tensor, patches: int) -> _Placed:
    """Renumber the tiles and pooled features needed by some rows of a batch's feature table.

    rows: as in Placing.features.
    """
    first_pooled = len(whole.pixel_values) * patches
    is_pooled = rows >= first_pooled
    pooled, pooled_at = torch.unique(rows[is_pooled] - first_pooled, return_inverse=True)
    index, weight = whole.placing.pool_index[pooled], whole.placing.pool_weight[pooled]
    used = weight != 0
    tiles = torch.unique(torch.cat([rows[~is_pooled] // patches, index[used] // patches]))
    count = max(1, len(tiles))  # without any tile, the blank one is used

    def moved(features: torch.Tensor) -> torch.Tensor:
        return torch.searchsorted(tiles, features // patches) * patches + features % patches

    found = torch.empty_like(rows)
    found[~is_pooled] = moved(rows[~is_pooled])
    found[is_pooled] = count * patches + pooled_at
    return _Placed(tiles, found, torch.where(used, moved(index), 0) if len(tiles) else index, weight)
