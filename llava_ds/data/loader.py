"""Turn the plan of an optimizer step into this rank's micro-batches, decoded ahead by worker processes."""

import dataclasses
import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from llava_ds.batch import Batch
from llava_ds.data.collate import ItemCounts, LoadedPair, LoadedSample, collate, counts_of
from llava_ds.data.dataset import BrokenSample, EncodedDataset
from llava_ds.data.step_plan import StepPlan
from llava_ds.geometry import ImageOptions
from llava_ds.runtime.mesh import Mesh

if TYPE_CHECKING:
    from llava_ds.data.shared_loader import CutMicroBatch


class Counts(NamedTuple):
    """Work of a rank, or of all ranks, in an optimizer step. Broken samples, and the blank image of a batch without
    images, don't count.

    targets: supervised tokens; micro_batches: number with supervised tokens; pairs: pairs of tokens of which one
    attends to the other, the sum of L (L + 1) / 2 over samples of L tokens; tiles: images that the vision tower
    processes; tile_pairs: pairs of tiles in one image that attend to each other, 0 if the tower takes single tiles.
    """

    samples: int
    tokens: int
    targets: int
    micro_batches: int
    pairs: int
    tiles: int
    tile_pairs: int = 0


@dataclass(frozen=True)
class MicroBatch:
    """A batch and its counts (as in Counts), without broken samples.

    places: positions of its samples in the planned micro-batch. A preference pair is one sample. is_counted: True on
    one of the ranks that share the tokens. Each has a part of the tokens in `batch`, but the counts for all tokens.
    numbers: indices of its samples in `batch`; None if `batch` has no broken samples.
    """

    batch: Batch
    places: tuple[int, ...]
    num_tokens: int
    num_targets: int
    num_pairs: int
    num_tiles: int
    broken: tuple[BrokenSample, ...]
    is_counted: bool = True
    numbers: tuple[int, ...] | None = None
    num_tile_pairs: int = 0

    @property
    def counts(self) -> Counts:
        """This rank's contribution to the sums over all ranks."""
        own = (
            self.num_samples,
            self.num_tokens,
            self.num_targets,
            int(self.num_targets > 0),
            self.num_pairs,
            self.num_tiles,
            self.num_tile_pairs,
        )
        return Counts(*own) if self.is_counted else Counts(*[0] * len(own))

    @property
    def num_samples(self) -> int:
        """Number of its samples."""
        return len(self.places)

    def pin_memory(self) -> "MicroBatch":
        """Copy it to page-locked memory (called by torch's DataLoader)."""
        return dataclasses.replace(self, batch=self.batch.pin_memory())


@dataclass(frozen=True)
class Window:
    """This rank's micro-batches of one optimizer step, on the device.

    num_planned: samples of the step over all ranks, including broken samples; data_wait_s: time spent waiting for data;
    passes: optimizer updates, each over all micro-batches; metrics: sums delivered with the micro-batches, as in
    MicroLoss.
    """

    micro_batches: list[MicroBatch]
    num_planned: int
    data_wait_s: float
    passes: int = 1
    metrics: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)

    @property
    def batches(self) -> list[Batch]:
        """Return the batches without their counts."""
        return [micro.batch for micro in self.micro_batches]

    @property
    def counts(self) -> Counts:
        """Summed counts of this rank's micro-batches, without broken samples."""
        return Counts(*map(sum, zip(*(micro.counts for micro in self.micro_batches))))

    @property
    def broken(self) -> list[BrokenSample]:
        """This rank's samples that could not be loaded."""
        return [broken for micro in self.micro_batches for broken in micro.broken]


def windows(plan: StepPlan, mesh: Mesh, *, done: int, num_workers: int, device: torch.device) -> Iterator[Window]:
    """Yield this rank's window of every optimizer step that remains after `done` steps, on the device.

    Iteration can start at any step: its samples follow from the order and the step's number.
    """
    layouts, ahead = itertools.tee(plan.after(done))  # planned once, though the loader runs ahead of the loop
    own = (micro_batch for layout in ahead for micro_batch in layout.of_ranks[mesh.dp_rank])
    loaded = micro_batches(plan.dataset, own, num_workers, device, mesh)
    started = time.perf_counter()
    for samples, of_ranks in layouts:  # may wait for records that are still being encoded
        yield Window([next(loaded) for _ in of_ranks[mesh.dp_rank]], len(samples), time.perf_counter() - started)
        started = time.perf_counter()


def micro_batches(
    dataset: EncodedDataset, batches: Iterable[list[int]], num_workers: int, device: torch.device, mesh: Mesh
) -> Iterator[MicroBatch]:
    """Yield micro-batches of these samples on the device, decoded ahead of use.

    Ranks that share tokens each get a part of every micro-batch, so they must iterate over the same batches together.
    """
    options = {
        "num_workers": num_workers,
        "generator": torch.Generator(),  # else the loader would draw a seed from the global one
        "pin_memory": device.type == "cuda",
    }
    if num_workers:
        from llava_ds.runtime.children import obey_only_parent

        options["worker_init_fn"] = obey_only_parent
    if mesh.shared > 1:
        loader = _shared(dataset, batches, mesh, options)
    else:
        collate_fn = partial(micro_batch_of, options=dataset.image_options)
        loader = torch.utils.data.DataLoader(dataset, batch_sampler=batches, collate_fn=collate_fn, **options)
    for micro in loader:
        yield dataclasses.replace(micro, batch=micro.batch.to(device))


def _shared(
    dataset: EncodedDataset, batches: Iterable[list[int]], mesh: Mesh, options: dict[str, object]
) -> Iterator[MicroBatch]:
    """Yield this rank's part of each micro-batch, in step with the ranks that have the same samples.

    options: arguments of the DataLoader.
    """
    from llava_ds.data.shared_loader import PartsOfMicroBatches

    parts = PartsOfMicroBatches(dataset, [part.cut(mesh) for part in mesh.parts if part.cut is not None])
    cut = torch.utils.data.DataLoader(parts, batch_size=None, sampler=batches, collate_fn=_unchanged, **options)
    return (_agreed(each, mesh) for each in cut)


def _unchanged(item: object) -> object:
    return item


def _agreed(cut: "CutMicroBatch", mesh: Mesh) -> MicroBatch:
    """Return the rank's part without the samples that any rank failed to decode. Their tokens are masked on all
    ranks."""
    from llava_ds.data.shared_loader import without

    finders = torch.full((cut.num_planned,), mesh.shared)  # the first rank that could not decode a sample
    finders[list(cut.broken)] = mesh.shared_rank
    torch.distributed.all_reduce(finders, torch.distributed.ReduceOp.MIN, mesh.shared_host_group)
    found = {place for place, finder in enumerate(finders.tolist()) if finder < mesh.shared}
    firsts = itertools.accumulate((counts.samples for counts in cut.counts), initial=0)
    numbers = [range(first, first + counts.samples) for first, counts in zip(firsts, cut.counts)]  # index in the batch
    dropped = {number for place, those in zip(cut.places, numbers) if place in found for number in those}
    kept = [counts for place, counts in zip(cut.places, cut.counts) if place not in found]
    return MicroBatch(
        batch=without(cut.batch, dropped) if dropped else cut.batch,
        places=tuple(place for place in cut.places if place not in found),
        **numbers_of(kept),
        broken=tuple(broken for place, broken in cut.broken.items() if finders[place] == mesh.shared_rank),
        is_counted=mesh.part.index == 0,
        numbers=tuple(number for number, place in enumerate(cut.places) if place not in found),
    )


def micro_batch_of(items: list[LoadedSample | LoadedPair | BrokenSample], options: ImageOptions) -> MicroBatch:
    """Collate loaded samples into a micro-batch. Broken samples are left out, and listed in `broken`."""
    places = tuple(i for i, item in enumerate(items) if not isinstance(item, BrokenSample))
    return MicroBatch(
        batch=collate([sample for i in places for sample in items[i].samples], options),
        places=places,
        **numbers_of([counts_of(items[i]) for i in places]),
        broken=tuple(item for item in items if isinstance(item, BrokenSample)),
    )


def numbers_of(kept: list[ItemCounts]) -> dict[str, int]:
    """Return the counts of a MicroBatch with these items, by the names of its fields."""
    return {f"num_{name}": sum(getattr(each, name) for each in kept) for name in ItemCounts._fields[1:]}
