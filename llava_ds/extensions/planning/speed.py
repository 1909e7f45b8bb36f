# T tokens, D language-model width, w bytes per activation
"""Estimate the time of an optimizer step on given GPUs: a roofline of computation and communication.

A step is the sum of

    compute     FLOPs (tracking/flops.py) over a share of the GPU's peak; attention at a share of its own, with a
                backward that computes the scores again; forward of checkpointed layers twice
    memory      bytes that layers read and write outside their products, for the loss, and in the optimizer
    traffic     time of collectives (planning/traffic.py) beyond the compute that they overlap with
    CPU, PCIe   the optimizer's time on a CPU, and time of copies to and from it beyond compute
    bubble      idle time of a pipeline stage at the beginning and end of a step

for the rank with the average load. Not counted: waiting for data or for slower ranks, evals, saves, the first steps,
Python overhead (it matters for micro-batches of a few hundred tokens), and latency of collectives (it matters for small
layers on hundreds of ranks).

The constants below are assumptions with sources. Flags set the constants that differ most between machines.
"""

import math
from dataclasses import dataclass, replace

from llava_ds.extensions.planning.fit import Run
from llava_ds.extensions.planning.memory import Setup, ZeroPlacement
from llava_ds.extensions.planning.shapes import ModelShape
from llava_ds.extensions.planning.traffic import Traffic, exchange_traffic, step_traffic
from llava_ds.runtime.gpus import Gpu

TERA, GIGA = 1e12, 1e9
MATMUL_SHARE = 0.8  # share of the peak for the fastest shape, if the GPU table has no measurement
# Speed of a layer's matrix products at the power limit, relative to the fastest shape. It is the only constant tuned to
# the public figures in docs/speed.md. Inside a training step of an 8B, an H200 reached 47 % outside attention; its
# fastest product reaches 80 % (Bekman, Machine Learning Engineering).
LAYER_SHARE = 0.9
# Causal forward and backward with heads of 128: FlashAttention-2 reaches about 60 % of an A100's peak and 35 % of an
# H100's, FlashAttention-3 about 55 % of an H100's (arXiv 2307.08691 and 2407.08608, figures).
ATTENTION_SHARE = 0.45
ATTENTION_BACKWARD = 2.5  # five products instead of forward's two
MEMORY_SHARE = 0.8  # share of the data sheet's bandwidth, for large element-wise kernels
LINK_SHARE = 0.75  # share of NVLink's and network's bandwidth, for large collectives (nccl-tests' bus bandwidth)
PCIE_COLLECTIVE_SHARE = 0.4  # share of PCIe's bandwidth if ranks send through the CPU's memory
PCIE_SHARE = 0.75  # share of PCIe's bandwidth, for copies from pinned memory
CPU_ADAM_S = 0.25e-9  # per parameter, on all cores of a node (ZeRO-Offload, arXiv 2101.06840, table of Adam's latency)
# Values that a layer's forward reads and writes outside products and attention, per token and unit of width. Counted by
# kernel in transformers' modeling_llama and in Liger. Backward moves twice as many.
LAYER_NUMBERS, FUSED_LAYER_NUMBERS = 75, 22
LORA = 1.75  # factor on these values with LoRA, whose thin products are limited by memory bandwidth
LOGIT_BYTES = 36  # read and written per logit: stored, cast, softmax, gradient, cast, multiplied twice
NETWORK_GBIT = 100.0  # per node, if the vendor doesn't publish it
OVERLAP = 0.8  # share of compute that can hide traffic: collectives use some multiprocessors and bandwidth


@dataclass(frozen=True)
class Machine:
    """GPUs, and the assumptions that flags change.

    matmul_share: share of the peak that products reach. network_gbit: of all network cards of a node. overlap: share of
    compute that can hide traffic. tf32: True if fp32 products may use TF32.
    """

    gpu: Gpu
    matmul_share: float
    network_gbit: float
    overlap: float = OVERLAP
    tf32: bool = False

    @classmethod
    def of(
        cls, gpu: Gpu, matmul_share: float | None, network_gbit: float | None, overlap: float, tf32: bool
    ) -> "Machine":
        """Build a machine, with the GPU table's values for arguments that are None."""
        share = matmul_share or LAYER_SHARE * (gpu.matmul or MATMUL_SHARE)
        return cls(gpu, share, network_gbit or gpu.network or NETWORK_GBIT, overlap, tf32)

    def peak(self, weight_bytes: int) -> float:
        """Return the peak FLOP/s for weights of this many bytes."""
        if weight_bytes == 2:
            return self.gpu.half * TERA
        return (self.gpu.tf32 if self.tf32 and self.gpu.tf32 else self.gpu.fp32) * TERA

    def link_bandwidth(self, setup: Setup) -> float:
        """Return the bytes/s that a rank of a ring sends. Between nodes, all cards of a node serve each ring."""
        gpu = self.gpu
        inside = GIGA * (LINK_SHARE * gpu.link if gpu.link else PCIE_COLLECTIVE_SHARE * gpu.pcie)
        if setup.num_gpus <= setup.gpus_per_node:
            return inside
        return min(inside, LINK_SHARE * self.network_gbit * GIGA / 8)

    @property
    def memory_bandwidth(self) -> float:
        return MEMORY_SHARE * self.gpu.bandwidth * GIGA


@dataclass(frozen=True)
class Load:
    """A rank's average work in an optimizer step. tokens, supervised, tiles: per micro-batch, without padding.
    sample_tokens: length of a sample. useful: share of computed tokens that aren't padding. fused_layers: True if
    norms, positions and activations use Liger's kernels.
    """

    micro_steps: int
    tokens: float
    sample_tokens: float
    supervised: float
    tiles: float
    useful: float = 1.0
    fused_layers: bool = False


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step by cause, and its work. traffic_s and pcie_s count only time not hidden by
    compute."""

    compute_s: float
    memory_s: float
    traffic_s: float
    cpu_s: float
    pcie_s: float
    bubble_s: float
    traffic_bytes: float
    tokens: float  # sum over ranks
    mfu: float

    @property
    def total_s(self) -> float:
        return self.compute_s + self.memory_s + self.traffic_s + self.cpu_s + self.pcie_s + self.bubble_s

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.total_s


def step_time(run: Run, placement: ZeroPlacement, load: Load, machine: Machine) -> StepTime | None:
    """Estimate a step of the run with this stage and offload; None for NVMe, whose speed depends on the disk."""
    if "nvme" in (placement.optimizer, placement.param):
        return None
    if run.shape.stages:
        return _pipeline_time(run, placement, load, machine)
    shape, setup, steps = run.shape, run.setup, load.micro_steps
    peak = machine.peak(setup.weight_bytes)
    forward, backward = (
        (steps * flops / peak, steps * num_bytes / machine.memory_bandwidth)
        for flops, num_bytes in _passes(run, load, machine)
    )
    sent = step_traffic(shape, placement, setup, steps)
    exchanged = exchange_traffic(shape.text, setup, load.tokens / load.useful, run.batch.num_recomputed)
    sent = replace(sent, exchanged=steps * exchanged)
    exposed_s, pcie_s = _exposed(sent, sum(forward), sum(backward), load, machine, setup)
    updated_s, cpu_s = _optimizer_s(shape, placement, setup, machine)
    pairs = load.tokens * (load.sample_tokens + 1) / 2
    # Per micro-batch. Ranks that share matrices all compute the tower and the output layer.
    useful = shape.flops.of(load.tokens, pairs, load.tiles / setup.tp, load.supervised / setup.tp)
    time = StepTime(
        compute_s=forward[0] + backward[0],
        memory_s=forward[1] + backward[1] + updated_s,
        traffic_s=exposed_s,
        cpu_s=cpu_s,
        pcie_s=pcie_s,
        bubble_s=0.0,
        traffic_bytes=sent.total,
        tokens=steps * load.tokens * setup.ranks,
        mfu=0.0,
    )
    return replace(time, mfu=steps * useful / time.total_s / peak)


def _pipeline_time(run: Run, placement: ZeroPlacement, load: Load, machine: Machine) -> StepTime:
    """Estimate the step of a pipeline. Its slowest stage sets the pace, and idles for one micro-batch per other stage
    (arXiv 2104.04473, 2.2.1). Traffic between stages is not hidden by compute.
    """
    setup, layers = run.setup, run.shape.text.num_layers
    times = []
    for stage in run.shape.stages:
        recomputed = math.ceil(run.batch.num_recomputed * stage.text.num_layers / layers)
        own = replace(run, shape=stage, batch=replace(run.batch, num_recomputed=recomputed))
        times.append(step_time(own, placement, load, machine))
    slowest = max(times, key=lambda time: time.total_s)
    passed_on = 2 * load.micro_steps * load.tokens / load.useful * run.shape.text.hidden * setup.weight_bytes
    passing_s = passed_on / machine.link_bandwidth(setup)
    of_micro_batches = slowest.total_s - slowest.cpu_s - slowest.traffic_s + passing_s
    whole = replace(
        slowest,
        traffic_s=slowest.traffic_s + passing_s,
        traffic_bytes=slowest.traffic_bytes + passed_on,
        bubble_s=of_micro_batches * (setup.pp - 1) / load.micro_steps,
    )
    useful = sum(time.mfu * time.total_s for time in times) / setup.pp
    return replace(whole, mfu=useful / whole.total_s)


def _passes(run: Run, load: Load, machine: Machine) -> list[tuple[float, float]]:
    """Return, for forward and backward of a micro-batch, FLOPs scaled to the peak, and bytes. Includes padding."""
    shape, text, tower, w = run.shape, run.shape.text, run.shape.tower, run.setup.weight_bytes
    flops, tokens = shape.flops, load.tokens / load.useful
    pairs, supervised = tokens * (load.sample_tokens / load.useful + 1) / 2, load.supervised / load.useful
    in_tower = flops.per_tile / 3 if tower.trained else flops.per_tile
    attention = pairs * flops.forward_per_pair / ATTENTION_SHARE
    layers = tokens * flops.forward_per_token / machine.matmul_share + attention
    others = load.tiles * in_tower + supervised * flops.per_target
    rest = tokens * (flops.per_token - flops.forward_per_token) + load.tiles * (flops.per_tile - in_tower)
    numbers = FUSED_LAYER_NUMBERS if load.fused_layers else LAYER_NUMBERS
    unpacked = sum(shape.packed) * (shape.packed_bits / 8 + w)  # bytes to dequantize weights
    moved = w * numbers * tokens * text.num_layers * text.hidden * (LORA if text.adapter_rank else 1)
    in_towers = w * numbers * load.tiles * tower.num_positions * tower.num_layers * tower.hidden
    trains, again = flops.per_pair > flops.forward_per_pair, run.batch.num_recomputed / text.num_layers
    return [
        (
            layers + others / machine.matmul_share,
            moved + in_towers + unpacked + supervised * text.vocab * LOGIT_BYTES * w / 2,
        ),
        (
            rest / machine.matmul_share + trains * ATTENTION_BACKWARD * attention + again * layers,
            (2 * trains + again) * moved + (trains + again) * unpacked + 2 * tower.trained * in_towers,
        ),
    ]


def _exposed(
    sent: Traffic, forward_s: float, backward_s: float, load: Load, machine: Machine, setup: Setup
) -> tuple[float, float]:
    """Return the seconds of collectives and of PCIe that compute does not hide."""
    bandwidth, pcie = machine.link_bandwidth(setup), PCIE_SHARE * machine.gpu.pcie * GIGA
    overlap = machine.overlap if sent.can_overlap else 0.0
    room = overlap * backward_s * sent.backward_micro_steps / load.micro_steps
    exposed = max(0.0, sent.forward / bandwidth - overlap * forward_s)
    exposed += max(0.0, sent.backward / bandwidth - room) + sent.after / bandwidth
    exposed += sent.exchanged / machine.link_bandwidth(replace(setup, num_gpus=setup.sp * setup.tp * setup.ep))
    return exposed, max(0.0, sent.pcie / pcie - overlap * (forward_s + backward_s)) + sent.pcie_after / pcie


def _optimizer_s(shape: ModelShape, placement: ZeroPlacement, setup: Setup, machine: Machine) -> tuple[float, float]:
    """Return the seconds of the update: in a rank's GPU memory, and on a node's CPU."""
    if placement.optimizer == "cpu":
        return 0.0, CPU_ADAM_S * shape.num_trained / math.ceil(setup.num_gpus / setup.gpus_per_node)
    owned = shape.trained_of_rank / (1 if placement.stage == 0 else setup.ranks)
    # Bytes moved: gradients flattened, cast, normed, unscaled and clipped (26); the AdamW update; weights cast back.
    return owned * (26 + 12 + 8 * setup.moments) / machine.memory_bandwidth, 0.0
