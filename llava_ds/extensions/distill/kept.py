# S supervised positions of a micro-batch, N of a data set, K kept tokens
"""A teacher's K most probable tokens at every supervised position, on disk, for training without the teacher."""

import gc
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from llava_ds.batch import Batch
from llava_ds.constants import DataError
from llava_ds.data.dataset import EncodedDataset
from llava_ds.data.file_slices import write_errors
from llava_ds.data.fingerprint import digest_of
from llava_ds.data.loader import MicroBatch, Window, micro_batches
from llava_ds.data.step_plan import StepLayout
from llava_ds.extensions.distill.divergence import kept_divergence
from llava_ds.extensions.distill.teacher import FLAG, LiveTeacher, shared_rows
from llava_ds.files.writing import sha256
from llava_ds.model.open.weights import weight_files
from llava_ds.runtime.mesh import Mesh
from llava_ds.runtime.ranks import Ranks, barrier, broadcast_from_first, check_shared_folder, gather, print_first
from llava_ds.runtime.waiting import waiting
from llava_ds.second_models.forward_identity import forward_digest
from llava_ds.train.plan import Plan

VERSION = 1  # raise it when the same data and weights would give other numbers
KINDS = {"ids": np.int32, "logs": np.float32}  # files, (N, K) each


@dataclass(frozen=True)
class Kept:
    """Kept distributions of a micro-batch: ids, logs (S, K); rows: C."""

    ids: torch.Tensor
    logs: torch.Tensor
    rows: int

    def opened(self) -> AbstractContextManager:
        """See divergence.Teacher."""
        return nullcontext()

    def values(self, part: slice, student: torch.Tensor, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
        """See divergence.Teacher."""
        return kept_divergence(student[:, : self.rows].log_softmax(1), self.ids[part], self.logs[part], beta)


class KeptTeacher:
    """Reads the numbers of a folder. missing: samples without them."""

    def __init__(self, folder: Path, dataset: EncodedDataset, kept: int, rows: int) -> None:
        self.folder, self.begins, self._rows = folder, begins_of(dataset), rows
        shape = int(self.begins[-1]), kept
        self._files = [np.memmap(folder / name, kind, "r", shape=shape) for name, kind in KINDS.items()]
        self._missing = set(json.loads((folder / "missing.json").read_text()))

    def added(self, micro: MicroBatch, samples: list[int]) -> MicroBatch:
        """Add the numbers to a micro-batch. samples: as planned."""
        shown = [samples[place] for place in micro.places]
        if found := self._missing.intersection(shown):
            raise DataError(
                f"{self.folder} lacks the teacher's numbers of {len(found)} samples, the first is number {min(found)}: "
                "their images could not be read when it was written; remove it, and it is written again"
            )
        rows = np.concatenate([np.arange(0), *(np.arange(*self.begins[i : i + 2]) for i in shown)])
        ids, logs = (torch.from_numpy(file[rows]).to(micro.batch.targets.device) for file in self._files)
        return replace(micro, batch=micro.batch.with_extra(teacher=(ids.long(), logs)))

    def windows(self, plain: Iterator[Window], layouts: Iterator[StepLayout], mesh: Mesh) -> Iterator[Window]:
        """Yield the windows with the teacher's numbers. layouts: of the same steps."""
        for window, layout in zip(plain, layouts):
            own = zip(window.micro_batches, layout.of_ranks[mesh.dp_rank])
            yield replace(window, micro_batches=[self.added(*each) for each in own])

    def of(self, batch: Batch) -> Kept:
        """Return the distributions of a micro-batch."""
        return Kept(*batch.extra["teacher"], self._rows)


def kept_teacher(plan: Plan, ranks: Ranks, mesh: Mesh) -> KeptTeacher:
    """Open the numbers of the training data, written now if they are not there. Collective."""
    frozen, own, dataset = plan.own["distill"], plan.args.own["distill"], plan.steps.dataset
    rows, folder = shared_rows(plan), Path(own.teacher_model_name_or_path)
    kept = min(own.gkd_logits_topk, rows)
    weights = plan.resume.weights.get(FLAG[2:]) or broadcast_from_first(
        ranks, lambda: {path.name: sha256(path) for path in weight_files(folder)}
    )
    numbers = [VERSION, dataset.fingerprint, weights, str(plan.resolved.compute_dtype), kept, own.temperature, rows]
    named = digest_of([json.dumps(numbers, sort_keys=True), forward_digest(frozen.model, frozen.args, frozen.images)])
    written = dataset.folder / f"teacher-{named}"
    known = broadcast_from_first(ranks, written.is_dir)
    if not known:
        check_shared_folder(dataset.folder, "--cache_dir", ranks)
        with write_errors(dataset.folder, "the teacher's numbers"):
            write(LiveTeacher.opened(plan, ranks, mesh), kept, plan, written, ranks, mesh)
        gc.collect()  # the teacher
    print_first(f"the teacher's {kept:,} most probable tokens: {'' if known else 'written to '}{written}")
    return KeptTeacher(written, dataset, kept, rows)


def begins_of(dataset: EncodedDataset) -> np.ndarray:
    """Return the first row of every sample in the files, and the number of rows N: (samples + 1,)."""
    return np.concatenate([[0], np.cumsum(dataset.num_targets, dtype=np.int64)])


@torch.no_grad()
def write(teacher: LiveTeacher, kept: int, plan: Plan, folder: Path, ranks: Ranks, mesh: Mesh) -> None:
    """Write the folder. Collective."""
    dataset, part = plan.steps.dataset, folder.with_suffix(".part")
    begins = begins_of(dataset)

    def create() -> None:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        for name, kind in KINDS.items():
            (part / name).touch()
            os.truncate(part / name, int(begins[-1]) * kept * np.dtype(kind).itemsize)

    broadcast_from_first(ranks, create)
    files, broken = [(part / name).open("r+b") for name in KINDS], []
    of_rank = plan.steps.packing.lay_out_all(dataset)[mesh.dp_rank]
    loaded = micro_batches(dataset, of_rank, plan.args.data.dataloader_num_workers, ranks.device, mesh)
    for samples, micro in zip(of_rank, loaded):
        live = teacher.of(micro.batch)
        with live.opened(), waiting("the teacher's numbers"):
            found = [each.cpu().numpy() for each in live.most_probable(kept)]  # logs, ids
        shown = [samples[place] for place in micro.places]
        broken += sorted({*samples} - {*shown})
        first = 0
        for sample in shown if mesh.shared_rank == 0 else ():
            count = int(begins[sample + 1] - begins[sample])
            for file, values, kind in zip(files, reversed(found), KINDS.values()):
                place = int(begins[sample]) * kept * np.dtype(kind).itemsize
                os.pwrite(file.fileno(), values[first : first + count].astype(kind).tobytes(), place)
            first += count
    for file in files:
        os.fsync(file.fileno())
        file.close()
    missing = sorted({*chain(*gather(broken, ranks))})
    broadcast_from_first(ranks, partial(_publish, part, folder, missing))
    barrier(ranks)


def _publish(part: Path, folder: Path, missing: list[int]) -> None:
    (part / "missing.json").write_text(json.dumps(missing))
    part.rename(folder)
