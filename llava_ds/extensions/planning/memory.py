# P parameters, T trained ones, N ranks, w bytes per weight (2 in bf16 and fp16, 4 in fp32)
"""Estimate the bytes that a rank needs by ZeRO stage and offload, computed as DeepSpeed 0.19 allocates them.

Under tensor parallelism, P and T count one rank's parameters, and N the ranks with the same matrix parts. In a
pipeline, P and T count one stage's parameters, and N its ranks. With --ep_size, N for experts counts the ranks that
hold the same ones.

Model states are measured at the boundary of an optimizer step: after the last backward, before the update.

    stage   weights          gradients   fp32 copy     moments (AdamW's two)
    0       wP               wT          4T if w < 4   8T
    1, 2    wP               wT / N      4T / N        8T / N
    3       wP / N           wT / N      4T / N        8T / N

In bf16 with everything trained that is 16P at stage 0, 2P + 14P/N at 1 and 2, and 16P/N at 3. In fp32, stages 1 to 3
keep a second fp32 copy of the weights: 20P on one rank, against 16P at stage 0. The estimate also includes padding:
groups to multiples of 2N elements at stages 1 and 2, and every tensor to multiples of N at 3. Stages 1 and 2 also hold
the whole gradient of each tensor that a rank owns a part of, and stage 3 whole tensors up to
stage3_param_persistence_threshold.

In separate columns:

- buffers: the bucket of gradients under reduction (reduce_bucket_size, twice with overlap_comm at 1 and 2), its copy
  for the collective and the largest gradient before it is copied in; at 0 the flattened bucket of the all-reduce; at 1
  with accumulation the full gradients that wait for the boundary.
- gathered: the peak of ZeRO-3's gathered weights. That is more than one layer: DeepSpeed prefetches up to
  stage3_max_live_parameters and keeps weights that it needs again within stage3_max_reuse_distance.
- optimizer step: the fp32 gradients of the group (stage 3: sub-group) being updated. They never exist together with the
  activations, so the larger counts.

Weights packed by --bits count with their bits instead of w, plus their scales that stage 3 doesn't partition.

Optimizer and weights are offloaded separately. With offload_optimizer, gradients, fp32 copy and moments are in the
node's pinned memory: 4T of gradients plus wT of incoming ones, and at stage 2 a wT copy of the updated weights. With
offload_param only the weights leave the GPU. For NVMe, buffers have DeepSpeed's default sizes. The NVMe figures were
never compared with a run.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import Literal

from llava_ds.extensions.planning.activations import MicroBatch, activation_bytes, exchange_buffers, saved_bytes
from llava_ds.extensions.planning.shapes import ModelShape

ALL_REDUCE_BUCKET = 500_000_000  # elements that stage 0 reduces at a time (DeepSpeed's MEMORY_OPT_ALLREDUCE_SIZE)
NVME_PARAM_BUFFERS, NVME_PARAM_BUFFER_SIZE, NVME_OPTIMIZER_BUFFERS = 5, 100_000_000, 4  # DeepSpeed's defaults


Device = Literal["none", "cpu", "nvme"]


@dataclass(frozen=True)
class ZeroPlacement:
    """A ZeRO stage and the devices of offload_optimizer and offload_param; "none" is the GPU."""

    stage: int
    optimizer: Device = "none"  # gradients, fp32 copy and moments
    param: Device = "none"  # weights


# Columns of the table.
PLACEMENTS = {
    "ZeRO-0": ZeroPlacement(0),
    "ZeRO-1": ZeroPlacement(1),
    "ZeRO-2": ZeroPlacement(2),
    "ZeRO-3": ZeroPlacement(3),
    "2 + cpu opt": ZeroPlacement(2, "cpu"),
    "3 + cpu opt": ZeroPlacement(3, "cpu"),
    "3 + cpu all": ZeroPlacement(3, "cpu", "cpu"),
    "3 + nvme": ZeroPlacement(3, "nvme", "nvme"),
}


@dataclass(frozen=True)
class ZeroSettings:
    """Sizes in zero_optimization that determine memory, in elements, with DeepSpeed's defaults."""

    reduce_bucket_size: int = 500_000_000
    prefetch_bucket_size: int = 50_000_000
    param_persistence_threshold: int = 100_000
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    sub_group_size: int = 1_000_000_000
    overlap_comm: bool = True

    @classmethod
    def of(cls, zero: dict) -> "ZeroSettings":
        """Read a resolved zero_optimization section. overlap_comm defaults to true at stage 3 only, as in DeepSpeed."""
        names = [each.name for each in fields(cls) if each.name != "overlap_comm"]
        sizes = {name: int(zero[key]) for name in names for key in (name, f"stage3_{name}") if key in zero}
        overlap = zero.get("overlap_comm")
        return cls(**sizes, overlap_comm=zero.get("stage") == 3 if overlap is None else overlap)


@dataclass(frozen=True)
class Setup:
    """Devices and precision of a run. weight_bytes: 2 or 4. gradient_bytes: per accumulated gradient. moments: fp32
    numbers per parameter in the optimizer. sp: ranks that share the tokens of each sample. tp: ranks that share
    matrices. pp: number of pipeline stages. ep: ranks that share experts.
    """

    num_gpus: int
    zero: ZeroSettings = field(default_factory=ZeroSettings)
    gpus_per_node: int = 8
    weight_bytes: int = 2
    gradient_bytes: int = 2
    accumulates: bool = False
    moments: float = 2
    sp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def ranks(self) -> int:
        """Number of ranks among which ZeRO divides model states: those with the same matrix parts and stage."""
        return self.num_gpus // (self.tp * self.pp)


@dataclass(frozen=True)
class Estimate:
    """Bytes on the rank that needs most; cpu and nvme: bytes on a node."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    optimizer_step: int
    gathered: int = 0
    cpu: int = 0
    nvme: int = 0

    @property
    def model_states(self) -> int:
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """Peak bytes: the larger of a micro-batch and an optimizer step. They never overlap."""
        return self.model_states + max(self.activations + self.gathered + self.buffers, self.optimizer_step)


def estimate(shape: ModelShape, placement: ZeroPlacement, setup: Setup, batch: MicroBatch | None = None) -> Estimate:
    """Estimate a rank's memory; without a micro-batch, no activations are counted.

    In a pipeline, estimates the stage that needs most.
    """
    estimate_stage = {0: _replicated, 3: _sharded}.get(placement.stage, _sharded_optimizer)
    if not shape.stages:
        found = estimate_stage(shape, placement, setup, most_activations(shape, setup, batch))
        return _with_frozen(found, shape, placement, setup) if shape.second else found
    ranks = (
        estimate_stage(stage, placement, setup, _activations(shape, index, setup, batch))
        for index, stage in enumerate(shape.stages)
    )
    return max(ranks, key=lambda rank: rank.total)


def _with_frozen(own: Estimate, shape: ModelShape, placement: ZeroPlacement, setup: Setup) -> Estimate:
    """Add a frozen model: whole on every rank, unless ZeRO-3 shards it (not if ranks share matrices or experts)."""
    w, ranks = setup.weight_bytes, setup.num_gpus
    if placement.stage < 3 or ranks == 1 or max(setup.tp, setup.ep) > 1:
        return replace(own, weights=own.weights + w * shape.second)
    ahead = max(setup.zero.max_live_parameters, setup.zero.max_reuse_distance) + setup.zero.prefetch_bucket_size
    shard, gathered = w * math.ceil(shape.second / ranks), w * min(shape.second, ahead)
    if placement.param != "none":
        return replace(own, gathered=own.gathered + gathered, cpu=own.cpu + shard * _ranks_of_a_node(setup))
    return replace(own, weights=own.weights + shard, gathered=own.gathered + gathered)


def most_activations(shape: ModelShape, setup: Setup, batch: MicroBatch | None) -> int:
    """Return the bytes of the largest activations on any rank; 0 without a micro-batch."""
    return max(_activations(shape, index, setup, batch) for index in range(len(shape.stages) or 1))


def _activations(shape: ModelShape, index: int, setup: Setup, batch: MicroBatch | None) -> int:
    """Return the activations in bytes on stage `index`, with one micro-batch in flight for it and each later stage."""
    if batch is None:
        return 0
    own, w, begun = shape, setup.weight_bytes, 0
    if shape.stages:
        own, begun = shape.stages[index], (len(shape.stages) - 1 - index if setup.accumulates else 0)
        share = own.text.num_layers / shape.text.num_layers
        batch = replace(batch, num_recomputed=math.ceil(batch.num_recomputed * share))
    activations = activation_bytes(own, batch, w) + (begun * saved_bytes(own, batch, w) if begun else 0)
    return activations + (exchange_buffers(own, batch, w) if setup.sp > 1 else 0)


def largest_unit(shape: ModelShape) -> int:
    """Return the number of elements in the largest module that ZeRO-3 gathers at once."""
    return max(map(sum, shape.units))


def _replicated(shape: ModelShape, placement: ZeroPlacement, setup: Setup, activations: int) -> Estimate:
    w, trained = setup.weight_bytes, shape.trained_of_rank
    bucket = min(trained, ALL_REDUCE_BUCKET) * w
    return Estimate(
        weights=w * sum(shape.tensors) + _packed_bytes(shape),
        gradients=w * trained,
        optimizer=4 * (setup.moments + (w < 4)) * trained,
        activations=activations,
        buffers=bucket,
        optimizer_step=0 if w == 4 else 4 * trained,
    )


def _sharded_optimizer(shape: ModelShape, placement: ZeroPlacement, setup: Setup, activations: int) -> Estimate:
    w, copies = setup.weight_bytes, shape.copies(setup.ranks)
    # Each group is padded to a multiple of two elements per rank (nccl_start_alignment_factor).
    flat = [-(-sum(group) // (2 * ranks)) * 2 * ranks for group, ranks in zip(shape.groups, copies)]
    partitions = [size // ranks for size, ranks in zip(flat, copies)]
    owned = sum(partitions)
    # Gradients accumulated in another precision need a flat buffer of the partition's size.
    held = owned if setup.gradient_bytes > w else _most_held(shape.groups, partitions)
    largest = max(map(max, shape.groups))
    buckets = setup.zero.reduce_bucket_size * (2 if setup.zero.overlap_comm else 1)
    buffers = w * (buckets + largest)
    offloaded = placement.optimizer != "none"
    if offloaded:
        buffers += w * largest  # gradients are collected here before they leave the GPU
    elif placement.stage == 1 and setup.accumulates:
        buffers += setup.gradient_bytes * max(0, shape.trained_of_rank - held)
    in_cpu = (4 * (setup.moments + 2) + w) * owned + w * largest + (w * held if setup.accumulates else 0)
    return Estimate(
        weights=w * (sum(flat) + sum(shape.frozen)) + _packed_bytes(shape),
        gradients=0 if offloaded else setup.gradient_bytes * held,
        optimizer=0 if offloaded else 4 * (setup.moments + 1) * owned,
        activations=activations,
        buffers=buffers,
        optimizer_step=0 if offloaded else 4 * max(partitions),
        cpu=in_cpu * _ranks_of_a_node(setup) if offloaded else 0,
    )


def _sharded(shape: ModelShape, placement: ZeroPlacement, setup: Setup, activations: int) -> Estimate:
    w, ranks, zero = setup.weight_bytes, setup.ranks, setup.zero
    groups = [[math.ceil(size / ranks) for size in group] for group in shape.groups]
    owned = sum(map(sum, groups))
    partitions = owned + sum(math.ceil(size / ranks) for size in shape.frozen)
    persisted = sum(size for size in shape.tensors if size <= zero.param_persistence_threshold)
    ahead = max(zero.max_live_parameters, zero.max_reuse_distance)
    stored = sum(shape.tensors) + _packed_bytes(shape) // w
    gathered = min(stored - persisted, ahead + largest_unit(shape) + zero.prefetch_bucket_size)
    if ranks == 1 and placement.param == "none":
        gathered = persisted = 0  # on one rank, a partition is the whole tensor, so nothing is gathered
    largest = max(map(max, shape.groups))
    sub_group = min(max(map(sum, groups)), zero.sub_group_size + math.ceil(largest / ranks))
    weights, gradients = w * partitions + _packed_bytes(shape, ranks), setup.gradient_bytes * owned
    optimizer, step, own_copy = 4 * (setup.moments + 1) * owned, 4 * sub_group, 4 * owned
    in_cpu = {
        "none": 0,
        "cpu": gradients + optimizer + own_copy,
        "nvme": gradients + NVME_OPTIMIZER_BUFFERS * 4 * sub_group,
    }[placement.optimizer]
    in_cpu += {"none": 0, "cpu": weights, "nvme": NVME_PARAM_BUFFERS * NVME_PARAM_BUFFER_SIZE * w}[placement.param]
    on_nvme = (placement.optimizer == "nvme") * (optimizer + own_copy) + (placement.param == "nvme") * weights
    if placement.optimizer != "none":
        gradients = optimizer = step = 0
    if placement.param != "none":
        weights = 0
    return Estimate(
        weights=weights + w * persisted,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        gathered=w * gathered,
        buffers=w * (zero.reduce_bucket_size + max(zero.reduce_bucket_size, largest) + largest),
        optimizer_step=step,
        cpu=in_cpu * _ranks_of_a_node(setup),
        nvme=on_nvme * _ranks_of_a_node(setup),
    )


def _most_held(groups: tuple[tuple[int, ...], ...], partitions: list[int]) -> int:
    """Return the largest number of elements on a rank, counting every tensor that its partitions overlap as a whole.

    The count changes only at tensor borders, so only ranks at borders are checked.
    """
    changes: dict[int, int] = defaultdict(int)  # difference from the previous rank
    for group, partition in zip(groups, partitions):
        start = 0
        for size in group:
            if size:
                changes[start // partition] += size
                changes[(start + size - 1) // partition + 1] -= size
            start += size
    return max(accumulate(changes[rank] for rank in sorted(changes)))


def _packed_bytes(shape: ModelShape, ranks: int = 1) -> int:
    """Return the bytes of packed weights, sharded over the ranks, and of their unsharded scales."""
    return int(sum(shape.packed) * (shape.packed_bits / ranks + shape.scale_bits) / 8)


def _ranks_of_a_node(setup: Setup) -> int:
    return min(setup.num_gpus, setup.gpus_per_node)
