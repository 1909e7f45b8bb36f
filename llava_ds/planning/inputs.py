"""From the flags and the resolved DeepSpeed JSON of a run to what its memory depends on, and what auto would choose."""

import dataclasses
from dataclasses import dataclass

from llava_ds.engine.ds_config.optimizer import num_moments
from llava_ds.engine.ds_config.resolve import ResolvedConfig
from llava_ds.engine.ds_config.zero import offload_device
from llava_ds.planning.activations import MicroBatch, activation_bytes
from llava_ds.planning.fit import GB, Run, fits
from llava_ds.planning.memory import Placement, Setup, ZeroSettings
from llava_ds.planning.shapes import ModelShape

GRADIENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}  # by data_types.grad_accum_dtype
FULL_TOKENS = 8192  # a micro-batch from which on a GPU computes no faster for more
ROUND_TOKENS = 64  # what auto chooses is a multiple of it, where that is no less than the longest sample


@dataclass(frozen=True)
class Data:
    """What memory depends on in the samples. share: tokens of a rank in the largest step, as auto may lay them out."""

    longest_sample: int
    supervised_fraction: float
    share: int


def planned_run(
    shape: ModelShape,
    resolved: ResolvedConfig,
    data: Data,
    *,
    num_gpus: int,
    gpus_per_node: int,
    memory: float | None = None,
) -> Run:
    """The run as training would do it, with the fullest micro-batch that its flags allow.

    Its tiles are as many as the tokens have room for, and each shows its features once. memory: bytes that a device has
    for it, by which auto chooses; None where that is not known: then every layer keeps what it makes, in micro-batches
    of whole shares.
    """
    training = resolved.args.training
    weight_bytes = resolved.dtype.itemsize
    bound = training.tokens_per_micro_batch
    accumulated = (resolved.config.get("data_types") or {}).get("grad_accum_dtype")
    setup = Setup(
        num_gpus=num_gpus,
        zero=ZeroSettings.of(resolved.config["zero_optimization"]),
        gpus_per_node=gpus_per_node,
        weight_bytes=weight_bytes,
        gradient_bytes=GRADIENT_BYTES.get(accumulated, weight_bytes),
        accumulates=training.gradient_accumulation_steps > 1 or (isinstance(bound, int) and bound < data.share),
        moments=num_moments(resolved.config),
    )
    run = Run(shape, placement_of(resolved.config), setup, None, data.longest_sample)
    if shape.tower is None:
        return run
    layers = shape.text.num_layers
    recomputed = 0
    if training.gradient_checkpointing == "all":
        recomputed = -(-layers // training.gradient_checkpointing_every_n_layers)

    def with_tokens(tokens: int, num_recomputed: int) -> Run:
        batch = MicroBatch(
            num_tokens=tokens,
            num_supervised=int(tokens * data.supervised_fraction),
            num_tiles=max(1, tokens // shape.tower.num_patches),
            num_recomputed=num_recomputed,
        )
        return dataclasses.replace(run, batch=batch)

    def has_room(tokens: int, num_recomputed: int) -> bool:
        planned = with_tokens(tokens, num_recomputed)
        if training.activation_memory_gb is not None:
            return activation_bytes(shape, planned.batch, weight_bytes) <= training.activation_memory_gb * GB
        return memory is None or fits(planned.estimate().total, memory)

    def most_tokens(most: int, num_recomputed: int) -> int:
        """Tokens up to most that have room, but a longest sample at least: found by halving what is between."""
        low, high = data.longest_sample, max(most, data.longest_sample)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if has_room(middle, num_recomputed) else (low, middle - 1)
        return max(data.longest_sample, low // ROUND_TOKENS * ROUND_TOKENS)

    chooses_layers = training.gradient_checkpointing == "auto"
    tokens = training.tokens_per_micro_batch or training.per_device_train_batch_size * data.longest_sample
    if tokens == "auto":
        tokens = most_tokens(data.share, recomputed)
        full = min(FULL_TOKENS, data.share)
        if chooses_layers and tokens < full // ROUND_TOKENS * ROUND_TOKENS:
            tokens = most_tokens(full, layers)  # layers run again for a full micro-batch, but for no more than that
    tokens = max(tokens, data.longest_sample)
    if chooses_layers:
        recomputed = next((n for n in range(layers) if has_room(tokens, n)), layers)
    return with_tokens(tokens, recomputed)


def placement_of(config: dict) -> Placement:
    """Where a resolved JSON puts model states."""
    return Placement(
        config["zero_optimization"].get("stage", 0),
        offload_device(config, "offload_optimizer"),
        offload_device(config, "offload_param"),
    )
