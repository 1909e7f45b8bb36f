"""Suggest flags that save memory, the cheapest first."""

from llava_ds.batch import Batch
from llava_ds.config.properties import features
from llava_ds.config.training_flags import TrainingArguments
from llava_ds.engine.ds_config.resolve import ResolvedConfig
from llava_ds.engine.ds_config.zero import offload_device
from llava_ds.extensions.active import flags_class, values_of
from llava_ds.extensions.table import EXTENSIONS


def advice(resolved: ResolvedConfig, batch: Batch | None, longest_sample: int) -> list[str]:
    """Return lines with flags that save memory, the cheapest first. batch: the current micro-batch, or None."""
    args, training, stage = resolved.args, resolved.args.training, resolved.zero_stage
    broken = {name for each in features(args) for name in each.breaks}
    # Token counts per rank.
    longest = -(-longest_sample // args.ranks_per_token)
    tokens = max(longest, batch.input_ids.shape[1] if batch is not None else 0)
    least = max(longest, tokens // 2)
    lines = [*_about_layers(training, broken), *_about_tokens(training, tokens, least)]
    for name in EXTENSIONS:
        lines += flags_class(name).saving_memory(args, tokens, is_one_sample=least >= tokens)
    if least >= tokens:
        lines.append(f"--model_max_length below {longest_sample}: the longest sample alone does not fit")
    most = 1 if "sharded_gradients" in broken else 2 if "sharded_weights" in broken else 3
    if stage < most:
        higher = ", or higher" if stage + 1 < most else ""
        lines.append(f"--deepspeed_config ds_configs/zero{stage + 1}.json{higher}, on several GPUs: shards more")
    if offload_device(resolved.config, "offload_optimizer") == "none" and "offload" not in broken:
        name = "zero3_offload" if stage == 3 else "zero2_offload"
        lines.append(f"--deepspeed_config ds_configs/{name}.json: optimizer states in the node's memory, slower")
    # A checkpoint can be resumed only with the same layout and ZeRO stage.
    restart = "these start the run again, with --resume never, except --gradient_checkpointing"
    return [f"to need less, the cheapest first ({restart}):", *(f"  {line}" for line in lines)]


def _about_layers(training: TrainingArguments, broken: set[str]) -> list[str]:
    can_choose = values_of("gradient_checkpointing") and "whole_layers" not in broken
    if training.gradient_checkpointing == "off" and not can_choose:
        return ["--gradient_checkpointing all: every layer keeps only its input"]
    if training.gradient_checkpointing == "off":
        return ["--gradient_checkpointing auto: checkpoints only as many layers as needed to fit (all: every layer)"]
    if training.gradient_checkpointing == "auto" or training.gradient_checkpointing_every_n_layers > 1:
        return ["--gradient_checkpointing all, for every layer: layers keep as little as possible"]
    return []


def _about_tokens(training: TrainingArguments, tokens: int, least: int) -> list[str]:
    """Return lines with flags for smaller micro-batches. tokens: per rank and micro-batch; least: smallest possible."""
    lines = []
    if training.loss_reduction == "token" and not training.steps_across_epochs and least < tokens:
        lines.append(f"--tokens_per_micro_batch {least}: the same steps in more, smaller micro-batches")
    size = training.per_device_train_batch_size
    if training.tokens_per_micro_batch is None and size > 1:
        more = f" --gradient_accumulation_steps {training.gradient_accumulation_steps * 2}"
        more = "" if training.train_batch_size else more
        lines.append(f"--per_device_train_batch_size {size // 2}{more}: the same")
    return lines
