# N records of the data, each with two answers
"""Log-probabilities under the reference model: the model that preference optimisation begins with, or another.

They are computed once, before the first step and before a checkpoint is restored, and kept beside the encoded data: no
second model is in memory when training begins, and a resumed run reads them. With LoRA they are the base model's, as
adapters begin at zero.
"""

import time
from functools import partial
from pathlib import Path

import numpy as np
import torch

from llava_ds.constants import DataError
from llava_ds.data.dataset import EncodedDataset
from llava_ds.data.file_slices import write_errors
from llava_ds.data.fingerprint import digest_of
from llava_ds.data.loader import micro_batches
from llava_ds.data.step_plan import Packing
from llava_ds.engine.tensor_parallel import part_of
from llava_ds.files.writing import write_whole
from llava_ds.model.loading import bit_sum
from llava_ds.runtime.mesh import Mesh, sum_over
from llava_ds.runtime.ranks import Ranks, gather
from llava_ds.runtime.tf32 import tf32_allowed
from llava_ds.runtime.waiting import queuing, waiting
from llava_ds.train.objectives.dpo import sum_by_sample

VERSION = 1  # raise it when the same data and weights would give other numbers


def add_reference(
    model: torch.nn.Module,
    dtype: torch.dtype,
    dataset: EncodedDataset,
    packing: Packing,
    num_workers: int,
    ranks: Ranks,
    mesh: Mesh,
) -> str:
    """Set dataset.reference, from the cache or computed now by a model, which may be an engine, that computes in dtype.

    Returns a line about it. All ranks call it together.
    """
    weights = weights_digest(getattr(model, "module", model), mesh)
    path = dataset.folder / cache_name(dataset.fingerprint, weights, dtype, ranks.device)
    if all(gather(path.is_file(), ranks)):
        dataset.reference = _read(path, dataset.num_records)
        return f"reference log-probabilities of {len(dataset):,} pairs: {path}"
    began = time.perf_counter()
    dataset.reference = log_probs(model, dataset, packing, num_workers, ranks.device, mesh)
    if ranks.local_rank == 0:
        with write_errors(dataset.folder, "the reference log-probabilities"):
            write_whole(path, partial(_write, dataset.reference), shared=True)
    seconds = time.perf_counter() - began
    return f"reference log-probabilities of {len(dataset):,} pairs: computed in {seconds:.0f} s ({path})"


def cache_name(data: str, weights: str, dtype: torch.dtype, device: torch.device) -> str:
    """The name of the file for data and weights, by their digests, and for all that changes how these are computed."""
    tf32 = device.type == "cuda" and dtype == torch.float32 and tf32_allowed()
    return f"reference-{digest_of([str(VERSION), data, weights, str(dtype), *(['TF32'] if tf32 else [])])}.npy"


@torch.no_grad()
def log_probs(
    model: torch.nn.Module,
    dataset: EncodedDataset,
    packing: Packing,
    num_workers: int,
    device: torch.device,
    mesh: Mesh,
) -> np.ndarray:
    """Summed log-probabilities of both answers of every record, (N, 2) float64; NaN for those that can't be shown.

    The data are laid out as one optimizer step that takes all of them. All ranks call it together.
    """
    model.eval()
    of_rank = packing.lay_out_all(dataset.lengths)[mesh.dp_rank]
    found = torch.zeros(dataset.num_records, 3, dtype=torch.float64, device=device)  # the last: 1 if computed
    for samples, micro in zip(of_rank, micro_batches(dataset, of_rank, num_workers, device, mesh)):
        with queuing():
            sums, _ = sum_by_sample(model(micro.batch, log_probs=True), micro.batch)
        # Ranks that share a pair have a part of its sums each.
        shown = list(range(len(micro.places)) if micro.numbers is None else micro.numbers)
        rows = torch.tensor([int(dataset.rows[samples[i]]) for i in micro.places], device=device)
        found[rows, :2] = sums[: len(sums) // 2 * 2].view(-1, 2)[shown]
        found[rows, 2] = float(micro.is_counted)
    model.train()
    with waiting("the reference log-probabilities"):
        values = sum_over(mesh.data_group, found).cpu().numpy()
    return np.where(values[:, 2:] == 1.0, values[:, :2], np.nan)


def weights_digest(model: torch.nn.Module, mesh: Mesh) -> str:
    """A text that changes with any bit of the weights, and is the same on any mesh and at any ZeRO stage.

    From the sums of the bits of every parameter; ZeRO-3's shards end with zeros.
    """
    sums = []
    for parameter in model.parameters():
        shard = getattr(parameter, "ds_tensor", None)
        counts = shard is not None or mesh.dp_rank == mesh.sp_rank == 0  # of copies one
        counts = counts and (mesh.tp_rank == 0 or part_of(parameter) is not None)
        own = bit_sum(parameter.detach() if shard is None else shard)
        sums.append(own if counts else torch.zeros_like(own))
    with waiting("sums of the weights"):
        total = sum_over(None, torch.stack(sums)).tolist()
    return digest_of(f"{name} {p.dtype} {value}" for (name, p), value in zip(model.named_parameters(), total))


def _write(values: np.ndarray, path: Path) -> None:
    with path.open("wb") as file:  # a path without .npy at its end would get it
        np.save(file, values)


def _read(path: Path, num_records: int) -> np.ndarray:
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} can't be read ({error}): remove it, and it is computed again") from error
    if found.shape != (num_records, 2) or found.dtype != np.float64:
        raise DataError(f"{path} has {found.dtype} {found.shape}, expected float64 ({num_records}, 2): remove it")
    return found
