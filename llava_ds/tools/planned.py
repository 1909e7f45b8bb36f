"""From the flags and the resolved DeepSpeed JSON of a run to what its memory depends on."""

from llava_ds.ds_config.optimizer import optimizer_name
from llava_ds.ds_config.resolve import ResolvedConfig
from llava_ds.ds_config.zero import offload_device
from llava_ds.tools.activations import MicroBatch
from llava_ds.tools.fitting import Run
from llava_ds.tools.memory import Placement, Setup, ZeroSettings
from llava_ds.tools.shapes import ModelShape

# fp32 numbers that an optimizer keeps for a parameter, at most; Muon keeps one for a matrix, two for what Adam trains.
MOMENTS = {
    **dict.fromkeys(("Adam", "AdamW", "Lamb", "Muon", "NAdam", "RAdam", "Adamax", "Adadelta", "Rprop"), 2),
    **dict.fromkeys(("Adagrad", "Lion", "ASGD", "RMSprop", "Adafactor"), 1),
    "SGD": 0,
}
MORE_MOMENTS = ("amsgrad", "centered")  # each keeps another
GRADIENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}  # by data_types.grad_accum_dtype


def planned_run(
    shape: ModelShape,
    resolved: ResolvedConfig,
    *,
    num_gpus: int,
    gpus_per_node: int,
    longest_sample: int,
    supervised_fraction: float,
) -> Run:
    """The run as training would do it, with the fullest micro-batch that its flags allow.

    Its tiles are as many as the tokens have room for, and each shows its features once.
    """
    training = resolved.args.training
    weight_bytes = resolved.dtype.itemsize
    accumulated = (resolved.config.get("data_types") or {}).get("grad_accum_dtype")
    zero = resolved.config["zero_optimization"]
    batch = None
    if shape.tower is not None:
        tokens = max(
            training.tokens_per_micro_batch or training.per_device_train_batch_size * longest_sample, longest_sample
        )
        batch = MicroBatch(
            num_tokens=tokens,
            num_supervised=int(tokens * supervised_fraction),
            num_tiles=max(1, tokens // shape.tower.num_patches),
            checkpoint_every=training.gradient_checkpointing_every_n_layers if training.gradient_checkpointing else 0,
        )
    setup = Setup(
        num_gpus=num_gpus,
        zero=ZeroSettings.of(zero),
        gpus_per_node=gpus_per_node,
        weight_bytes=weight_bytes,
        gradient_bytes=GRADIENT_BYTES.get(accumulated, weight_bytes),
        accumulates=training.gradient_accumulation_steps > 1,
        moments=_moments(resolved.config.get("optimizer", {"type": "AdamW"})),
    )
    return Run(shape, placement_of(resolved.config), setup, batch, longest_sample)


def _moments(block: dict) -> int:
    """Of the optimizer that a block of the resolved JSON describes."""
    name, params = optimizer_name(block), block.get("params", {})
    more = [key for key in MORE_MOMENTS if params.get(key)]
    if name in ("SGD", "RMSprop") and params.get("momentum"):
        more.append("momentum")
    return MOMENTS[name] + len(more)


def placement_of(config: dict) -> Placement:
    """Where a resolved JSON puts model states."""
    return Placement(
        config["zero_optimization"].get("stage", 0),
        offload_device(config, "offload_optimizer"),
        offload_device(config, "offload_param"),
    )
