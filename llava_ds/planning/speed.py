# T tokens, D language-model width, I width of its MLP, Q and K widths of query and key, w bytes of an activation
"""The time of an optimizer step on GPUs that are not at hand: a roofline of what llava_ds computes and sends.

A step is the sum of

    matrix products   FLOPs (model/flops.py) over a share of the GPU's peak
    attention         FLOPs of a fused kernel, whose backward computes the scores again: 2.5 times forward
    element-wise      bytes that norms, rotary positions, activations, residuals, LoRA and the loss read and write
    recomputed        forward of checkpointed layers once more: all of the above
    launches          what a micro-batch lasts longer because Python can't start its kernels any faster
    optimizer         bytes that cast, clip and update read and write, or a CPU's time
    traffic           what collectives (planning/traffic.py) last longer than the compute that they overlap with
    PCIe              the same for offload
    bubble            what a stage of a pipeline waits at the beginning and the end of a step

for the rank with the average load. Not counted: waiting for data, evals, saves, the first steps, latency of
collectives (small layers on hundreds of ranks), ranks that wait for a slower one.

The constants below are assumptions, each with its source; those that differ most between machines are flags.
"""

import math
from dataclasses import dataclass, replace

from llava_ds.planning.fit import Run
from llava_ds.planning.memory import Placement, Setup
from llava_ds.planning.shapes import ModelShape, TextShape, TowerShape
from llava_ds.planning.traffic import Traffic, exchange_traffic, step_traffic
from llava_ds.runtime.gpus import Gpu

TERA, GIGA = 1e12, 1e9
MATMUL_SHARE = 0.8  # of the peak for the fastest shape, where the table of GPUs has no measurement
# A layer's products beside the fastest shape, clocks at the power limit: the one constant that was set with the public
# figures of docs/speed.md in view. Inside a training step of an 8B an H200 reached 47 % in all that is not attention,
# where the fastest product has 80 % (Bekman, Machine Learning Engineering).
LAYER_SHARE = 0.9
# Forward and backward together, causal, heads of 128: FlashAttention-2 reaches about 60 % of an A100's peak and 35 % of
# an H100's, version 3 about 55 % of the latter (arXiv 2307.08691 and 2407.08608, figures).
ATTENTION_SHARE = 0.45
ATTENTION_BACKWARD = 2.5  # five products in place of forward's two
MEMORY_SHARE = 0.8  # of the data sheet's bandwidth, of large element-wise kernels
LINK_SHARE = 0.75  # of NVLink and of the network, of large collectives (nccl-tests' bus bandwidth)
PCIE_COLLECTIVE_SHARE = 0.4  # of PCIe, when ranks send through the CPU's memory
PCIE_SHARE = 0.75  # of copies from pinned memory
CPU_ADAM_S = 0.25e-9  # a parameter, by all cores of a node (ZeRO-Offload, arXiv 2101.06840, table of Adam's latency)
LAUNCH_S = 6e-6  # of a kernel from eager PyTorch
LAYER_KERNELS, FUSED_LAYER_KERNELS = 45, 25  # of a decoder layer's forward; backward has twice as many
HOOKS_S = 0.5e-3  # of ZeRO-3 around a layer in forward, and again in backward
LOGIT_BYTES = 36  # read and written for a logit: stored, cast, softmax, gradient, cast, multiplied twice
NETWORK_GBIT = 100.0  # of a node whose vendor does not say
OVERLAP = 0.8  # of compute behind which traffic hides: collectives take some of its multiprocessors and bandwidth


@dataclass(frozen=True)
class Machine:
    """GPUs, and the assumptions that flags change.

    matmul_share: of the peak that a model's products reach; network_gbit: of all cards of a node; overlap: the share of
    compute behind which traffic can hide; tf32: whether fp32 products may use it.
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
        """With the table's values for what is None."""
        share = matmul_share or LAYER_SHARE * (gpu.matmul or MATMUL_SHARE)
        return cls(gpu, share, network_gbit or gpu.network or NETWORK_GBIT, overlap, tf32)

    def peak(self, weight_bytes: int) -> float:
        """FLOP/s in a precision."""
        if weight_bytes == 2:
            return self.gpu.half * TERA
        return (self.gpu.tf32 if self.tf32 and self.gpu.tf32 else self.gpu.fp32) * TERA

    def link_bandwidth(self, setup: Setup) -> float:
        """Bytes/s that a rank of a ring sends. Between nodes all cards of a node serve each ring together."""
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
    """The work of a rank in an optimizer step, on average. tokens, supervised and tiles: of one of its micro-batches,
    without padding; sample_tokens: length of a sample; useful: tokens over tokens computed (below 1 with padding);
    fused_layers: whether norms, positions and activations are Liger's kernels."""

    micro_steps: int
    tokens: float
    sample_tokens: float
    supervised: float
    tiles: float
    useful: float = 1.0
    fused_layers: bool = False


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step by cause, and what it does in them. traffic_s and pcie_s are what does not hide."""

    matmul_s: float
    attention_s: float
    elementwise_s: float
    recomputed_s: float
    launches_s: float
    optimizer_s: float
    traffic_s: float
    pcie_s: float
    bubble_s: float
    hidden_traffic_s: float
    traffic_bytes: float
    tokens: float  # of all ranks
    mfu: float

    @property
    def total_s(self) -> float:
        gpu = self.matmul_s + self.attention_s + self.elementwise_s + self.recomputed_s + self.launches_s
        return gpu + self.optimizer_s + self.traffic_s + self.pcie_s + self.bubble_s

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.total_s


def step_time(run: Run, placement: Placement, load: Load, machine: Machine) -> StepTime | None:
    """Estimate a step of the run with this stage and offload; None for NVMe, where the disk decides."""
    if "nvme" in (placement.optimizer, placement.param):
        return None
    if run.shape.stages:
        return _pipeline_time(run, placement, load, machine)
    shape, setup = run.shape, run.setup
    forward, backward, again = (p.times(machine, setup) for p in _passes(run, load))
    gpu_s = load.micro_steps * (forward.total + backward.total + again.total)
    launches_s = max(0.0, load.micro_steps * _launches_s(run, placement, load) - gpu_s)
    # Launches that take longer than the GPU let traffic hide all the better.
    stretch = (gpu_s + launches_s) / gpu_s
    forward_s = stretch * load.micro_steps * forward.total
    backward_s = stretch * load.micro_steps * (backward.total + again.total)
    sent = step_traffic(shape, placement, setup, load.micro_steps)
    exchanged = exchange_traffic(shape.text, setup, load.tokens / load.useful, run.batch.num_recomputed)
    sent = replace(sent, exchanged=load.micro_steps * exchanged)
    link_s, exposed_s, pcie_s = _exposed(sent, forward_s, backward_s, load, machine, setup)
    pairs = load.tokens * (load.sample_tokens + 1) / 2
    # Of one micro-batch. Ranks that share matrices repeat each other's work in tower and output layer.
    useful = shape.flops.of(load.tokens, pairs, load.tiles / setup.tp, load.supervised / setup.tp)
    partial = StepTime(
        matmul_s=load.micro_steps * (forward.matmul + backward.matmul),
        attention_s=load.micro_steps * (forward.attention + backward.attention),
        elementwise_s=load.micro_steps * (forward.elementwise + backward.elementwise),
        recomputed_s=load.micro_steps * again.total,
        launches_s=launches_s,
        optimizer_s=_optimizer_s(shape, placement, setup, machine),
        traffic_s=exposed_s,
        pcie_s=pcie_s,
        bubble_s=0.0,
        hidden_traffic_s=link_s - exposed_s,
        traffic_bytes=sent.total,
        tokens=load.micro_steps * load.tokens * setup.ranks,
        mfu=0.0,
    )
    mfu = load.micro_steps * useful / partial.total_s / machine.peak(setup.weight_bytes)
    return StepTime(**{**partial.__dict__, "mfu": mfu})


def _pipeline_time(run: Run, placement: Placement, load: Load, machine: Machine) -> StepTime:
    """The step of a pipeline: its slowest stage sets the pace, and waits for as many micro-batches as others stand
    before it or behind it (arXiv 2104.04473, 2.2.1). What goes to the next stage and comes back hides behind nothing.
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
    of_micro_batches = slowest.total_s - slowest.optimizer_s - slowest.traffic_s + passing_s
    whole = replace(
        slowest,
        traffic_s=slowest.traffic_s + passing_s,
        traffic_bytes=slowest.traffic_bytes + passed_on,
        bubble_s=of_micro_batches * (setup.pp - 1) / load.micro_steps,
    )
    useful = sum(time.mfu * time.total_s for time in times) / setup.pp
    return replace(whole, mfu=useful / whole.total_s)


@dataclass(frozen=True)
class _Seconds:
    matmul: float
    attention: float
    elementwise: float

    @property
    def total(self) -> float:
        return self.matmul + self.attention + self.elementwise


@dataclass(frozen=True)
class _Work:
    """FLOPs of products and of attention, and bytes of everything else, in one pass of a micro-batch."""

    matmul: float
    attention: float
    num_bytes: float

    def times(self, machine: Machine, setup: Setup) -> _Seconds:
        peak = machine.peak(setup.weight_bytes)
        return _Seconds(
            self.matmul / (machine.matmul_share * peak),
            self.attention / (ATTENTION_SHARE * peak),
            self.num_bytes / machine.memory_bandwidth,
        )


def _passes(run: Run, load: Load) -> tuple[_Work, _Work, _Work]:
    """Forward, backward and recomputation of a micro-batch, padding included."""
    shape, text, w = run.shape, run.shape.text, run.setup.weight_bytes
    flops, tokens = shape.flops, load.tokens / load.useful
    pairs = tokens * (load.sample_tokens / load.useful + 1) / 2
    supervised = load.supervised / load.useful
    in_forward = flops.per_tile / 3 if shape.tower.trained else flops.per_tile
    layers = tokens * text.num_layers * layer_bytes_moved(text, w, load.fused_layers)
    adapters = [tokens * text.num_layers * moved for moved in adapter_bytes_moved(text, w)]
    unpacked = sum(shape.packed) * (shape.packed_bits / 8 + w)  # weights of --bits, before each product
    towers = load.tiles * tower_bytes_moved(shape.tower, w)
    attention = pairs * flops.forward_per_pair
    trains = flops.per_pair > flops.forward_per_pair
    forward = _Work(
        tokens * flops.forward_per_token + load.tiles * in_forward + supervised * flops.per_target,
        attention,
        layers + adapters[0] + unpacked + towers + supervised * text.vocab * LOGIT_BYTES * w / 2,
    )
    backward = _Work(
        tokens * (flops.per_token - flops.forward_per_token) + load.tiles * (flops.per_tile - in_forward),
        trains * ATTENTION_BACKWARD * attention,
        trains * (2 * layers + unpacked) + adapters[1] + 2 * shape.tower.trained * towers,
    )
    share = run.batch.num_recomputed / text.num_layers
    again = _Work(
        share * tokens * flops.forward_per_token, share * attention, share * (layers + adapters[0] + unpacked)
    )  # of a checkpointed layer's forward
    return forward, backward, again


def layer_bytes_moved(text: TextShape, weight_bytes: int, fused: bool) -> float:
    """Bytes that a decoder layer's forward reads and writes for a token outside of products and attention.

    Counted from transformers' modeling_llama, kernel by kernel: a norm casts to fp32, squares, averages, scales, casts
    back and multiplies by its weight. Fused kernels read and write once.
    """
    w = weight_bytes
    norm = 2 * w if fused else (36 if w == 2 else 28)
    moved = 2 * text.hidden * (norm + 3 * w)  # two norms, two residuals
    moved += (text.query + text.key) * (2 if fused else 9) * w
    return moved + text.intermediate * (3 if fused else 5) * w


def adapter_bytes_moved(text: TextShape, weight_bytes: int) -> tuple[float, float]:
    """The same of a layer's LoRA, in forward and in backward: its products are so thin that their bytes count instead.

    Forward: dropout, the input of A, and B's output written, scaled and added. Backward: the gradient scaled and read
    by two products, and what A passes back written, added and multiplied.
    """
    if not text.lora_rank:
        return 0.0, 0.0
    w = weight_bytes
    inputs = 5 * text.hidden + text.query + text.intermediate
    outputs = text.query + 2 * text.key + 2 * text.hidden + 2 * text.intermediate
    dropout = (2 * w + 1) * text.lora_dropped
    return w * inputs + 6 * w * outputs + dropout, 5 * w * inputs + 4 * w * outputs + dropout


def tower_bytes_moved(tower: TowerShape, weight_bytes: int) -> float:
    """The same of a tile in the tower: norms that are one kernel, residuals, and an activation of three kernels."""
    per_token = weight_bytes * (10 * tower.hidden + 7 * tower.intermediate)
    return tower.num_layers * tower.num_positions * per_token


def _launches_s(run: Run, placement: Placement, load: Load) -> float:
    """Seconds that Python needs to start the kernels of a micro-batch."""
    text, tower = run.shape.text, run.shape.tower
    kernels = FUSED_LAYER_KERNELS if load.fused_layers else LAYER_KERNELS
    kernels += 42 * bool(text.lora_rank)  # six for each of seven matrices
    passes = 3 * text.num_layers + run.batch.num_recomputed
    tower_kernels = 20 * tower.num_layers * (3 if tower.trained else 1)
    hooks = HOOKS_S * (2 * text.num_layers + tower.num_layers) if placement.stage == 3 else 0.0
    return LAUNCH_S * (kernels * passes + tower_kernels) + hooks


def _exposed(
    sent: Traffic, forward_s: float, backward_s: float, load: Load, machine: Machine, setup: Setup
) -> tuple[float, float, float]:
    """Seconds that the collectives take, seconds of them that do not hide behind compute, and those of PCIe."""
    bandwidth, pcie = machine.link_bandwidth(setup), PCIE_SHARE * machine.gpu.pcie * GIGA
    overlap = machine.overlap if sent.can_overlap else 0.0
    room = overlap * backward_s * sent.backward_micro_steps / load.micro_steps
    link_s = (sent.total - sent.exchanged) / bandwidth
    between = machine.link_bandwidth(replace(setup, num_gpus=setup.sp * setup.tp * setup.ep))
    link_s += sent.exchanged / between
    exposed = max(0.0, sent.forward / bandwidth - overlap * forward_s)
    exposed += max(0.0, sent.backward / bandwidth - room) + sent.after / bandwidth
    exposed += sent.exchanged / between
    copied = max(0.0, sent.pcie / pcie - overlap * (forward_s + backward_s)) + sent.pcie_after / pcie
    return link_s, exposed, copied


def _optimizer_s(shape: ModelShape, placement: Placement, setup: Setup, machine: Machine) -> float:
    """Seconds of the update: of a rank's part on its GPU, or of a node's parts on its CPU."""
    owned = shape.trained_of_rank / (1 if placement.stage == 0 else setup.ranks)
    if placement.optimizer == "cpu":
        nodes = math.ceil(setup.num_gpus / setup.gpus_per_node)
        return CPU_ADAM_S * shape.num_trained / nodes
    # Gradients: flattened, cast, normed, unscaled and clipped (26); weights, gradients and moments; weights cast back.
    return owned * (26 + 12 + 8 * setup.moments) / machine.memory_bandwidth
