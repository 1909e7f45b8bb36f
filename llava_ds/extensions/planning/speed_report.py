"""Report estimated speed: a table of all ZeRO stages, the run's bottleneck, and possible improvements."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from llava_ds.config.arguments import Arguments
from llava_ds.constants import ConfigError
from llava_ds.extensions.active import flags_class
from llava_ds.extensions.planning.fit import GB, Run, aligned, columns, fits, headings, placement_name
from llava_ds.extensions.planning.speed import (
    ATTENTION_SHARE,
    LINK_SHARE,
    MEMORY_SHARE,
    PCIE_COLLECTIVE_SHARE,
    TERA,
    Load,
    Machine,
    StepTime,
    step_time,
)
from llava_ds.extensions.table import EXTENSIONS

LEAST_GAIN = 0.03  # minimum gain in tokens/s: smaller ones are not proposed

ROWS = {
    "compute": "compute_s",
    "memory": "memory_s",
    "traffic, not hidden": "traffic_s",
    "CPU's optimizer": "cpu_s",
    "PCIe, not hidden": "pcie_s",
    "bubble": "bubble_s",
    "= a step": "total_s",
}


@dataclass(frozen=True)
class SpeedRun:
    """A run, the work of its ranks, and the machine. gpu_memory: bytes; None proposes runs even if they may not fit."""

    run: Run
    load: Load
    machine: Machine
    gpu_memory: float | None

    def time(self) -> StepTime | None:
        return step_time(self.run, self.run.placement, self.load, self.machine)

    def columns(self) -> dict[str, "SpeedRun"]:
        """Return this run with the placement of every column of the table."""
        return {name: dataclasses.replace(self, run=other) for name, other in columns(self.run).items()}

    @property
    def fits(self) -> bool:
        return self.gpu_memory is None or fits(self.run.estimate().total, self.gpu_memory)


def load_of(run: Run, args: Arguments, supervised: float, sample_tokens: float, tiles: float, useful: float) -> Load:
    """Return a rank's work under the flags, for samples with a mean length and a mean number of tiles.

    Raises ConfigError if only the number of parameters is known, because the layers are needed.
    """
    if run.batch is None:
        raise ConfigError("--speed needs the model's layers: give --model with a named size, or name folders")
    training = args.training
    samples = training.per_device_train_batch_size * training.gradient_accumulation_steps
    micro_steps = training.gradient_accumulation_steps
    if training.tokens_per_micro_batch is not None:
        # Like the packer, assume as few packs of similar size as the token limit allows.
        micro_steps = -int(-samples * sample_tokens // (run.batch.num_tokens * run.setup.sp))
    per_micro_step = samples / micro_steps / run.setup.sp  # per rank
    tokens = per_micro_step * sample_tokens
    return Load(
        micro_steps,
        tokens,
        sample_tokens,
        supervised=supervised * tokens,
        tiles=tiles * per_micro_step,
        useful=useful,
        fused_layers=args.fuses,
    )


def speed_table(speed: SpeedRun) -> list[str]:
    """Tabulate the step time of every stage and offload. The run's own column is marked."""
    cells = [each.time() for each in speed.columns().values()]
    unit, times_per_s = ("s", 1) if max(time.total_s for time in cells if time is not None) >= 1 else ("ms", 1000)
    rows = [(f"{unit} of a step", headings(speed.run))]
    shown = {label: name for label, name in ROWS.items() if name != "bubble_s" or speed.run.setup.pp > 1}
    rows += [(label, [_cell(time, name, ".3f", times_per_s) for time in cells]) for label, name in shown.items()]
    rows += [("traffic, GB per rank", ["-" if time is None else f"{time.traffic_bytes / GB:.1f}" for time in cells])]
    rows += [("tokens/s, all GPUs", [_cell(time, "tokens_per_s", ",.0f") for time in cells])]
    rows += [("MFU", ["-" if time is None else f"{time.mfu:.1%}" for time in cells])]
    return aligned(rows)


def speed_lines(speed: SpeedRun) -> list[str]:
    """Describe the assumptions, the bottleneck of the step, and possible improvements."""
    time = speed.time()
    if time is None:
        return [*assumptions(speed), "offload to NVMe: no estimate, because disks differ too much; measure yours"]
    share, bound = max((seconds / time.total_s, name) for name, seconds in bounds(speed, time).items())
    lines = [
        f"{placement_name(speed.run.placement)}: {time.total_s:.3g} s per step, {time.tokens_per_s:,.0f} tokens/s, "
        f"MFU {time.mfu:.1%}; bound by {bound}, {share:.0%} of the step"
    ]
    found = [f"faster: {words}: {gain:+.0%} tokens/s" for gain, words in improvements(speed)]
    return [*assumptions(speed), *lines, *(found or ["faster: no tried change gains 3 %"])]


def bounds(speed: SpeedRun, time: StepTime) -> dict[str, float]:
    """Return the seconds of a step by the resource that limits them."""
    link = "NVLink" if speed.machine.gpu.link else "PCIe between the GPUs"
    network = "the network" if speed.run.setup.num_gpus > speed.run.setup.gpus_per_node else link
    return {
        "compute (products, attention, recomputation)": time.compute_s,
        "the GPU's memory bandwidth": time.memory_s,
        network: time.traffic_s,
        "the CPU's optimizer and PCIe": time.cpu_s + time.pcie_s,
        "stages waiting for each other": time.bubble_s,
    }


def improvements(speed: SpeedRun) -> list[tuple[float, str]]:
    """Return single changes that fit in memory and increase tokens/s, the largest gain first."""
    before = speed.time().tokens_per_s
    found = []
    for words, other in _changes(speed):
        time = other.time()
        if time is None or not other.fits:
            continue
        gain = time.tokens_per_s / before - 1
        if gain >= LEAST_GAIN:
            found.append((gain, words))
    return sorted(found, reverse=True)


def _changes(speed: SpeedRun) -> Iterator[tuple[str, SpeedRun]]:
    run, load = speed.run, speed.load
    if run.batch.num_recomputed:
        kept = dataclasses.replace(run, batch=dataclasses.replace(run.batch, num_recomputed=0))
        yield "recompute no layers (--gradient_checkpointing False)", dataclasses.replace(speed, run=kept)
    timed = {name: time for name, other in speed.columns().items() if other.fits and (time := other.time()) is not None}
    if timed:
        name = min(timed, key=lambda name: timed[name].total_s)
        yield f"{name} in the DeepSpeed JSON", speed.columns()[name]
    if load.micro_steps > 1:
        yield "micro-batches of twice the tokens", _larger_micro_batches(speed)
    more = dataclasses.replace(load, micro_steps=2 * load.micro_steps)
    yield "twice the samples per step (changes the optimisation)", dataclasses.replace(speed, load=more)
    if run.setup.num_gpus > run.setup.gpus_per_node:
        faster = dataclasses.replace(speed.machine, network_gbit=4 * speed.machine.network_gbit)
        yield "a network of four times the bandwidth", dataclasses.replace(speed, machine=faster)
    for flag in [] if load.fused_layers else filter(None, (kind.fuses for kind in map(flags_class, EXTENSIONS))):
        fused = dataclasses.replace(load, fused_layers=True)
        yield flag, dataclasses.replace(speed, load=fused)
    if load.useful < 1:
        yield "no padding", dataclasses.replace(speed, load=dataclasses.replace(load, useful=1.0))


def _larger_micro_batches(speed: SpeedRun) -> SpeedRun:
    load, batch = speed.load, speed.run.batch
    steps = -(-load.micro_steps // 2)
    more = {name: load.micro_steps / steps * getattr(load, name) for name in ("tokens", "supervised", "tiles")}
    packed = {name: 2 * getattr(batch, name) for name in ("num_tokens", "num_supervised", "num_tiles")}
    run = dataclasses.replace(speed.run, batch=dataclasses.replace(batch, **packed))
    return dataclasses.replace(speed, load=dataclasses.replace(load, micro_steps=steps, **more), run=run)


def assumptions(speed: SpeedRun) -> list[str]:
    """Describe the assumptions in words."""
    machine, load, setup = speed.machine, speed.load, speed.run.setup
    gpu, peak = machine.gpu, machine.peak(setup.weight_bytes)
    link = (
        f"NVLink at {LINK_SHARE:.0%} of {gpu.link:g} GB/s" if gpu.link
        else f"PCIe at {PCIE_COLLECTIVE_SHARE:.0%} of {gpu.pcie:g} GB/s"
    )  # fmt: skip
    nodes = -(-setup.num_gpus // setup.gpus_per_node)
    if nodes > 1:
        link += f", {nodes} nodes with {machine.network_gbit:g} Gbit/s each at {LINK_SHARE:.0%}"
    packed = "" if load.useful == 1 else f", {load.useful:.0%} of the computed ones (the rest is padding or waiting)"
    return [
        f"{setup.num_gpus} x {gpu.name}: products at {machine.matmul_share:.0%} of {peak / TERA:g} TFLOP/s, attention "
        f"at {ATTENTION_SHARE:.0%}, memory at {MEMORY_SHARE:.0%} of {gpu.bandwidth:g} GB/s, {link}; "
        f"{machine.overlap:.0%} of the compute that DeepSpeed overlaps with traffic hides it",
        f"a rank's step: {load.micro_steps} x {load.tokens:,.0f} tokens on average{packed}, in samples of "
        f"{load.sample_tokens:,.0f}, with {load.tiles:.3g} image tiles each; data loading, evals and saves are "
        "not counted",
    ]


def speed_json(speed: SpeedRun) -> dict[str, object]:
    """Return the report's figures as JSON values, in seconds and bytes; null if not estimated."""
    times, own = {name: each.time() for name, each in speed.columns().items()}, speed.time()
    return {
        "gpu": dataclasses.asdict(speed.machine.gpu),
        "assumptions": {
            "matmul_share": speed.machine.matmul_share,
            "attention_share": ATTENTION_SHARE,
            "network_gbit": speed.machine.network_gbit,
            "overlap": speed.machine.overlap,
        },
        "load": dataclasses.asdict(speed.load),
        "steps": {
            name: time and {**dataclasses.asdict(time), "total_s": time.total_s, "tokens_per_s": time.tokens_per_s}
            for name, time in times.items()
        },
        "bounds_s": own and bounds(speed, own),
        "faster": [] if own is None else [{"change": words, "gain": gain} for gain, words in improvements(speed)],
    }


def _cell(time: StepTime | None, name: str, form: str, times: float = 1) -> str:
    return "-" if time is None else format(times * getattr(time, name), form)
