"""Resolve the ZeRO section: its stage, sizes that depend on the language model's width, and offload."""

import os

from llava_ds.engine.ds_config.draft import AUTO, Draft, as_json
from llava_ds.files.writing import can_be_made

# Hugging Face's formulas; h is the language model's hidden size. Source: transformers, integrations/deepspeed.py.
SIZES = {
    "reduce_bucket_size": (lambda h: h * h, "hidden size squared"),
    "stage3_prefetch_bucket_size": (lambda h: int(0.9 * h * h), "0.9 x hidden size squared"),
    "stage3_param_persistence_threshold": (lambda h: 10 * h, "10 x hidden size"),
}
OFFLOADED = ("offload_optimizer", "offload_param")
NEEDS_GPU = {
    "zero_quantized_weights": "DeepSpeed's quantizer is written for GPUs",
    "zero_quantized_nontrainable_weights": "DeepSpeed's quantizer is written for GPUs",
    "zero_quantized_gradients": "DeepSpeed's quantizer is written for GPUs",
    "offload_optimizer.super_offload": "it is for GPUs on one module with a CPU",
}
NEEDS_STAGE_3 = (
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
    "offload_optimizer.super_offload",
)


def resolve_zero(draft: Draft) -> None:
    """Fill in sizes that are "auto"; refuse values that the stage, ranks, device or machine can't support."""
    for key, (formula, words) in SIZES.items():
        if draft.get(f"zero_optimization.{key}") == AUTO:
            draft.fill(f"zero_optimization.{key}", formula(draft.hidden_size), f"{words} ({draft.hidden_size})")
    stage = draft.get("zero_optimization.stage") or 0
    if stage < 3 and _set_value(draft, "offload_param") is not None:
        # Don't refuse offload_param: LLaVA-NeXT's zero2_offload.json contains it, and DeepSpeed ignores it.
        why = f"at stage {stage} every rank holds all parameters, nothing is offloaded"
        draft.fill("zero_optimization.offload_param.device", "none", why)
    _check_stage(draft, stage)
    _check_reduction(draft, stage)
    for part in OFFLOADED:
        if offload_device(draft.config, part) == "nvme":
            _check_nvme(draft, stage, part)
    if draft.is_local and stage == 3 and "nvme" in (offload_device(draft.config, part) for part in OFFLOADED):
        from llava_ds.engine.ds_config.native_ops import missing_tools

        for tool in missing_tools(draft.device_type, "async_io"):
            draft.refuse(
                f'offloading to "nvme" uses an operator that DeepSpeed compiles when it starts, and it '
                f'needs {tool}: install it, or offload to "cpu"'
            )


def offload_device(config: dict, part: str) -> str:
    """Return the device to which offload_optimizer or offload_param moves states: "none", "cpu" or "nvme"."""
    section = config.get("zero_optimization", {}).get(part) or {}
    return section.get("device") or "none"


def _set_value(draft: Draft, key: str) -> object:
    """Return the value of a key in ZeRO's section; None if the value leaves the feature off."""
    value = offload_device(draft.config, key) if key in OFFLOADED else draft.get(f"zero_optimization.{key}")
    plain = value in (None, False, "none") or (value == 1 and value is not True)  # True == 1
    return None if plain else value


def _check_stage(draft: Draft, stage: int) -> None:
    for key, why in NEEDS_GPU.items():
        if draft.device_type == "cpu" and (value := _set_value(draft, key)) is not None:
            draft.refuse(f"zero_optimization.{key} is {as_json(value)}, but there is no GPU: remove it, {why}")
    for key in NEEDS_STAGE_3:
        if draft.device_type == "cpu" and key in NEEDS_GPU:
            continue
        if stage < 3 and (value := _set_value(draft, key)) is not None:
            draft.refuse(
                f"zero_optimization.{key} is {as_json(value)} at stage {stage}: parameters are sharded at stage 3 "
                "only, write stage 3 or remove it"
            )
    if stage == 0 and (value := _set_value(draft, "offload_optimizer")) is not None:
        draft.refuse(
            f"zero_optimization.offload_optimizer is {as_json(value)}, but stage 0 has nothing to offload: "
            "write stage 1, 2 or 3"
        )
    group = draft.get("zero_optimization.zero_hpz_partition_size") or 1
    ranks = draft.dp * draft.args.ranks_per_token
    if stage == 3 and group != AUTO and ranks % group:
        draft.refuse(
            f"zero_optimization.zero_hpz_partition_size is {group}, but it does not divide {ranks} ranks: "
            "write the number of GPUs of a node"
        )
    if draft.get("zero_optimization.stage3_module_granularity_threshold"):
        draft.refuse(
            "zero_optimization.stage3_module_granularity_threshold ends this kind of model's first step in an error "
            "(DeepSpeed 0.19): remove it"
        )


def _check_reduction(draft: Draft, stage: int) -> None:
    """Check the settings for summing gradients over the ranks."""
    scatters = stage > 0 and draft.get("zero_optimization.reduce_scatter") is not False
    for key, plain in (("prescale_gradients", False), ("gradient_predivide_factor", 1)):
        value = draft.get(key)
        if scatters and value not in (None, plain, AUTO):
            draft.refuse(
                f"{key} is {as_json(value)}, but DeepSpeed's reduce-scatter at stage {stage} does not support it: "
                'remove it, or write "reduce_scatter": false into zero_optimization'
            )
    if draft.get("zero_optimization.compute_grad_norm") is False and stage in (1, 2) and draft.get("gradient_clipping"):
        draft.refuse("zero_optimization.compute_grad_norm is false, but gradient_clipping needs it: remove one")


def _check_nvme(draft: Draft, stage: int, part: str) -> None:
    key = f"zero_optimization.{part}"
    if stage < 3:
        if stage > 0:  # stage 0 was refused
            draft.refuse(f'{key}.device is "nvme" at stage {stage}: write stage 3, or "cpu"')
        draft.ruled.add(f"{key}.nvme_path")
    path = draft.get(f"{key}.nvme_path")
    if path == AUTO:
        path = os.path.abspath(os.path.join(draft.args.training.output_dir or "output", "nvme"))
        draft.fill(f"{key}.nvme_path", path, "--output_dir; if it is not on a local NVMe disk, name a folder on one")
    if not isinstance(path, str):
        draft.refuse(f"{key}.nvme_path is missing: name a folder on a local NVMe disk")
        return
    if part == "offload_optimizer":
        draft.reasons[f"{key}.device"] = "from the JSON; DeepSpeed 0.19 can't resume such a run from its checkpoints"
    if draft.is_local and not can_be_made(path):
        draft.refuse(f"{key}.nvme_path {path} can't be written to: name a folder on a local NVMe disk")
