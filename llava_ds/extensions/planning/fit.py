"""Check if a run fits in a GPU's memory, find the smallest change that makes it fit, and tabulate the estimates."""

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from llava_ds.extensions.planning.activations import MicroBatch
from llava_ds.extensions.planning.memory import PLACEMENTS, Estimate, Setup, ZeroPlacement, estimate, largest_unit
from llava_ds.extensions.planning.shapes import ModelShape

GB, MB = 10**9, 10**6
HEADROOM = 0.1  # share of a GPU's memory for the CUDA context, NCCL and fragmentation
MOST_DOUBLINGS = 6  # maximum doublings of the number of GPUs
DEVICES = ("none", "cpu", "nvme")  # fastest first
# (optimizer, param) offload, in the order in which changes are proposed
OFFLOADS = (("none", "none"), ("cpu", "none"), ("cpu", "cpu"), ("nvme", "nvme"))
CELL = 13  # minimum column width

ROWS = {
    "weights": "weights",
    "gradients": "gradients",
    "fp32 copy and moments": "optimizer",
    "= model states": "model_states",
    "activations": "activations",
    "gathered": "gathered",
    "buffers": "buffers",
    "optimizer step": "optimizer_step",
    "= GPU, at most": "total",
    "CPU per node": "cpu",
    "NVMe per node": "nvme",
}


@dataclass(frozen=True)
class Run:
    """Everything about a training run that memory depends on. batch is None if only the number of parameters is
    known."""

    shape: ModelShape
    placement: ZeroPlacement
    setup: Setup
    batch: MicroBatch | None
    longest_sample: int = 1

    def estimate(self) -> Estimate:
        return estimate(self.shape, self.placement, self.setup, self.batch)


def fits(total: int, gpu_memory: float) -> bool:
    return total <= gpu_memory * (1 - HEADROOM)


def verdict(total: int, gpu_memory: float) -> str:
    """Judge a total against a GPU's memory, both in bytes: fits, tight or too big."""
    if fits(total, gpu_memory):
        return "fits"
    return "tight" if total <= gpu_memory else "too big"


def smallest_change(run: Run, gpu_memory: float) -> Run | None:
    """Return the run with the smallest change that makes it fit (none if it fits already); None if no change does.

    Changes without offload or more GPUs come first, then those with the fewest flags. Among these, recomputed layers
    come before a higher stage, and a higher stage before fewer tokens.
    """
    return next((other for other in _changed(run) if fits(other.estimate().total, gpu_memory)), None)


def describe_change(run: Run, other: Run) -> str:
    """List the settings that turn one run into another."""
    changes = []
    if other.setup.num_gpus != run.setup.num_gpus:
        changes.append(_num_ranks(other.setup))
    if run.batch is not None and other.batch.num_recomputed != run.batch.num_recomputed:
        changes.append("--gradient_checkpointing all")
    if other.placement.stage != run.placement.stage:
        changes.append(f"ZeRO-{other.placement.stage}")
    if run.batch is not None and other.batch.num_tokens != run.batch.num_tokens:
        changes.append(f"--tokens_per_micro_batch {other.batch.num_tokens}")
    moved: dict[str, list[str]] = {}
    for part in ("optimizer", "param"):
        device = getattr(other.placement, part)
        if device != getattr(run.placement, part):
            moved.setdefault(device, []).append(f"offload_{part}")
    changes += [f'{" and ".join(parts)} {{"device": "{device}"}}' for device, parts in moved.items()]
    return ", ".join(changes)


def advice(run: Run, gpu_memory: float) -> str:
    """Return a sentence that says that the run fits, or which smallest change would make it fit."""
    total, memory = run.estimate().total, f"{gpu_memory / GB:g} GB"
    start = f"{placement_name(run.placement)} on {_num_ranks(run.setup)} needs {total / GB:.1f} GB of {memory}"
    other = smallest_change(run, gpu_memory)
    if other == run:
        return f"{start}: fits"
    if other is None:
        return f"{start}, and no tried change fits, up to {run.setup.num_gpus << MOST_DOUBLINGS} GPUs and NVMe"
    needs = f"{other.estimate().total / GB:.1f} GB"
    return f"{start}; the smallest change that fits: {describe_change(run, other)} ({needs})"


def table(run: Run, gpu_memory: float | None, device: str = "GPU") -> list[str]:
    """Tabulate every stage and offload in GB (10**9 bytes) or MB; the run's own is marked. device: "GPU" or "CPU"."""
    cells = [other.estimate() for other in columns(run).values()]
    unit, size = ("GB", GB) if cells[0].total >= GB else ("MB", MB)
    rows = [(f"{unit} per {device}", headings(run))]
    rows += [
        (label.replace("GPU", device), [f"{getattr(each, field) / size:.2f}" for each in cells])
        for label, field in ROWS.items()
    ]
    if gpu_memory is not None:
        rows.append((f"in {gpu_memory / GB:g} GB", [verdict(each.total, gpu_memory) for each in cells]))
    return aligned(rows)


def headings(run: Run) -> list[str]:
    """Return the table's column names, with the run's own in brackets."""
    return [f"[{name}]" if other.placement == run.placement else name for name, other in columns(run).items()]


def aligned(rows: list[tuple[str, list[str]]]) -> list[str]:
    """Align labels and cells to the widest of each column."""
    widths = [max(CELL, *(len(cell) + 2 for cell in cells)) for cells in zip(*(cells for _, cells in rows))]
    return [f"{label:22}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths)) for label, cells in rows]


def description(run: Run, device: str = "GPU") -> list[str]:
    """Describe the model and its training in words. device: what a rank runs on, "GPU" or "CPU"."""
    parts = ", ".join(
        f"{part.name} {part.num_parameters:,}{'' if part.num_trained else ' frozen'}" for part in run.shape.parts
    )
    setup, batch, text = run.setup, run.batch, run.shape.text
    lines = [
        f"{run.shape.num_parameters:,} parameters, {run.shape.num_trained:,} of them trained ({parts}); "
        f"the largest gathered layer has {largest_unit(run.shape):,}"
        + (f"; a frozen second model has {run.shape.second:,}" if run.shape.second else ""),
        f"{_num_ranks(setup, device)}, {setup.weight_bytes} bytes per weight, "
        + (f"{run.shape.packed_bits} bits in {sum(run.shape.packed):,} of them, " if run.shape.packed else "")
        + (
            "no activations: only the number of parameters is known"
            if batch is None
            else f"at most {batch.num_tokens:,} tokens per micro-batch, {batch.num_supervised:,} supervised, "
            f"{batch.num_tiles} image tiles, " + _recomputed(batch.num_recomputed, text.num_layers)
        ),
    ]
    if batch is not None and text is not None and not text.is_llamas:
        lines.append(
            "activations are estimated for Llama layers of these widths, but this model's differ: a guide only"
        )
    return lines


def as_json(run: Run, gpu_memory: float | None) -> dict[str, object]:
    """Return the table's figures as JSON values, in bytes."""
    found = {}
    for name, other in columns(run).items():
        one = other.estimate()
        found[name] = {field: getattr(one, field) for field in ROWS.values()}
        if gpu_memory is not None:
            found[name]["verdict"] = verdict(one.total, gpu_memory)
    return {
        "parameters": {part.name: dataclasses.asdict(part) for part in run.shape.parts},
        "num_parameters": run.shape.num_parameters,
        "num_trained": run.shape.num_trained,
        "largest_gathered_layer_bytes": run.setup.weight_bytes * largest_unit(run.shape),
        "setup": dataclasses.asdict(run.setup),
        "micro_batch": run.batch and dataclasses.asdict(run.batch),
        "chosen": placement_name(run.placement),
        "bytes": found,
        "advice": None if gpu_memory is None else advice(run, gpu_memory),
    }


def _changed(run: Run) -> Iterator[Run]:
    """Yield the run, then its variants, the smallest change first."""
    recompute, halvings = [False], [0]
    if run.batch is not None:
        recompute += [True] if run.batch.num_recomputed != run.shape.text.num_layers else []
        halvings += [h for h in range(1, 32) if run.batch.num_tokens >> h >= run.longest_sample]
    stages = range(run.placement.stage, most_stage(run.shape) + 1)
    own = (run.placement.optimizer, run.placement.param)
    offloads = [own, *(offload for offload in OFFLOADS if offload != own and _is_further(offload, own))]

    def cost(change: tuple) -> tuple:
        doublings, offload, stage, halved, recomputed = change
        return doublings, offload, recomputed + (stage > stages[0]) + (halved > 0), halved, stage

    choices = (range(MOST_DOUBLINGS + 1), range(len(offloads)), stages, halvings, recompute)
    for change in sorted(itertools.product(*choices), key=cost):
        doublings, offload, stage, halved, recomputed = change
        placement = ZeroPlacement(stage, *offloads[offload])
        if placement not in (run.placement, *PLACEMENTS.values()) or not _goes_with(placement, run):
            continue
        batch = run.batch and dataclasses.replace(
            run.batch,
            num_tokens=run.batch.num_tokens >> halved,
            num_supervised=run.batch.num_supervised >> halved,
            num_tiles=max(1, run.batch.num_tiles >> halved),
            num_recomputed=run.shape.text.num_layers if recomputed else run.batch.num_recomputed,
        )
        setup = dataclasses.replace(run.setup, num_gpus=run.setup.num_gpus << doublings)
        yield dataclasses.replace(run, placement=placement, setup=setup, batch=batch)


def _is_further(offload: tuple[str, str], other: tuple[str, str]) -> bool:
    """Return True if optimizer and weights are both at least as far from the GPU as in `other`."""
    return all(DEVICES.index(device) >= DEVICES.index(than) for device, than in zip(offload, other))


def columns(run: Run) -> dict[str, Run]:
    """Return the table's columns: the run with every usual placement, and with its own if that is missing."""
    named = PLACEMENTS | {placement_name(run.placement): run.placement}
    return {name: dataclasses.replace(run, placement=each) for name, each in named.items() if _goes_with(each, run)}


def _goes_with(placement: ZeroPlacement, run: Run) -> bool:
    """Return False if the placement can't train this run's pipeline, shared experts or upcycled model."""
    setup, is_offloaded = run.setup, placement.optimizer != "none"
    if placement == run.placement:
        return True
    if is_offloaded and max(setup.pp, setup.ep) > 1:
        return False
    return placement.stage <= (1 if setup.pp > 1 else most_stage(run.shape))


def most_stage(shape: ModelShape) -> int:
    """Return the highest ZeRO stage that can train the model: 2 if it is upcycled."""
    return 2 if shape.text is not None and shape.text.expert_rows else 3


def placement_name(placement: ZeroPlacement) -> str:
    """Return the column name of a placement."""
    offloaded = {"opt": placement.optimizer, "param": placement.param}
    words = " + ".join(f"{device} {part}" for part, device in offloaded.items() if device != "none")
    return next((name for name, p in PLACEMENTS.items() if p == placement), f"{placement.stage} + {words}")


def _recomputed(count: int, num_layers: int) -> str:
    if count in (0, num_layers):
        return "every layer recomputed" if count else "every activation kept"
    return f"{count} of {num_layers} layers recomputed"


def _num_ranks(setup: Setup, device: str = "GPU") -> str:
    return f"1 {device}" if setup.num_gpus == 1 else f"{setup.num_gpus} {device}s"
