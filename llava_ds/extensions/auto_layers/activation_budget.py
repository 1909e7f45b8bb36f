"""Choose the layers to checkpoint by measuring the largest micro-batch before the first step.

It runs with loss weight zero. To save memory, all layers except for one per part are checkpointed. Hooks of
autograd measure what this layer saves; checkpointed layers save only their input. On a GPU, the allocator's peak also
covers gradients, ZeRO's buffers and workspace. On a CPU, the memory available at the end of forward is used instead.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from llava_ds.engine.activation_checkpointing import checkpoint_spread, repeated_layers
from llava_ds.engine.param_groups import num_elements
from llava_ds.engine.runner import backward_with_weight_zero
from llava_ds.engine.warm_up import LargestMicroBatch, discard_gradients, missing_state_bytes
from llava_ds.runtime.device_memory import free_memory
from llava_ds.runtime.ranks import Ranks, gather
from llava_ds.runtime.waiting import waiting

MARGIN = 0.05  # share of memory left for fragmentation and other processes
GB, MB = 10**9, 10**6


@dataclass(frozen=True)
class PartLayers:
    """The layers of a part that run. One layer saves saved_bytes for backward, or input_bytes if it is checkpointed."""

    name: str
    layers: list[nn.Module]
    saved_bytes: int
    input_bytes: int


@dataclass(frozen=True)
class ActivationMemory:
    """The memory that the largest micro-batch saves for backward. other_bytes: memory outside of the parts' layers."""

    parts: list[PartLayers]
    other_bytes: int

    @property
    def num_layers(self) -> int:
        return sum(len(part.layers) for part in self.parts)

    def counts(self, num_checkpointed: int) -> list[int]:
        """Distribute num_checkpointed layers over the parts, starting with the part whose layers free most memory."""
        counts, left = [0] * len(self.parts), num_checkpointed
        for i in sorted(range(len(counts)), key=lambda i: self.parts[i].input_bytes - self.parts[i].saved_bytes):
            counts[i] = min(left, len(self.parts[i].layers))
            left -= counts[i]
        return counts

    def need(self, counts: list[int]) -> int:
        """Return the peak bytes in backward if counts[i] layers of part i are checkpointed, and one is recomputed."""
        recomputed = max((part.saved_bytes for part, count in zip(self.parts, counts) if count), default=0)
        in_layers = sum(
            count * part.input_bytes + (len(part.layers) - count) * part.saved_bytes
            for part, count in zip(self.parts, counts)
        )
        return self.other_bytes + recomputed + in_layers

    def fewest(self, room: float) -> int | None:
        """Return the smallest number of checkpointed layers that fits in `room` bytes; None if no number does."""
        return next((n for n in range(self.num_layers + 1) if self.need(self.counts(n)) <= room), None)


def choose_checkpointed_layers(
    engine,
    largest: LargestMicroBatch,
    parts: dict[str, nn.Module],
    num_moments: float,
    activation_memory_gb: float | None,
    ranks: Ranks,
) -> list[str]:
    """Checkpoint the fewest layers with which the largest micro-batch fits. Returns lines that report the choice.

    parts: the parts whose layers may be checkpointed, by name, after a call of checkpoint_layers for each; num_moments:
    the optimizer's moments per weight; activation_memory_gb: the room for activations, None for the free memory.
    Collective; all ranks make the same choice.
    """
    memory, room = measure(engine, largest, parts, num_moments)
    if activation_memory_gb is not None:
        room = activation_memory_gb * GB
    # The rank with the least room decides for all.
    too_many = memory.num_layers + 1
    found = [
        (room, too_many if fewest is None else fewest) for room, fewest in gather((room, memory.fewest(room)), ranks)
    ]
    room, fewest = min(found, key=lambda each: (-each[1], each[0]))
    counts = memory.counts(min(fewest, memory.num_layers))
    for part, count in zip(memory.parts, counts):
        checkpoint_spread(part.layers, count)
    lines = [
        f"activations of the largest micro-batch ({largest.batch.input_ids.shape[1]:,} tokens): room for "
        f"{_size(room)}, {_size(memory.need([0] * len(counts)))} without activation checkpointing"
    ]
    for part, count in zip(memory.parts, counts):
        lines.append(
            f"{count} of {len(part.layers)} layers of the {part.name} are checkpointed: a layer saves "
            f"{_size(part.saved_bytes)}, or {_size(part.input_bytes)} if checkpointed"
        )
    if fewest == too_many:
        lines.append(f"even so, activations need {_size(memory.need(counts))} and may not fit")
    return lines


def measure(
    engine, largest: LargestMicroBatch, parts: dict[str, nn.Module], num_moments: float
) -> tuple[ActivationMemory, float]:
    """Return the memory of the largest micro-batch's activations, and the room for them on this rank in bytes."""
    on_gpu = engine.device.type == "cuda"
    if on_gpu:
        with waiting("the device"):
            torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(engine.device)
    probes = {}
    for name, part in parts.items():
        layers = repeated_layers(part)
        checkpoint_spread(layers, len(layers))
        probes[name] = layers[len(layers) // 2]  # the first layer saves less if everything before it is frozen
        probes[name].gradient_checkpointing = False
    with discard_gradients(engine):
        for is_last in (False, True) if largest.accumulates else (True,):
            with _record_saved_tensors(engine.module, parts, probes) as saved:
                loss_sum = largest.summed(engine, largest.batch)
            available = None if on_gpu else free_memory(engine.device)
            backward_with_weight_zero(engine, loss_sum, is_last)
    memory = saved.memory(probes)
    measured = memory.need([len(part.layers) - 1 for part in memory.parts])
    missing = missing_state_bytes(engine, num_moments)
    if on_gpu:
        free, _ = torch.cuda.mem_get_info(engine.device)
        usable = free + torch.cuda.memory_reserved(engine.device)
        more = usable * (1 - MARGIN) - torch.cuda.max_memory_allocated(engine.device)
        torch.cuda.empty_cache()  # because later micro-batches need blocks of other sizes
    else:
        # Measured at the end of forward: subtract what backward allocates. With accumulation, gradients exist already.
        recomputed = max(part.saved_bytes for part in memory.parts)
        more = available * (1 - MARGIN) - recomputed - (0 if largest.accumulates else _gradient_bytes(engine))
    return memory, measured + more - missing


@dataclass
class _SavedTensors:
    """Storages that autograd saves, by the part whose probed layer saves them ("" outside of probed layers)."""

    bytes_of: dict[str, dict[int, int]] = field(default_factory=lambda: {"": {}})
    inputs: dict[str, int] = field(default_factory=dict)
    input_pointers: set[int] = field(default_factory=set)  # inputs of every layer; torch may save them inside a hook
    ran: dict[str, list[nn.Module]] = field(default_factory=dict)

    def memory(self, probes: dict[str, nn.Module]) -> ActivationMemory:
        parts = [
            PartLayers(name, self.ran[name], sum(self.bytes_of[name].values()), self.inputs[name]) for name in probes
        ]
        inside = self.input_pointers.union(*(self.bytes_of[name] for name in probes))
        others = sum(size for pointer, size in self.bytes_of[""].items() if pointer not in inside)
        return ActivationMemory(parts, others)


@contextmanager
def _record_saved_tensors(
    model: nn.Module, parts: dict[str, nn.Module], probes: dict[str, nn.Module]
) -> Iterator[_SavedTensors]:
    """Record the storages that autograd saves in a forward pass, except for parameters and buffers.

    Tensors are compared with parameters at once, because at ZeRO-3 a parameter's storage exists only while it is used.
    """
    saved = _SavedTensors()
    inside = ""
    shared: set[int] = set()  # storages of a layer's other arguments
    weights = [*model.parameters(), *model.buffers()]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        pointer = storage.data_ptr()
        if pointer not in saved.bytes_of[inside] and all(w.untyped_storage().data_ptr() != pointer for w in weights):
            saved.bytes_of["" if pointer in shared else inside][pointer] = storage.nbytes()
        return tensor

    def enter(name: str, layer: nn.Module, args: tuple, kwargs: dict) -> None:
        nonlocal inside, shared
        hidden, *others = args if args else (kwargs["hidden_states"],)
        named = {key: value for key, value in kwargs.items() if key != "hidden_states"}
        saved.ran.setdefault(name, []).append(layer)
        saved.input_pointers.add(hidden.untyped_storage().data_ptr())
        if layer is probes[name]:
            saved.inputs[name] = hidden.untyped_storage().nbytes()
            saved.bytes_of[name] = {}
            leaves = [value for value in tree_leaves((others, named)) if isinstance(value, torch.Tensor)]
            shared = {value.untyped_storage().data_ptr() for value in leaves}
            inside = name

    def leave(layer: nn.Module, *_: object) -> None:
        nonlocal inside, shared
        if layer in probes.values():
            inside, shared = "", set()

    handles = []
    for name, part in parts.items():
        for layer in repeated_layers(part):
            handles.append(layer.register_forward_pre_hook(functools.partial(enter, name), with_kwargs=True))
            handles.append(layer.register_forward_hook(leave))
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield saved
    finally:
        for handle in handles:
            handle.remove()


def _gradient_bytes(engine) -> int:
    """Return the bytes that this rank's first backward pass allocates for gradients."""
    trained = (p for p in engine.module.parameters() if p.requires_grad)
    size = sum(num_elements(p) * p.element_size() for p in trained)
    return size // (engine.dp_world_size if engine.zero_optimization_stage() >= 2 else 1)


def _size(num_bytes: float) -> str:
    return f"{num_bytes / GB:.1f} GB" if abs(num_bytes) >= GB else f"{num_bytes / MB:.2f} MB"
