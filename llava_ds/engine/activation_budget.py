"""How many layers have to run again in backward: measured on the heaviest micro-batch, before the first step.

It is run once (with weight zero) with all layers but one of each part running again, which takes the least memory of
all ways in which it can run. Autograd's hooks see what that one layer keeps; the others keep their input. On a GPU the
allocator says how much the whole needed, so that gradients, ZeRO's buffers and working space are in it; on a CPU it is
what was available when forward ended.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from llava_ds.engine.activation_checkpointing import recompute_only, repeated_layers
from llava_ds.engine.param_groups import num_elements
from llava_ds.engine.warm_up import Heaviest, missing_states, weightless
from llava_ds.runtime.ranks import Ranks, gather, local_ranks

MARGIN = 0.05  # of the memory that there is, left for the allocator's fragmentation and what other processes take
GB, MB = 10**9, 10**6


@dataclass(frozen=True)
class LayerKind:
    """The layers of a part that run, and what one of them leaves for backward: kept, or its input if it runs again."""

    name: str
    layers: list[nn.Module]
    kept_bytes: int
    input_bytes: int


@dataclass(frozen=True)
class Kept:
    """What the heaviest micro-batch leaves for backward: by its layers, and other_bytes by all else."""

    kinds: list[LayerKind]
    other_bytes: int

    @property
    def num_layers(self) -> int:
        return sum(len(kind.layers) for kind in self.kinds)

    def counts(self, num_recomputed: int) -> list[int]:
        """How many of each kind's layers run again, if so many in all do: where one saves most, first."""
        counts, left = [0] * len(self.kinds), num_recomputed
        for i in sorted(range(len(counts)), key=lambda i: self.kinds[i].input_bytes - self.kinds[i].kept_bytes):
            counts[i] = min(left, len(self.kinds[i].layers))
            left -= counts[i]
        return counts

    def need(self, counts: list[int]) -> int:
        """Bytes that there are in backward at most, if so many layers of each kind run again, one at a time."""
        running = max((kind.kept_bytes for kind, count in zip(self.kinds, counts) if count), default=0)
        return (
            self.other_bytes
            + running
            + sum(
                count * kind.input_bytes + (len(kind.layers) - count) * kind.kept_bytes
                for kind, count in zip(self.kinds, counts)
            )
        )

    def fewest(self, room: float) -> int | None:
        """The fewest layers that have to run again for the need to be at most room; None where all of them are not
        enough."""
        return next((n for n in range(self.num_layers + 1) if self.need(self.counts(n)) <= room), None)


def choose_layers(
    engine,
    heaviest: Heaviest,
    parts: dict[str, nn.Module],
    num_moments: int,
    activation_memory_gb: float | None,
    ranks: Ranks,
) -> list[str]:
    """Let the fewest layers run again that the heaviest micro-batch fits with; returns lines that say what was found.

    parts: the parts whose layers may run again, by name; recompute_layers was called for each. num_moments: of the
    optimizer. activation_memory_gb: the room for activations, instead of what is free. All ranks call it together and
    choose the same.
    """
    kept, room = measure(engine, heaviest, parts, num_moments)
    if activation_memory_gb is not None:
        room = activation_memory_gb * GB
    # The rank with the least room decides for all.
    room, num_recomputed = min(
        gather((room, kept.fewest(room)), ranks), key=lambda found: (-_or(found[1], kept.num_layers + 1), found[0])
    )
    chosen = _or(num_recomputed, kept.num_layers)
    counts = kept.counts(chosen)
    for kind, count in zip(kept.kinds, counts):
        recompute_only(kind.layers, count)
    lines = [
        f"activations of the largest micro-batch ({heaviest.batch.input_ids.shape[1]:,} tokens): room for "
        f"{_size(room)}, {_size(kept.need([0] * len(counts)))} if every layer keeps what it made"
    ]
    for kind, count in zip(kept.kinds, counts):
        lines.append(
            f"{count} of {len(kind.layers)} layers of the {kind.name} run again in backward: one keeps "
            f"{_size(kind.kept_bytes)}, or {_size(kind.input_bytes)} and runs again"
        )
    if num_recomputed is None:
        lines.append(f"all of them need {_size(kept.need(counts))} of that room and may not fit")
    return lines


def measure(engine, heaviest: Heaviest, parts: dict[str, nn.Module], num_moments: int) -> tuple[Kept, float]:
    """What the heaviest micro-batch keeps, and the bytes that its need may reach on this rank."""
    on_gpu = engine.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(engine.device)
    probes = {}
    for name, part in parts.items():
        layers = repeated_layers(part)
        recompute_only(layers, len(layers))
        probes[name] = layers[len(layers) // 2]  # what comes before the first may be frozen, and it then keeps less
        probes[name].gradient_checkpointing = False
    with weightless(engine):
        passes = 2 if heaviest.accumulates else 1
        for i in range(passes):
            with _watched(engine.module, parts, probes) as seen:
                loss_sum = engine(heaviest.batch)
            available = None if on_gpu else free_memory(engine.device)
            engine.set_gradient_accumulation_boundary(i == passes - 1)
            engine.backward(loss_sum * 0, scale_wrt_gas=False)
    kept = seen.kept(probes)
    trial = kept.need([len(kind.layers) - 1 for kind in kept.kinds])
    missing = missing_states(engine, num_moments)
    if on_gpu:
        free, _ = torch.cuda.mem_get_info(engine.device)
        there_is = free + torch.cuda.memory_reserved(engine.device)
        more = there_is * (1 - MARGIN) - torch.cuda.max_memory_allocated(engine.device)
        torch.cuda.empty_cache()  # blocks of the sizes that this took are of no use to what comes
    else:
        # Forward had ended: no layer was running again, and a lone micro-batch had met no gradients.
        running = max(kind.kept_bytes for kind in kept.kinds)
        more = available * (1 - MARGIN) - running - (0 if heaviest.accumulates else _gradient_bytes(engine))
    return kept, trial + more - missing


@dataclass
class _Seen:
    """Storages that autograd keeps, by the probed part in whose layer they were made ("" for all else)."""

    bytes_of: dict[str, dict[int, int]] = field(default_factory=lambda: {"": {}})
    inputs: dict[str, int] = field(default_factory=dict)
    input_pointers: set[int] = field(default_factory=set)  # of every layer, which torch may keep where a hook sees it
    ran: dict[str, list[nn.Module]] = field(default_factory=dict)

    def kept(self, probes: dict[str, nn.Module]) -> Kept:
        kinds = [
            LayerKind(name, self.ran[name], sum(self.bytes_of[name].values()), self.inputs[name]) for name in probes
        ]
        inside = self.input_pointers.union(*(self.bytes_of[name] for name in probes))
        others = sum(size for pointer, size in self.bytes_of[""].items() if pointer not in inside)
        return Kept(kinds, others)


@contextmanager
def _watched(model: nn.Module, parts: dict[str, nn.Module], probes: dict[str, nn.Module]) -> Iterator[_Seen]:
    """See what autograd keeps of a forward: distinct storages, without parameters and buffers.

    Under ZeRO-3 a gathered parameter has its storage only while it is used, so each is looked at when it is seen.
    """
    seen = _Seen()
    inside = ""
    shared: set[int] = set()  # storages that a layer is given beside its input
    weights = [*model.parameters(), *model.buffers()]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        pointer = storage.data_ptr()
        if pointer not in seen.bytes_of[inside] and all(w.untyped_storage().data_ptr() != pointer for w in weights):
            seen.bytes_of["" if pointer in shared else inside][pointer] = storage.nbytes()
        return tensor

    def enter(name: str, layer: nn.Module, args: tuple, kwargs: dict) -> None:
        nonlocal inside, shared
        hidden, *others = args if args else (kwargs["hidden_states"],)
        named = {key: value for key, value in kwargs.items() if key != "hidden_states"}
        seen.ran.setdefault(name, []).append(layer)
        seen.input_pointers.add(hidden.untyped_storage().data_ptr())
        if layer is probes[name]:
            seen.inputs[name] = hidden.untyped_storage().nbytes()
            seen.bytes_of[name] = {}
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

            def on_entry(layer: nn.Module, args: tuple, kwargs: dict, name: str = name) -> None:
                enter(name, layer, args, kwargs)

            handles += [
                layer.register_forward_pre_hook(on_entry, with_kwargs=True),
                layer.register_forward_hook(leave),
            ]
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield seen
    finally:
        for handle in handles:
            handle.remove()


def _gradient_bytes(engine) -> int:
    """Of a rank's gradients, which its first backward makes."""
    trained = (p for p in engine.module.parameters() if p.requires_grad)
    size = sum(num_elements(p) * p.element_size() for p in trained)
    return size // (engine.dp_world_size if engine.zero_optimization_stage() >= 2 else 1)


def free_memory(device: torch.device) -> float:
    """Bytes that are free on a GPU, or of this machine's memory for each of its ranks."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    import psutil

    return psutil.virtual_memory().available / local_ranks()


def _or(value: int | None, other: int) -> int:
    return other if value is None else value


def _size(num_bytes: float) -> str:
    return f"{num_bytes / GB:.1f} GB" if abs(num_bytes) >= GB else f"{num_bytes / MB:.2f} MB"
