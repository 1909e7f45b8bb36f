"""Micro-batches of ranks with the same samples: each decodes what it needs, and all leave out what one can't."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from llava_ds.batch import Batch
from llava_ds.constants import DataError
from llava_ds.data.collate import ItemCounts, LoadedSample, blank_tile, collate, counts_of
from llava_ds.data.dataset import BrokenSample, EncodedDataset
from llava_ds.geometry import ImageOptions

# From a whole micro-batch without pixels to what a rank needs of it, and the numbers of the tiles that it needs.
Cut = Callable[[Batch, ImageOptions], tuple[Batch, list[int]]]


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
    """A rank's parts of micro-batches, by the lists of their samples' numbers. cuts: applied one after the other; a
    tile is decoded if all of them need it."""

    def __init__(self, dataset: EncodedDataset, cuts: Sequence[Cut]) -> None:
        self.dataset, self.cuts = dataset, cuts

    def __getitem__(self, numbers: list[int]) -> CutMicroBatch:
        options = self.dataset.image_options
        items = [self.dataset.undecoded(number) for number in numbers]
        broken = {place: item for place, item in enumerate(items) if isinstance(item, BrokenSample)}
        places = tuple(place for place in range(len(items)) if place not in broken)
        samples = [sample for place in places for sample in items[place].samples]
        batch = collate(samples, options, with_pixels=False)
        tiles = set(range(len(batch.pixel_values)))
        for cut in self.cuts:
            batch, needed = cut(batch, options)
            tiles.intersection_update(needed)
        pixels, unreadable = self._pixels(samples, tiles)
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

    def _pixels(self, samples: list[LoadedSample], wanted: set[int]) -> tuple[torch.Tensor, dict[int, str]]:
        """Decode some tiles (N, 3, S, S), by their numbers in the whole micro-batch; what can't be read is black.

        Beside them the reason for each image or video by its id, "" where there is none.
        """
        size, first = self.dataset.image_options.size, 0
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
