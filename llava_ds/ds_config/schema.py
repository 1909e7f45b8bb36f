"""Which keys a DeepSpeed JSON may hold: DeepSpeed 0.19 ignores unknown ones at the top silently."""

import difflib

from llava_ds.constants import ConfigError
from llava_ds.ds_config.draft import Draft

# Sections that this trainer builds itself or does not drive yet; passing them on would train something else.
NOT_DRIVEN = {
    "amp": "use --bf16 or --fp16",
}
# Top-level keys that DeepSpeed 0.19 reads; it ignores all others silently.
KNOWN_KEYS = {
    "activation_checkpointing", "aio", "amp", "autotuning", "bf16", "checkpoint", "comet", "comms_logger",
    "communication_data_type", "compile", "csv_monitor", "data_efficiency", "data_types", "dataloader_drop_last",
    "disable_allgather", "dump_state", "eigenvalue", "elasticity", "expert_parallel", "flops_profiler", "fp16",
    "gradient_accumulation_steps", "gradient_clipping", "gradient_predivide_factor", "hybrid_engine",
    "keep_in_fp32_modules", "managed_gradient_accumulation", "memory_breakdown", "optimizer", "pipeline",
    "prescale_gradients", "scheduler", "seq_parallel_communication_data_type", "sequence_parallel_size",
    "steps_per_print", "tensor_parallel", "tensorboard", "timers", "torch_autocast", "train_batch_size",
    "train_micro_batch_size_per_gpu", "use_data_before_expert_parallelism", "use_node_local_storage",
    "vocabulary_size", "wall_clock_breakdown", "wandb", "weight_quantization", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer", "zero_optimization",
}  # fmt: skip


def check_keys(draft: Draft) -> None:
    """Refuse keys that DeepSpeed doesn't know or this trainer doesn't drive, and sections that are no objects."""
    config = draft.config
    for key, why in NOT_DRIVEN.items():
        if key in config:
            draft.refuse(f"{key} in the DeepSpeed JSON: remove it, {why}")
    for key in sorted(set(config) - KNOWN_KEYS):
        nearest = difflib.get_close_matches(key, KNOWN_KEYS, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else "DeepSpeed would ignore it, remove it"
        draft.refuse(f"{key} in the DeepSpeed JSON is no key of DeepSpeed's: {hint}")
    config.setdefault("zero_optimization", {"stage": 0})
    for section in ("zero_optimization", "bf16", "fp16", "timers"):
        if not isinstance(config.setdefault(section, {}), dict):
            raise ConfigError(f"{section} in the DeepSpeed JSON is {config[section]!r}: expected an object")
    throughput = config["timers"].setdefault("throughput", {})
    if not isinstance(throughput, dict):
        raise ConfigError(f"timers.throughput in the DeepSpeed JSON is {throughput!r}: expected an object")
    for key in ("offload_optimizer", "offload_param"):
        if key in config["zero_optimization"]:
            draft.refuse(f"zero_optimization.{key} in the DeepSpeed JSON: offload is not supported yet, remove it")
