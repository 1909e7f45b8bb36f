"""Choose "auto" settings that fit in memory: DeepSpeed JSON, tokens per micro-batch, and checkpointed layers."""

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from llava_ds.checkpoint.run_identity import saved_identity
from llava_ds.config.arguments import Arguments
from llava_ds.config.recipes import DS_CONFIGS
from llava_ds.constants import ConfigError
from llava_ds.data.dataset import EncodedDataset
from llava_ds.data.sample_order import SampleOrder
from llava_ds.data.step_plan import largest_share
from llava_ds.engine.ds_config.optimizer import num_moments
from llava_ds.engine.ds_config.resolve import ResolvedConfig, read_ds_config, resolve_ds_config
from llava_ds.engine.ds_config.zero import offload_device
from llava_ds.extensions.planning.activations import MicroBatch
from llava_ds.extensions.planning.fit import GB, Run, advice, fits, most_stage
from llava_ds.extensions.planning.memory import Setup, ZeroPlacement, ZeroSettings, most_activations
from llava_ds.extensions.planning.named_models import SUPERVISED
from llava_ds.extensions.planning.shapes import ModelShape, shape_of
from llava_ds.model.open.model_plan import ModelPlan
from llava_ds.runtime.device_memory import free_memory
from llava_ds.runtime.ranks import Ranks, broadcast_from_first, gather, local_ranks, print_first

GRADIENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}  # keyed by data_types.grad_accum_dtype
FULL_TOKENS = 8192  # larger micro-batches don't speed up a GPU
MOST_TOKENS_ON_CPU = 8192
ROUND_TOKENS = 64  # auto rounds down to a multiple of this, but not below the longest sample


@dataclass(frozen=True)
class Data:
    """Properties of the samples that determine memory. share: tokens of one rank in the largest step, if packed."""

    longest_sample: int
    supervised_fraction: float
    share: int


@dataclass(frozen=True)
class Devices:
    """Training devices. memory: bytes of the smallest device, None if unknown. node_memory: bytes of the smallest node,
    None for unlimited. are_local: True if training runs on this machine, so it has to meet the requirements.
    """

    num_ranks: int
    ranks_per_node: int
    kind: str = "cuda"
    memory: float | None = None
    node_memory: float | None = None
    are_local: bool = False


def planned_run(shape: ModelShape, resolved: ResolvedConfig, data: Data, devices: Devices) -> Run:
    """Return the run as training would configure it, with the largest micro-batch that its flags allow.

    Assumes that all tokens are image features, of as many full tiles as fit. If device memory is unknown, auto
    checkpoints no layer and puts a rank's whole share of a step into one micro-batch.
    """
    training = resolved.args.training
    sp, weight_bytes = resolved.args.ranks_per_token, resolved.dtype.itemsize
    data = dataclasses.replace(data, longest_sample=-(-data.longest_sample // sp), share=-(-data.share // sp))
    bound = training.tokens_per_micro_batch
    accumulated = (resolved.config.get("data_types") or {}).get("grad_accum_dtype")
    setup = Setup(
        num_gpus=devices.num_ranks,
        zero=ZeroSettings.of(resolved.config["zero_optimization"]),
        gpus_per_node=devices.ranks_per_node,
        weight_bytes=weight_bytes,
        gradient_bytes=GRADIENT_BYTES.get(accumulated, weight_bytes),
        accumulates=training.gradient_accumulation_steps > 1 or (isinstance(bound, int) and bound < data.share),
        moments=num_moments(resolved.config) + resolved.args.extra_moments,
        sp=sp,
        tp=resolved.args.size_of("tp"),
        pp=resolved.args.size_of("pp"),
        ep=resolved.args.size_of("ep"),
    )
    run = Run(shape, zero_placement(resolved.config), setup, None, data.longest_sample)
    return run if shape.tower is None else _MicroBatchChoice(run, resolved.args, data, devices.memory).chosen()


@dataclass(frozen=True)
class _MicroBatchChoice:
    """Chooses tokens per micro-batch and checkpointed layers that fit a run into a device's memory."""

    run: Run
    args: Arguments
    data: Data
    memory: float | None

    def chosen(self) -> Run:
        training, data = self.args.training, self.data
        layers = self.run.shape.text.num_layers
        checkpointed = 0
        if training.gradient_checkpointing == "all":
            checkpointed = -(-layers // training.gradient_checkpointing_every_n_layers)
        chooses_layers = training.gradient_checkpointing == "auto"
        tokens = training.tokens_per_micro_batch or training.per_device_train_batch_size * data.longest_sample
        if tokens == "auto":
            tokens = self.most_tokens(data.share, checkpointed)
            full = min(FULL_TOKENS, data.share)
            if chooses_layers and tokens < full // ROUND_TOKENS * ROUND_TOKENS:
                tokens = self.most_tokens(full, layers)  # layers are checkpointed only to reach a full micro-batch
        tokens = max(tokens, data.longest_sample)
        if chooses_layers:
            checkpointed = next((n for n in range(layers) if self.has_room(tokens, n)), layers)
        return self.with_tokens(tokens, checkpointed)

    def with_tokens(self, tokens: int, checkpointed: int) -> Run:
        batch = MicroBatch(
            num_tokens=tokens,
            num_supervised=int(tokens * self.data.supervised_fraction),
            num_tiles=max(1, tokens // self.run.shape.tower.num_patches),
            num_recomputed=checkpointed,
            mlp_tokens=self.args.mlp_tokens,
        )
        return dataclasses.replace(self.run, batch=batch)

    def has_room(self, tokens: int, checkpointed: int) -> bool:
        planned = self.with_tokens(tokens, checkpointed)
        if self.args.training.activation_memory_gb is not None:
            needed = most_activations(planned.shape, planned.setup, planned.batch)
            return needed <= self.args.training.activation_memory_gb * GB
        return self.memory is None or fits(planned.estimate().total, self.memory)

    def most_tokens(self, most: int, checkpointed: int) -> int:
        """Bisect for the most tokens up to a limit that fit. Returns at least the longest sample's length."""
        low, high = self.data.longest_sample, max(most, self.data.longest_sample)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.has_room(middle, checkpointed) else (low, middle - 1)
        return max(self.data.longest_sample, low // ROUND_TOKENS * ROUND_TOKENS)


def zero_placement(config: dict) -> ZeroPlacement:
    """Return the devices that a resolved JSON places model states on."""
    return ZeroPlacement(
        config["zero_optimization"].get("stage", 0),
        offload_device(config, "offload_optimizer"),
        offload_device(config, "offload_param"),
    )


def run_on_ranks(
    resolved: ResolvedConfig, plan: ModelPlan, dataset: EncodedDataset, order: SampleOrder, ranks: Ranks
) -> Run:
    """Return the run on these ranks and its data, sized for the rank with the least free memory. Collective."""
    sp, dp = resolved.args.ranks_per_token, ranks.world_size // resolved.args.ranks_per_sample
    share = broadcast_from_first(ranks, lambda: largest_share(order, dataset.lengths, dp))
    facts = dataset.index.facts
    data = Data(
        longest_sample=int(dataset.lengths.max()),
        supervised_fraction=facts["targets"] / facts["tokens"],
        share=min(share, MOST_TOKENS_ON_CPU * sp) if ranks.device.type == "cpu" else share,
    )
    memory = min(gather(free_memory(ranks.device), ranks))
    devices = Devices(ranks.world_size, local_ranks(), ranks.device.type, memory, are_local=True)
    return planned_run(shape_of(plan.text_config, plan.tower, resolved.args), resolved, data, devices)


def choose_tokens_per_micro_batch(
    resolved: ResolvedConfig, plan: ModelPlan, dataset: EncodedDataset, order: SampleOrder, ranks: Ranks
) -> int:
    """Choose and print the value for --tokens_per_micro_batch auto. Collective.

    Chooses as many tokens as fit. A resumed run keeps its checkpoint's value, because another value rounds differently.
    """
    training = resolved.args.training
    saved = broadcast_from_first(ranks, lambda: saved_identity(training.resume, Path(training.output_dir)))
    tokens, why = saved.get("flags", {}).get("tokens_per_micro_batch"), "taken from the checkpoint being resumed"
    if tokens is None:
        tokens, why = run_on_ranks(resolved, plan, dataset, order, ranks).batch.num_tokens, "chosen for this memory"
    print_first(f"--tokens_per_micro_batch {tokens} ({why})")
    return tokens


def candidates(args: Arguments, world_size: int, device_type: str) -> dict[str, str]:
    """Map configuration names, fastest first, to the reason for each.

    Sharding frees memory but costs traffic, and is useless on one rank. On several ranks, sharding only the optimizer
    is fastest, because gradients are sent once per step or during backward. Offloaded states cross PCIe.
    """
    training = args.training
    tokens = training.tokens_per_micro_batch
    packed = isinstance(tokens, int) and tokens < training.per_device_train_batch_size * args.data.model_max_length
    if world_size == 1:
        # With float16, DeepSpeed needs at least stage 1.
        found = {"zero1" if training.fp16 else "zero0": "one rank has nothing to shard"}
    elif training.gradient_accumulation_steps > 1 or packed:
        found = {
            "zero1": "gradients are sent once per optimizer step, not once per micro-batch",
            "zero2": "each rank keeps only its part of the gradients",
        }
    else:
        found = {"zero2": "gradients are sent during backward, and each rank updates its part of the weights"}
    # On one rank, stage 2 shards nothing, but updates weights part by part to save memory.
    found["zero3"] = "weights must be sharded as well" if world_size > 1 else "the optimizer must update in parts"
    if device_type != "cpu":  # offload from CPU to CPU would free nothing
        found["zero2_offload"] = "the optimizer's states must be in CPU memory"
        found["zero3_offload"] = "everything must be in CPU memory"
    return found


def choose_ds_config(
    folder: Path, shape: ModelShape, args: Arguments, devices: Devices, stage: int | None = None
) -> tuple[dict, str]:
    """Choose the first candidate whose estimate fits. Returns the DeepSpeed JSON and a line with the reason.

    folder: holds the configurations. devices: with their total memory. stage: ZeRO stage to keep from a resumed
    checkpoint. Raises ConfigError if none fits (naming a change that would) or the flags rule out every candidate.
    """
    longest = args.data.model_max_length
    refused: ConfigError | None = None
    most, runs = most_stage(shape), {}
    resolve = partial(
        resolve_ds_config,
        dp=max(1, devices.num_ranks // args.ranks_per_sample),
        hidden_size=shape.hidden_size,
        device_type=devices.kind,
        is_local=devices.are_local,
    )
    for name, why in candidates(_filled(folder, args, resolve), devices.num_ranks, devices.kind).items():
        raw = read_ds_config(folder / f"{name}.json")
        if stage not in (None, raw["zero_optimization"]["stage"]) or raw["zero_optimization"]["stage"] > most:
            continue
        try:
            resolved = resolve(raw, args)
        except ConfigError as error:  # can't be compiled on this machine, or conflicts with the flags
            refused = refused or error
            continue
        # The data isn't read yet, so assume that every sample has the maximum length.
        data = Data(longest, SUPERVISED, share=resolved.args.training.per_device_train_batch_size * longest)
        run = runs[name] = planned_run(shape, resolved, data, devices)
        needs = run.estimate()
        if fits(needs.total, devices.memory) and (devices.node_memory is None or fits(needs.cpu, devices.node_memory)):
            return raw, (
                f"--deepspeed_config auto: {name}.json, because {why}; at most about {needs.total / GB:.1f} of "
                f"{devices.memory / GB:.1f} GB needed"
            )
    if not runs:
        raise refused
    first = next(iter(runs.values()))
    raise ConfigError(
        f"--deepspeed_config auto: no estimate of {', '.join(runs)} fits. {advice(first, devices.memory)}"
    )


def _filled(folder: Path, args: Arguments, resolve: Callable[[dict, Arguments], ResolvedConfig]) -> Arguments:
    """Fill in batch sizes that follow from others. Returns invalid flags unchanged, because every candidate will report
    them.
    """
    try:
        return resolve(read_ds_config(folder / "zero1.json"), args).args
    except ConfigError:
        return args


def choose_for_ranks(args: Arguments, model: ModelPlan, ranks: Ranks) -> tuple[dict, str]:
    """Run choose_ds_config for the rank with the smallest memory. Collective.

    On CPU, ranks share the machine's memory evenly.
    """
    local = local_ranks()
    node = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    is_cpu = ranks.device.type == "cpu"
    own = node // local if is_cpu else torch.cuda.get_device_properties(ranks.device).total_memory
    memories, nodes, locals_ = zip(*gather((own, node, local), ranks))
    devices = Devices(ranks.world_size, max(locals_), ranks.device.type, min(memories), min(nodes), are_local=True)
    training = args.training
    saved = broadcast_from_first(ranks, lambda: saved_identity(training.resume, Path(training.output_dir)))
    # With another number of ranks, sums round differently anyway, so choose the stage anew.
    stage = saved["zero_stage"] if saved.get("world_size") == ranks.world_size else None
    shape = shape_of(model.text_config, model.tower, args)
    # Machines may differ in what they can compile, so rank 0 decides.
    return broadcast_from_first(ranks, partial(choose_ds_config, DS_CONFIGS, shape, args, devices, stage))
