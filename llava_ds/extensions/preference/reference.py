# N records of the data, each with two answers
"""Compute log-probabilities under the reference model that is the run's initial model or a separate one.

They are computed once, before the first step or the restoring of a checkpoint, and cached with the encoded data. So
training needs no second model in memory, and a resumed run reads the cache. With LoRA, the reference includes the
initial adapter: a new adapter adds zero, and one from --lora_weight_path counts.
"""

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from llava_ds.constants import DataError
from llava_ds.data.dataset import EncodedDataset
from llava_ds.data.file_slices import write_errors
from llava_ds.data.fingerprint import digest_of
from llava_ds.data.loader import MicroBatch, micro_batches
from llava_ds.data.step_plan import Packing
from llava_ds.engine.placement import Placement, placement_of
from llava_ds.engine.runner import Runner
from llava_ds.files.writing import write_whole
from llava_ds.model.heads import LogProbs, sum_by_sample
from llava_ds.model.open.loading import SUM_NUMBERS, bit_view, is_packed, scales_of
from llava_ds.runtime.mesh import Mesh, sum_over
from llava_ds.runtime.ranks import Ranks, gather
from llava_ds.runtime.tf32 import tf32_allowed
from llava_ds.runtime.waiting import queuing, waiting

VERSION = 3  # increment when results for the same data and weights change


@dataclass(frozen=True)
class Reference:
    """The reference model.

    runner: runs its forward pass; the runner's engine is the model itself, or the model's engine. dtype: compute dtype.
    forward: forward_digest of the model's plan.
    """

    runner: Runner
    dtype: torch.dtype
    forward: str


def add_reference(
    reference: Reference, dataset: EncodedDataset, packing: Packing, num_workers: int, ranks: Ranks, mesh: Mesh
) -> str:
    """Set the dataset's reference log-probabilities from the cache, or compute them. Returns a line. Collective."""
    engine = reference.runner.engine
    weights = weights_digest(getattr(engine, "module", engine), mesh)
    path = dataset.folder / cache_name(dataset.fingerprint, weights, reference, ranks.device)
    if all(gather(path.is_file(), ranks)):
        dataset.of_answers["reference"] = _read(path, dataset.num_records)
        return f"reference log-probabilities of {len(dataset):,} samples: {path}"
    began = time.perf_counter()
    found = log_probs(reference.runner, dataset, packing, num_workers, ranks.device, mesh)
    dataset.of_answers["reference"] = found
    if ranks.local_rank == 0:
        with write_errors(dataset.folder, "the reference log-probabilities"):
            write_whole(path, partial(_write, found), shared=True)
    seconds = time.perf_counter() - began
    return f"reference log-probabilities of {len(dataset):,} samples: computed in {seconds:.0f} s ({path})"


def cache_name(data: str, weights: str, reference: Reference, device: torch.device) -> str:
    """Return the cache's file name, a digest of everything that determines the log-probabilities.

    These are the data's fingerprint (records, template, images), the weights' digest, the forward's digest, and the
    arithmetic.
    """
    tf32 = device.type == "cuda" and reference.dtype == torch.float32 and tf32_allowed()
    parts = [str(VERSION), data, weights, reference.forward, str(reference.dtype), device.type, f"TF32 {tf32}"]
    return f"reference-{digest_of(parts)}.npy"


@torch.no_grad()
def log_probs(
    runner: Runner,
    dataset: EncodedDataset,
    packing: Packing,
    num_workers: int,
    device: torch.device,
    mesh: Mesh,
) -> np.ndarray:
    """Return the summed log-probabilities of both answers of every record, (N, 2) float64; NaN for broken records.

    The data are packed as a single optimizer step. Collective.
    """
    model = runner.engine
    model.eval()
    of_rank = packing.lay_out_all(dataset)[mesh.dp_rank]
    found = torch.zeros(dataset.num_records, 3, dtype=torch.float64, device=device)  # last column: 1 if computed
    for samples, micro in zip(of_rank, micro_batches(dataset, of_rank, num_workers, device, mesh)):
        with queuing():
            rows = runner.forward(model, micro.batch, lambda model, batch: model(batch, LogProbs()))
            if rows is None:  # another rank has the results
                continue
            sums, _ = sum_by_sample(rows, micro.batch)
        # Add up the sums of ranks that share a pair, because each has only a part.
        place, number, is_shown = answers_of(micro)
        numbers = [int(dataset.rows[samples[i]]) for i in micro.places]
        records = torch.tensor(numbers, dtype=torch.int64, device=device)  # an empty list would become float
        found[records[place[is_shown]], number[is_shown]] = sums[: len(place)][is_shown]
        found[records, 2] = float(micro.is_counted)
    model.train()
    with waiting("the reference log-probabilities"):
        values = runner.agree(sum_over(mesh.data_group, found)).cpu().numpy()
    return np.where(values[:, 2:] == 1.0, values[:, :2], np.nan)


def answers_of(micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return three tensors (A,): each answer's index in `places`, its number in the record, and False if it is not
    counted. Without numbers in the batch, records have two answers."""
    sources, number = micro.batch.sources, micro.batch.extra.get("number")
    number = torch.arange(len(sources), device=sources.device) % 2 if number is None else number.long()
    items = (number == 0).cumsum(0) - 1
    if micro.numbers is None:  # skip the copy below, which would wait for the device
        return items, number, items < len(micro.places)
    shown = torch.tensor(micro.numbers, dtype=torch.int64, device=sources.device)
    return torch.searchsorted(shown, items), number, torch.isin(items, shown)


def weights_digest(model: torch.nn.Module, mesh: Mesh) -> str:
    """Return a digest that changes if any bit of the weights changes or moves.

    It covers every parameter, the scales of quantized ones, and every buffer. It does not depend on the ZeRO stage or
    the number of ranks, unless ranks share matrices. ZeRO-3's shards end with zeros.
    """
    sums, placement = {}, placement_of(model)
    slices = {p: share.slice for p, share in placement.held(model).items()}
    named = {
        f"{name} {tensor.dtype}": tensor
        for name, tensor in itertools.chain(model.named_parameters(), _scales(model), model.named_buffers())
    }
    names, earlier = _names_of_ranks(list(named), placement, mesh)
    for name, tensor in named.items():
        shard = getattr(tensor, "ds_tensor", None)
        is_cut = bool(slices.get(tensor))
        counts = shard is not None or mesh.dp_rank == mesh.part.index == 0  # count only one copy
        counts = counts and (is_cut or name not in earlier)
        held = tensor.detach() if shard is None else shard
        part = placement.index * is_cut if shard is None else torch.distributed.get_rank(tensor.ds_process_group)
        own = _place_sum(held, part * held.numel())
        if counts:
            sums[name] = own
    none = torch.zeros((), dtype=torch.int64, device=own.device)
    with waiting("sums of the weights"):
        total = sum_over(None, torch.stack([sums.get(name, none) for name in names])).tolist()
    return digest_of(f"{name} {value}" for name, value in zip(names, total))


def _names_of_ranks(own: list[str], placement: Placement, mesh: Mesh) -> tuple[list[str], set[str]]:
    """Return the names of the tensors on all ranks that share the model, and on the ranks before this one."""
    if placement.size == 1:
        return sorted(own), set()
    found: list = [None] * mesh.shared
    with waiting("names of the weights"):
        torch.distributed.all_gather_object(found, (placement.index, own), group=mesh.shared_host_group)
    earlier = {name for index, names in found if index < placement.index for name in names}
    return sorted({name for _, names in found for name in names}), earlier


def _place_sum(tensor: torch.Tensor, first: int) -> torch.Tensor:
    """Sum each number's bits times an odd factor that depends on its position, counted from `first`.

    The sum is additive over shards, and changes if two numbers swap positions.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for piece in bit_view(tensor).split(SUM_NUMBERS):  # in pieces, because summing takes 64 bits per number
        places = torch.arange(first, first + len(piece), dtype=torch.int64, device=tensor.device)
        total += (piece.long() * (2 * places + 1)).sum()
        first += len(piece)
    return total


def _scales(model: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield the scales that turn a quantized parameter's integers back into weights."""
    for name, module in model.named_modules():
        if is_packed(getattr(module, "weight", None)):
            yield from ((f"{name} scale {i}", scale) for i, scale in enumerate(scales_of(module)))


def _write(values: np.ndarray, path: Path) -> None:
    with path.open("wb") as file:  # a file object, because np.save would append .npy to a path
        np.save(file, values)


def _read(path: Path, num_records: int) -> np.ndarray:
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} can't be read ({error}): remove it, and it is computed again") from error
    if found.shape != (num_records, 2) or found.dtype != np.float64:
        raise DataError(f"{path} has {found.dtype} {found.shape}, expected float64 ({num_records}, 2): remove it")
    return found
