# S supervised positions of a micro-batch, N of a data set, n of a sample, K kept tokens
"""A teacher's K most probable tokens at every supervised position, on disk, for training without the teacher."""

import gc
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from llava_ds.batch import Batch
from llava_ds.constants import DataError
from llava_ds.data.dataset import EncodedDataset
from llava_ds.data.file_slices import write_errors
from llava_ds.data.fingerprint import digest_of
from llava_ds.data.loader import micro_batches
from llava_ds.extensions.distill.divergence import Teacher, kept_divergence
from llava_ds.extensions.distill.teacher import FLAG, LiveTeacher, shared_rows
from llava_ds.files.writing import sha256
from llava_ds.model.open.weights import weight_files
from llava_ds.runtime.mesh import Mesh
from llava_ds.runtime.ranks import Ranks, barrier, broadcast_from_first, check_shared_folder, print_first
from llava_ds.runtime.waiting import waiting
from llava_ds.second_models.forward_identity import forward_digest
from llava_ds.train.plan import Plan

VERSION = 2  # raise it when the same data and weights would give other numbers


@dataclass(frozen=True)
class Kept(Teacher):
    """Kept distributions of a micro-batch: ids, logs (S, K); rows: C."""

    ids: torch.Tensor
    logs: torch.Tensor
    rows: int

    def values(self, part: slice, student: torch.Tensor, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
        return kept_divergence(student[:, : self.rows].log_softmax(1), self.ids[part], self.logs[part], beta)


class KeptTeacher:
    """Kept distributions of a data set in a file, (N, 2, K) int32: ids + 1, or 0, and the bits of log-probabilities.

    Every sample gets its own from the file, in Batch.extra.
    """

    def __init__(self, path: Path, dataset: EncodedDataset, kept: int, rows: int) -> None:
        self._path, self._kept, self._rows, self._begins = path, kept, rows, begins_of(dataset)
        self._numbers = np.memmap(path, np.int32, "r", shape=(int(self._begins[-1]), 2, kept))
        dataset.added = self._of_sample

    def _of_sample(self, index: int) -> dict[str, torch.Tensor]:
        numbers = np.array(self._numbers[slice(*self._begins[index : index + 2])])  # (n, 2, K)
        if not numbers[:, 0].all():
            raise DataError(f"its images could not be read when {self._path} was written: remove that file")
        return {"teacher": torch.from_numpy(numbers)}

    def of(self, batch: Batch) -> Kept:
        """Return the distributions of a micro-batch, without those of samples that ranks dropped together."""
        targets = batch.target_samples
        none = torch.zeros(0, 2, self._kept, dtype=torch.int32, device=targets.device)
        found = batch.extra.get("teacher", [])
        samples = torch.cat([targets[:0], *(targets.new_full((len(each),), i) for i, each in enumerate(found))])
        places = torch.arange(len(targets), device=targets.device) - torch.searchsorted(targets, targets)
        numbers = torch.cat([none, *found])[torch.searchsorted(samples, targets) + places]
        return Kept(numbers[:, 0].long() - 1, numbers[:, 1].contiguous().view(torch.float32), self._rows)


def kept_teacher(plan: Plan, ranks: Ranks, mesh: Mesh) -> KeptTeacher:
    """Open the training data's kept distributions, or write them. Collective."""
    frozen, own, dataset = plan.own["distill"], plan.args.own["distill"], plan.steps.dataset
    rows, folder = shared_rows(plan), Path(own.teacher_model_name_or_path)
    kept = min(own.gkd_logits_topk, rows)
    weights = plan.resume.weights.get(FLAG[2:]) or broadcast_from_first(
        ranks, lambda: {path.name: sha256(path) for path in weight_files(folder)}
    )
    numbers = VERSION, kept, rows, own.temperature, plan.resolved.compute_dtype, sorted(weights.items())
    parts = [*map(str, numbers), dataset.fingerprint, forward_digest(frozen.model, frozen.args, frozen.images)]
    path = dataset.folder / f"teacher-{digest_of(parts)}"
    known = broadcast_from_first(ranks, path.is_file)
    if not known:
        check_shared_folder(dataset.folder, "--cache_dir", ranks)
        with write_errors(dataset.folder, "the teacher's probabilities"):
            write(path, LiveTeacher.opened(plan, ranks, mesh), kept, plan, ranks, mesh)
        gc.collect()  # the teacher
    print_first(f"the teacher's {kept:,} most probable tokens: {'' if known else 'written to '}{path}")
    return KeptTeacher(path, dataset, kept, rows)


def begins_of(dataset: EncodedDataset) -> np.ndarray:
    """Return the first row of every sample in the file, and the number of rows N: (samples + 1,)."""
    return np.concatenate([[0], np.cumsum(dataset.num_targets, dtype=np.int64)])


@torch.no_grad()
def write(path: Path, teacher: LiveTeacher, kept: int, plan: Plan, ranks: Ranks, mesh: Mesh) -> None:
    """Write the file. Collective."""
    dataset, row_bytes = plan.steps.dataset, 8 * kept
    begins = begins_of(dataset)

    def create() -> Path:
        part = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # other runs may write the same
        with part.open("wb") as file:
            file.truncate(int(begins[-1]) * row_bytes)
        return part

    part = broadcast_from_first(ranks, create)
    of_rank = plan.steps.packing.lay_out_all(dataset)[mesh.dp_rank]
    loaded = micro_batches(dataset, of_rank, plan.args.data.dataloader_num_workers, ranks.device, mesh)
    with part.open("r+b") as file:
        for samples, micro in zip(of_rank, loaded):
            live = teacher.of(micro.batch)
            with live.opened(), waiting("the teacher's probabilities"):
                logs, ids = (each.cpu() for each in live.most_probable(kept))
            rows = torch.stack([ids.int() + 1, logs.view(torch.int32)], 1).numpy()
            for sample in (samples[place] for place in micro.places if mesh.shared_rank == 0):
                count = int(begins[sample + 1] - begins[sample])
                file.seek(int(begins[sample]) * row_bytes)
                file.write(rows[:count].tobytes())
                rows = rows[count:]
        file.flush()
        os.fsync(file.fileno())
    barrier(ranks)
    broadcast_from_first(ranks, lambda: part.rename(path))
