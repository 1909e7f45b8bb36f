"""Check that the keys of a DeepSpeed JSON exist, are supported by this trainer, and have values of the right kind.

DeepSpeed 0.19 silently ignores unknown top-level keys, and reads "false" as true in fields that it does not validate.
"""

from pydantic import BaseModel, ValidationError

from llava_ds.engine.ds_config.draft import AUTO, Draft, as_json, value_at
from llava_ds.engine.ds_config.schema import DeepSpeedJson, fields_of, options, section_of, sections, strict_model
from llava_ds.extensions.active import flags_class
from llava_ds.extensions.table import EXTENSIONS

# Keys removed in DeepSpeed 0.19, with the remedy. Older guides and configurations still contain them.
REMOVED = {
    "amp": "write bf16 or fp16, or torch_autocast",
    "compression_training": "remove it: the model would train uncompressed",
    "curriculum_learning": "remove it",
    "eigenvalue": "remove it",
    "elasticity": "write the three batch sizes, or \"auto\"; the samples of a step stay the same on any number of GPUs "
    "with --train_batch_size",
    "graph_harvesting": "remove it; torch.compile replaces it",
    "nebula": "remove it: checkpoints go to --output_dir",
    "progressive_layer_drop": "remove it",
    "quantize_training": "remove it",
    "sparse_attention": "remove it",
    "sparse_gradients": "remove it",
    "zero_optimization.mics_hierarchical_params_gather": "remove it; zero_hpz_partition_size keeps parameters within "
    "a node",
    "zero_optimization.mics_shard_size": "write zero_hpz_partition_size: it shards parameters within a node",
    "zero_optimization.zeropp_loco_param": "remove it: zero_quantized_gradients works without it",
}  # fmt: skip

# Old spellings, with the new ones.
RENAMED = {
    "bfloat16": "bf16",
    "aio.thread_count": "intra_op_parallelism",
    "bf16.check_overflow": "check_grad_overflow",
    "zero_optimization.cpu_offload": '"offload_optimizer": {"device": "cpu"}',
    "zero_optimization.cpu_offload_param": '"offload_param": {"device": "cpu"}',
    "zero_optimization.cpu_offload_use_pin_memory": "pin_memory in offload_optimizer and offload_param",
    "zero_optimization.find_unused_parameters": "ignore_unused_parameters (the same meaning)",
    "zero_optimization.gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    "allgather_size": "allgather_bucket_size in zero_optimization",
    "disable_allgather_size": "allgather_bucket_size in zero_optimization",
    "grad_clip": "gradient_clipping",
    "clip_grad": "gradient_clipping",
    "clip_grad_norm": "gradient_clipping",
    "fp32_allreduce": '"communication_data_type": "fp32"',
    "gradient_accumulation_dtype": '"data_types": {"grad_accum_dtype": "fp32"}',
}

# Other trainers' names for the size of an axis.
_RANKS = ("dp", "dp_size", "data_parallel_size", "world_size", "num_gpus", "num_ranks")

# Keys of features that this trainer doesn't have, with the values that disable them and the reason.
UNSUPPORTED = {
    "checkpoint.load_universal": ((False,), "--resume loads checkpoints"),
    "checkpoint.use_node_local_storage": ((False,), "all nodes write checkpoints to the same --output_dir"),
    "checkpoint.writer": ((), "checkpoints are written and hashed before training continues"),
    "checkpoint.parallel_write.pipeline_stage": ((False,), "each stage has its own files already"),
    "gradient_allreduce_op": (("mean",), "the loss is divided by the tokens of all ranks and needs their mean"),
    "managed_gradient_accumulation": ((True,), "the loop steps the engine after every micro-batch"),
    "use_data_before_expert_parallelism": ((False,), "the ranks that share experts are always consecutive"),
    # Names that other trainers use, and keys of DeepSpeed that have no place in a training JSON.
    **{name: ((), "it follows from the ranks that are started and from the other axes") for name in _RANKS},
    **{
        name: ((), 'write "bf16": {{"enabled": true}}, or "fp16" instead, or omit both for fp32')
        for name in ("dtype", "torch_dtype", "param_dtype", "precision", "mixed_precision")
    },
    "fp8": ((), "weights train in the precision of bf16, fp16 or fp32"),
    **{
        name: ((False,), "it is a key of DeepSpeed's inference, and this JSON is for training")
        for name in ("kernel_inject", "replace_with_kernel_inject", "injection_policy", "max_out_tokens", "max_tokens")
    },
    "zero": ((), "write zero_optimization as an object with stage"),
    **{name: ((), "write it in optimizer.params") for name in ("lr", "betas", "eps", "momentum")},
    "zero_stage": ((), 'write "zero_optimization": {{"stage": {size}}}'),
    "monitor_config": ((), "write tensorboard, wandb, comet or csv_monitor at the top level"),
    "sparse_embedding": ((False,), "gradients of embeddings are dense"),
    "mpu": (
        (),
        "it is an object of Megatron's: here the sizes of the axes decide the layout of ranks",
    ),
    "zero_optimization.elastic_checkpoint": ((False,), "--resume loads checkpoints"),
    "zero_optimization.legacy_stage1": ((False,), "write only stage 1"),
    "zero_optimization.zenflow": ((), "ZenFlow is not supported yet; offload_optimizer trains the same model"),
}
# Unsupported sections; they are allowed if empty or off.
UNSUPPORTED_SECTIONS = {
    "autotuning": "autotuning starts other runs; run/estimate.py says which stage fits",
    "data_efficiency": "the order of samples comes from --group_by_length and similar flags",
    "datastates_ckpt": "checkpoints are written and hashed before training continues",
    "expert_parallel": "DeepSpeed 0.19.8's AutoEP fails with transformers 5 (_CanRecordRegistry.get() takes 2 "
    "arguments, 3 are given), and creates its experts after the optimizer's groups; families with experts train at "
    "stages 0 to 3 without it; for --moe_enable, moe_expert_parallel_size divides the experts over ranks",
    "moe": "experts follow from flags: --moe_enable True, --num_experts, --top_k_experts and --moe_mode, and --ep_size "
    "or moe_expert_parallel_size for the number of ranks that share them",
    "hybrid_engine": "training generates nothing",
    "weight_quantization": "weights train in the precision of bf16, fp16 or fp32",
}
OFF = {"enabled": (False,)}


def check_keys(draft: Draft) -> None:
    """Refuse keys that are unknown, removed or unsupported, and values of the wrong kind; remove them from the draft.

    Each remaining value is of the kind in the schema, or "auto"; nulls are removed. An invalid stage is replaced by 3,
    because stage 3 allows most other keys: this avoids follow-up problems.
    """
    draft.config = config = _without_nulls(draft.config)
    _refuse_removed(draft)
    _refuse_unsupported(draft)
    _use_full_names(draft)
    _validate(draft, strict_model(DeepSpeedJson))
    if "zero_optimization.stage" in draft.wrong:
        config["zero_optimization"]["stage"] = 3
    _validate(draft, DeepSpeedJson)  # with DeepSpeed's own validators
    for section in ("zero_optimization", "bf16", "fp16", "timers"):
        config.setdefault(section, {})


def _refuse_removed(draft: Draft) -> None:
    for key, instead in (*REMOVED.items(), *RENAMED.items()):
        value = value_at(draft.config, key)
        if value is None:
            continue
        _remove(draft.config, key)
        if value is False or _is_off(value):
            continue
        gone = key in REMOVED
        draft.refuse(
            f"{key} in the DeepSpeed JSON is {'gone from DeepSpeed 0.19' if gone else 'an old spelling'}: "
            f"{'' if gone else 'write '}{instead}"
        )


def _refuse_unsupported(draft: Draft) -> None:
    for key, why in UNSUPPORTED_SECTIONS.items():
        value = draft.config.pop(key, None)
        if value is None or value == {} or _is_off(value):
            continue
        asks = next((k for k in OFF if isinstance(value, dict) and k in value and value[k] not in OFF[k]), None)
        found = f"{key}.{asks} is {as_json(value[asks])}" if asks else f"{key} is {as_json(value)}"
        draft.refuse(f"{found} in the DeepSpeed JSON: remove it, {why}")
    for key, (harmless, why) in (UNSUPPORTED | _names_of_others(draft.config)).items():
        value = value_at(draft.config, key)
        if value is None:
            continue
        asks = not any(value == one and type(value) is type(one) for one in harmless)  # true differs from 1
        if asks:
            size = value if isinstance(value, int) and not isinstance(value, bool) else "N"
            draft.refuse(f"{key} is {as_json(value)} in the DeepSpeed JSON: remove it, {why.format(size=size)}")
        if asks or key not in fields_of(DeepSpeedJson):
            _remove(draft.config, key)


def _names_of_others(config: dict) -> dict[str, tuple[tuple, str]]:
    """Return the extensions' additions to UNSUPPORTED. They are only looked up if the JSON has unknown keys."""
    if not config.keys() - fields_of(DeepSpeedJson).keys() - UNSUPPORTED.keys():
        return {}
    return {key: rule for name in EXTENSIONS for key, rule in flags_class(name).other_keys.items()}


def _is_off(value: object) -> bool:
    switches = {key: value[key] for key in OFF if key in value} if isinstance(value, dict) else {}
    return switches.get("enabled") is False or (bool(switches) and all(v in OFF[key] for key, v in switches.items()))


def _use_full_names(draft: Draft) -> None:
    """Add the prefix stage3_ to keys of stage 3 that lack it; DeepSpeed accepts both spellings."""
    zero = draft.config.get("zero_optimization")
    if not isinstance(zero, dict):
        return
    for name, info in sections()["zero_optimization"].model_fields.items():
        if info.alias is None or name not in zero:
            continue
        value = zero.pop(name)
        if info.alias in zero:
            draft.refuse(f"zero_optimization has both {name} and {info.alias}, but they are one key: remove one")
        zero.setdefault(info.alias, value)


def _validate(draft: Draft, model: type[BaseModel]) -> None:
    """Refuse values that pydantic refuses, and remove them from the draft."""
    try:
        model.model_validate(_without_auto(draft.config, DeepSpeedJson))
    except ValidationError as error:
        problems = error.errors()
    else:
        return
    from llava_ds.engine.ds_config.key_messages import message

    refused = _refused()
    for problem in problems:
        key = ".".join(as_json(part) if "." in str(part) else str(part) for part in problem["loc"])
        if key in draft.wrong:
            continue
        draft.wrong.add(key)
        section, value = None, draft.config
        for part in problem["loc"]:
            section, value = value, None if problem["type"] == "missing" and part not in value else value[part]
        draft.refuse(message(key, value, problem, refused))
        if isinstance(section, dict) and not (key in sections() and isinstance(value, dict)):
            section.pop(part, None)


def _without_auto(section: dict, model: type[BaseModel]) -> dict:
    """Copy a section, omitting "auto" values of keys that allow "auto"."""
    fields, copy = fields_of(model), {}
    for name, value in section.items():
        below = section_of(fields.get(name))
        may_be_auto = name in fields and not (below or dict in options(fields[name]) or name in ("stage", "type"))
        if below is not None and isinstance(value, dict):
            copy[name] = _without_auto(value, below)
        elif value != AUTO or not may_be_auto:
            copy[name] = value
    return copy


def _refused() -> dict[str, str]:
    """Return the keys that are refused at any level, and the remedies."""
    found = dict(UNSUPPORTED_SECTIONS)
    found |= {key: f"write {instead}" for key, instead in RENAMED.items() if "." not in key}
    found |= {key: f"write {instead}, in {key.rpartition('.')[0]}" for key, instead in RENAMED.items() if "." in key}
    found |= {key: f"it is gone from DeepSpeed 0.19, {instead}" for key, instead in REMOVED.items()}
    return found | {key: f"remove it, {why.format(size='N')}" for key, (_, why) in UNSUPPORTED.items()}


def _without_nulls(config: dict) -> dict:
    """Copy a configuration without null values, at any depth."""
    return {k: _without_nulls(v) if isinstance(v, dict) else v for k, v in config.items() if v is not None}


def _remove(config: dict, key: str) -> None:
    *path, last = key.split(".")
    for part in path:
        config = config[part]
    del config[last]
