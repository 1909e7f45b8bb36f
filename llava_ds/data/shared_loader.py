"""Load micro-batches on ranks that share samples. Each rank decodes only the tiles it needs. If a rank can't decode a
sample, all of these ranks drop it."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from llava_ds.batch import Batch
from llava_ds.constants import DataError
from llava_ds.data.collate import ItemCounts, blank_tile, collate, counts_of, of_one_height
from llava_ds.data.dataset import BrokenSample, EncodedDataset, Undecoded
from llava_ds.geometry import ImageOptions
from llava_ds.layouts import MediaLayout

# Cuts a rank's part from a whole micro-batch without pixels, given the layouts of its images and videos in order.
# Returns the part and the indices of the tiles that it needs.
Cut = Callable[[Batch, ImageOptions, Sequence[MediaLayout]], tuple[Batch, list[int]]]


@dataclass(frozen=True)
class CutMicroBatch:
    """A rank's part of a planned micro-batch, still with samples that other ranks can't decode.

    num_planned: number of planned items; places: positions of the batch's items among these; counts: each item's
    counts over all parts; broken: samples that this rank found broken, by position.
    """

    batch: Batch
    num_planned: int
    places: tuple[int, ...]
    counts: tuple[ItemCounts, ...]
    broken: dict[int, BrokenSample]

    def pin_memory(self) -> "CutMicroBatch":
        """Copy it to page-locked memory (called by torch's DataLoader)."""
        return dataclasses.replace(self, batch=self.batch.pin_memory())


class PartsOfMicroBatches(torch.utils.data.Dataset):
    """A rank's parts of micro-batches, indexed by lists of sample indices. cuts: applied in sequence; a tile is decoded
    if all of them need it."""

    def __init__(self, dataset: EncodedDataset, cuts: Sequence[Cut]) -> None:
        self.dataset, self.cuts = dataset, cuts

    def __getitem__(self, numbers: list[int]) -> CutMicroBatch:
        options = self.dataset.image_options
        items = self.dataset.undecoded(*numbers)
        broken = {place: item for place, item in enumerate(items) if isinstance(item, BrokenSample)}
        places = tuple(place for place in range(len(items)) if place not in broken)
        samples = [sample for place in places for sample in items[place].samples]
        batch = collate(samples, options, with_pixels=False)
        distinct = {id(one): (one, layout) for sample in samples for one, layout in sample.media}
        layouts = [layout for _, layout in distinct.values()]
        tiles = set(range(len(batch.pixel_values)))
        for cut in self.cuts:
            batch, needed = cut(batch, options, layouts)
            tiles.intersection_update(needed)
        pixels, unreadable = self._pixels(distinct, tiles)
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

    def _pixels(
        self, distinct: dict[int, tuple[Undecoded, MediaLayout]], wanted: set[int]
    ) -> tuple[torch.Tensor, dict[int, str]]:
        """Decode tiles (N, 3, H, S). wanted: tile indices in the whole micro-batch. Unreadable tiles are black.

        Also returns a reason per image or video, by its id; "" if it is readable.
        """
        size, first = self.dataset.image_options.size, 0
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
        return of_one_height(pixels or [blank_tile(size)]), reasons


def without(batch: Batch, dropped: set[int]) -> Batch:
    """Make some samples' tokens unsupervised. dropped: their indices in the batch."""
    kept, shared = ~torch.isin(batch.target_samples, torch.tensor(sorted(dropped))), batch.shared
    if shared is not None:
        shared = shared._replace(row_of=shared.row_of[kept], tokens=shared.tokens[kept])
    return dataclasses.replace(
        batch,
        shared=shared,
        target_positions=batch.target_positions[kept] if shared is None else batch.target_positions,
        targets=batch.targets[kept],
        target_samples=batch.target_samples[kept],
        target_weights=None if batch.target_weights is None else batch.target_weights[kept],
    )
