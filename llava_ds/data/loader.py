"""From the plan of an optimizer step to this rank's micro-batches, decoded ahead by worker processes."""

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
from llava_ds.runtime.processes import obey_only_parent

if TYPE_CHECKING:
    from llava_ds.data.shared_loader import CutMicroBatch


class Counts(NamedTuple):
    """The work of a rank, or of all ranks, in an optimizer step. Broken samples, and the blank image of a batch without
    images, don't count.

    targets: supervised tokens; micro_batches: those that have any; pairs: of tokens of which one sees the other, the
    sum of L (L + 1) / 2 over samples of L tokens; tiles: squares that the vision tower sees; tile_pairs: those of one
    image of which one sees the other in a tower that takes whole images, 0 for others.
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
    """A batch, and what it holds, as Counts has it; broken samples are not in it.

    places: of its samples in the micro-batch as it was planned. A pair of preferences counts as one sample. is_counted:
    False on all but one of the ranks that share its tokens, each of which has a part in batch, and the numbers of all.
    numbers: of its samples in batch, where that has broken ones, too; None: it has these samples alone.
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
        """What this rank adds to the sums over all ranks."""
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
        """Samples that it holds."""
        return len(self.places)

    def pin_memory(self) -> "MicroBatch":
        """The same in page-locked memory (torch's DataLoader calls this)."""
        return dataclasses.replace(self, batch=self.batch.pin_memory())


@dataclass(frozen=True)
class Window:
    """This rank's micro-batches of one optimizer step, on the device.

    num_planned: samples of the step over all ranks, broken ones included; data_wait_s: time spent waiting for them;
    passes: optimizer updates over all of them; metrics: sums that came with them, as those of MicroLoss.
    """

    micro_batches: list[MicroBatch]
    num_planned: int
    data_wait_s: float
    passes: int = 1
    metrics: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)

    @property
    def batches(self) -> list[Batch]:
        """The tensors alone."""
        return [micro.batch for micro in self.micro_batches]

    @property
    def counts(self) -> Counts:
        """The counts of this rank's micro-batches, broken samples left out."""
        return Counts(*map(sum, zip(*(micro.counts for micro in self.micro_batches))))

    @property
    def broken(self) -> list[BrokenSample]:
        """The samples of this rank that could not be shown."""
        return [broken for micro in self.micro_batches for broken in micro.broken]


def windows(plan: StepPlan, mesh: Mesh, *, done: int, num_workers: int, device: torch.device) -> Iterator[Window]:
    """This rank's window of every optimizer step that is left when `done` are done, on the device.

    Any step can be started from at once, for its samples follow from the order and its number.
    """
    layouts, ahead = itertools.tee(plan.after(done))  # planned once, though the loader runs ahead of the loop
    own = (micro_batch for layout in ahead for micro_batch in layout.of_ranks[mesh.dp_rank])
    loaded = micro_batches(plan.dataset, own, num_workers, device, mesh)
    started = time.perf_counter()
    for samples, of_ranks in layouts:  # which may wait for records that are still being encoded
        yield Window([next(loaded) for _ in of_ranks[mesh.dp_rank]], len(samples), time.perf_counter() - started)
        started = time.perf_counter()


def micro_batches(
    dataset: EncodedDataset, batches: Iterable[list[int]], num_workers: int, device: torch.device, mesh: Mesh
) -> Iterator[MicroBatch]:
    """Micro-batches of these samples on the device, decoded ahead of their turn.

    Of each, the ranks that share its tokens have a part; they take the same batches, in step with each other.
    """
    options = {
        "num_workers": num_workers,
        "worker_init_fn": obey_only_parent,
        "generator": torch.Generator(),  # the loader draws a seed, by default from the global one
        "pin_memory": device.type == "cuda",
    }
    if mesh.shared > 1:
        loader = _shared(dataset, batches, mesh, options)
    else:
        collate_fn = partial(_micro_batch, options=dataset.image_options)
        loader = torch.utils.data.DataLoader(dataset, batch_sampler=batches, collate_fn=collate_fn, **options)
    for micro in loader:
        yield dataclasses.replace(micro, batch=micro.batch.to(device))


def _shared(
    dataset: EncodedDataset, batches: Iterable[list[int]], mesh: Mesh, options: dict[str, object]
) -> Iterator[MicroBatch]:
    """Yield this rank's part of each micro-batch, in step with the ranks that have the same samples.

    options: of the DataLoader.
    """
    from llava_ds.data.shared_loader import PartsOfMicroBatches

    parts = PartsOfMicroBatches(dataset, [part.cut(mesh) for part in mesh.parts if part.cut is not None])
    cut = torch.utils.data.DataLoader(parts, batch_size=None, sampler=batches, collate_fn=_unchanged, **options)
    return (_agreed(each, mesh) for each in cut)


def _unchanged(item: object) -> object:
    return item


def _agreed(cut: "CutMicroBatch", mesh: Mesh) -> MicroBatch:
    """The rank's part without the samples that some rank could not decode, whose tokens nobody is asked for then."""
    from llava_ds.data.shared_loader import without

    finders = torch.full((cut.num_planned,), mesh.shared)  # the first rank that could not decode a sample
    finders[list(cut.broken)] = mesh.shared_rank
    torch.distributed.all_reduce(finders, torch.distributed.ReduceOp.MIN, mesh.shared_host_group)
    found = {place for place, finder in enumerate(finders.tolist()) if finder < mesh.shared}
    firsts = itertools.accumulate((counts.samples for counts in cut.counts), initial=0)
    numbers = [range(first, first + counts.samples) for first, counts in zip(firsts, cut.counts)]  # in the batch
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


def _micro_batch(items: list[LoadedSample | LoadedPair | BrokenSample], options: ImageOptions) -> MicroBatch:
    places = tuple(i for i, item in enumerate(items) if not isinstance(item, BrokenSample))
    return MicroBatch(
        batch=collate([sample for i in places for sample in items[i].samples], options),
        places=places,
        **numbers_of([counts_of(items[i]) for i in places]),
        broken=tuple(item for item in items if isinstance(item, BrokenSample)),
    )


def numbers_of(kept: list[ItemCounts]) -> dict[str, int]:
    """What a MicroBatch of these items holds."""
    names = ("tokens", "targets", "pairs", "tiles", "tile_pairs")
    return {f"num_{name}": sum(getattr(each, name) for each in kept) for name in names}
