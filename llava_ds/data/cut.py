# s ranks that share a pack's tokens, T tokens of the pack, t = T / s of them on a rank, N tiles of P features each
"""A rank's part of a micro-batch under sequence parallelism, of which it decodes only the images that lie in it."""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import torch

from llava_ds.batch import Batch, Placing
from llava_ds.constants import DataError
from llava_ds.data.collate import ItemCounts, LoadedSample, blank_tile, collate, counts_of
from llava_ds.data.dataset import BrokenSample, EncodedDataset
from llava_ds.geometry import ImageOptions


class Part(NamedTuple):
    """The place of a rank among those that share the tokens of a micro-batch; needs_images: False on a pipeline's
    stages that never see them."""

    rank: int
    ranks: int
    needs_images: bool = True


@dataclass(frozen=True)
class CutMicroBatch:
    """A rank's part of a micro-batch as it was planned: whatever some rank can't decode is still in it.

    num_planned: items; places: of those that the batch has, among these; counts: of each that it has, whole; broken:
    what this rank found, by place.
    """

    batch: Batch
    num_planned: int
    places: tuple[int, ...]
    counts: tuple[ItemCounts, ...]
    broken: dict[int, BrokenSample]

    def pin_memory(self) -> "CutMicroBatch":
        """The same in page-locked memory (torch's DataLoader calls this)."""
        return dataclasses.replace(self, batch=self.batch.pin_memory())


class PartsOfMicroBatches(torch.utils.data.Dataset):
    """A rank's parts of micro-batches, by the lists of their samples' numbers."""

    def __init__(self, dataset: EncodedDataset, part: Part) -> None:
        self.dataset, self.part = dataset, part

    def __getitem__(self, numbers: list[int]) -> CutMicroBatch:
        options = self.dataset.image_options
        items = [self.dataset.undecoded(number) for number in numbers]
        broken = {place: item for place, item in enumerate(items) if isinstance(item, BrokenSample)}
        places = tuple(place for place in range(len(items)) if place not in broken)
        samples = [sample for place in places for sample in items[place].samples]
        batch, tiles = cut(fill(collate(samples, options, with_pixels=False), self.part.ranks), self.part, options)
        pixels, unreadable = self._pixels(samples, tiles if self.part.needs_images else [])
        for place in places:
            reasons = [unreadable[id(one)] for sample in items[place].samples for one, _ in sample.media]
            if any(reasons):
                broken[place] = self.dataset.broken(numbers[place], next(filter(None, reasons)))
        return CutMicroBatch(
            dataclasses.replace(batch, pixel_values=pixels),
            len(items),
            places,
            tuple(counts_of(items[place]) for place in places),
            broken,
        )

    def _pixels(self, samples: list[LoadedSample], tiles: list[int]) -> tuple[torch.Tensor, dict[int, str]]:
        """Decode some tiles (N, 3, S, S), by their numbers in the whole micro-batch; what can't be read is black.

        Beside them the reason for each image or video by its id, "" where there is none.
        """
        size, first, wanted = self.dataset.image_options.size, 0, set(tiles)
        distinct = {id(one): (one, layout) for sample in samples for one, layout in sample.media}
        reasons = dict.fromkeys(distinct, "")
        pixels: list[torch.Tensor] = []
        for key, (undecoded, layout) in distinct.items():
            own = [i for i in range(layout.num_tiles) if first + i in wanted]
            first += layout.num_tiles
            if not own:
                continue
            try:
                pixels.append(undecoded.decode(own))
            except DataError as error:
                self.dataset.note_error(error)
                reasons[key] = str(error)
                pixels.append(torch.zeros(len(own), 3, size, size, dtype=torch.uint8))
        return torch.cat(pixels or [blank_tile(size)]), reasons


def fill(batch: Batch, ranks: int) -> Batch:
    """Round the number of tokens up to a multiple of the ranks, by one more sample without supervised tokens."""
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


def cut(whole: Batch, part: Part, options: ImageOptions) -> tuple[Batch, list[int]]:
    """A rank's tokens of a filled batch, and the numbers of the tiles that its image positions need.

    cu_seqlens, max_seqlen and all that is by sample remain the whole batch's; positions count from the rank's first
    token. pixel_values is not set: it has to be these tiles, in their order, or the blank one. A tile whose features
    lie on both sides of a cut is needed on both.
    """
    length = whole.input_ids.shape[1] // part.ranks
    first, end = part.rank * length, (part.rank + 1) * length
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
    """tiles: the needed ones, ascending; the others as in Placing, over the needed tiles and pooled features."""

    tiles: torch.Tensor
    rows: torch.Tensor
    pool_index: torch.Tensor
    pool_weight: torch.Tensor


def _placed(whole: Batch, rows: torch.Tensor, patches: int) -> _Placed:
    """Renumber what some rows of a batch's feature table need. rows: as in Placing.features."""
    first_pooled = len(whole.pixel_values) * patches
    is_pooled = rows >= first_pooled
    pooled, pooled_at = torch.unique(rows[is_pooled] - first_pooled, return_inverse=True)
    index, weight = whole.placing.pool_index[pooled], whole.placing.pool_weight[pooled]
    used = weight != 0
    tiles = torch.unique(torch.cat([rows[~is_pooled] // patches, index[used] // patches]))
    count = max(1, len(tiles))  # without any there is the blank one

    def moved(features: torch.Tensor) -> torch.Tensor:
        return torch.searchsorted(tiles, features // patches) * patches + features % patches

    found = torch.empty_like(rows)
    found[~is_pooled] = moved(rows[~is_pooled])
    found[is_pooled] = count * patches + pooled_at
    return _Placed(tiles, found, torch.where(used, moved(index), 0) if len(tiles) else index, weight)


def without(batch: Batch, dropped: set[int]) -> Batch:
    """The batch with some samples' tokens unsupervised. dropped: their numbers in the batch."""
    kept = ~torch.isin(batch.target_samples, torch.tensor(sorted(dropped)))
    return dataclasses.replace(
        batch,
        target_positions=batch.target_positions[kept],
        targets=batch.targets[kept],
        target_samples=batch.target_samples[kept],
        target_weights=None if batch.target_weights is None else batch.target_weights[kept],
    )
