"""Resolve the precision in the JSON and the flags: bf16, fp16 with its loss scale, fp32, and torch's autocast."""

import importlib

import torch

from llava_ds.engine.ds_config.draft import AUTO, Draft, as_json

DTYPES = {
    "fp32": ("fp32", "float32", "float", "torch.float32"),
    "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
    "fp16": ("fp16", "float16", "half", "torch.float16"),
}
# Smallest valid values; below them DeepSpeed fails in the middle of a run, or scales by 0.
LEAST = {"fp16.initial_scale_power": 0, "fp16.loss_scale_window": 1, "fp16.hysteresis": 1, "fp16.min_loss_scale": 1}


def resolve_precision(draft: Draft) -> None:
    """Fill in bf16.enabled, fp16.enabled and autocast's dtype; refuse unsupported precisions."""
    _check_values(draft)
    bf16, fp16 = draft.agree("bf16.enabled", "bf16"), draft.agree("fp16.enabled", "fp16")
    autocast = _autocast_dtype(draft)
    switches = {"bf16": bf16, "fp16": fp16, "torch_autocast": autocast is not None}
    on = [name for name, enabled in switches.items() if enabled is True]
    if set(on) == {"bf16", "torch_autocast"}:  # bf16 weights with autocast
        if autocast == "fp16":
            draft.refuse('torch_autocast.dtype is float16 with bf16.enabled: write "bfloat16", or bf16 false')
    elif len(on) > 1:
        both = " and ".join(f"{name}.enabled" for name in on)
        draft.refuse(f"{both} are {'both' if len(on) == 2 else 'all'} true: choose one")
    if fp16 is True and bf16 is not True and draft.device_type == "cpu":
        draft.refuse("fp16 is on, but there is no GPU and DeepSpeed trains in float16 on GPUs only: use --bf16 or fp32")
    elif fp16 is True and not draft.get("zero_optimization.stage"):
        draft.refuse(
            "fp16 is on at ZeRO-0, but there DeepSpeed divides gradients by a loss scale without multiplying the loss "
            "by it: use ds_configs/zero1.json, or --bf16"
        )
    if autocast == "fp16" and draft.device_type == "cpu":
        draft.refuse("torch_autocast.dtype is float16, but there is no GPU: write bfloat16")
    on_gpu = draft.is_local and draft.device_type == "cuda"
    gpu = _gpu_without_bf16() if on_gpu and (bf16 is True or autocast == "bf16") else None
    if gpu is not None:
        remedy = "use --fp16 True" if bf16 is True else 'write "dtype": "float16"'
        draft.refuse(f"bfloat16 is on, but this machine's {gpu} does not compute in it: {remedy}, or fp32")
    if autocast == "fp16":
        _check_loss_scaling_of_autocast(draft)
    _check_data_types(draft, "bf16" if bf16 is True else "fp16" if fp16 is True else "fp32")
    _check_master_weights(draft)


def _dtype(name: object) -> str | None:
    """Map any of DeepSpeed's names of a dtype to the short name."""
    return next((short for short, names in DTYPES.items() if name in names), None)


def torch_dtype(name: object) -> torch.dtype:
    """Map any of DeepSpeed's names of a dtype to torch's dtype."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[_dtype(name)]


def _gpu_without_bf16() -> str | None:
    """Return the GPU's name if it only emulates bfloat16, otherwise None."""
    if not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False):
        return None
    return torch.cuda.get_device_name()


def _check_values(draft: Draft) -> None:
    if draft.get("data_types.keep_in_fp32_modules") == AUTO:
        del draft.config["data_types"]["keep_in_fp32_modules"]  # DeepSpeed's name for its default
    for key, least in LEAST.items():
        value = draft.get(key)
        if value not in (None, AUTO) and not (isinstance(value, int) and value >= least):
            draft.refuse(f"{key} is {as_json(value)} in the DeepSpeed JSON: write a whole number from {least}")


def _autocast_dtype(draft: Draft) -> str | None:
    """Return the short name of autocast's dtype; None if autocast is off."""
    if draft.get("torch_autocast.enabled") is not True:
        return None
    if draft.is_open("torch_autocast.dtype"):
        draft.fill("torch_autocast.dtype", "bfloat16", "DeepSpeed has no default for it")
    for name in draft.get("torch_autocast.lower_precision_safe_modules") or []:
        module, _, cls = str(name).rpartition(".")
        try:
            getattr(importlib.import_module(module), cls)
        except (ImportError, AttributeError, ValueError):
            draft.refuse(
                f"torch_autocast.lower_precision_safe_modules: {name} can't be imported: write a class "
                "with its module, like torch.nn.Linear"
            )
    if draft.get("zero_optimization.zero_quantized_weights") is True:
        draft.refuse(
            "torch_autocast.enabled and zero_optimization.zero_quantized_weights exclude each other: choose one"
        )
    return _dtype(draft.get("torch_autocast.dtype"))


def _check_loss_scaling_of_autocast(draft: Draft) -> None:
    """Refuse clipping: DeepSpeed 0.19.8's ZeRO clips gradients before it divides them by autocast's loss scale."""
    clipping = draft.agree("gradient_clipping", "max_grad_norm")
    if draft.get("zero_optimization.stage") and clipping:
        draft.refuse(
            f"gradient_clipping is {as_json(clipping)} with torch_autocast in float16, but ZeRO would clip the scaled "
            'gradients: give --max_grad_norm 0, write "dtype": "bfloat16", or use stage 0'
        )


def _check_data_types(draft: Draft, model_dtype: str) -> None:
    """Refuse dtypes that DeepSpeed doesn't support, either at all or at this stage."""
    params, grads = (_dtype(draft.get(f"data_types.{key}")) for key in ("param_dtype", "grad_accum_dtype"))
    if params not in (None, model_dtype):
        draft.refuse(f"data_types.param_dtype is {params}, but the run's precision is {model_dtype}: leave it out")
    if grads not in (None, model_dtype) and not draft.get("zero_optimization.stage"):
        draft.refuse(
            f"data_types.grad_accum_dtype is {grads}, but at ZeRO-0 gradients have the weights' {model_dtype}: leave "
            "it out, or use a stage from 1"
        )


def _check_master_weights(draft: Draft) -> None:
    """Refuse 16-bit master weights, except with DeepSpeed's CPU Adam or with bf16 optimizer states."""
    stage, offload = draft.get("zero_optimization.stage"), draft.get("zero_optimization.offload_optimizer")
    for key in ("fp16.fp16_master_weights_and_grads", "bf16.bf16_master_weights_and_grads"):
        if draft.get(key) is not True:
            continue
        short_states = key.startswith("bf16") and draft.get("bf16.bf16_optimizer_states") is True
        if not stage:
            draft.refuse(f"{key} is true, but ZeRO-0 has no such weights: use a stage from 1, or remove it")
        elif not offload and not short_states:
            other = ", or bf16.bf16_optimizer_states true" if key.startswith("bf16") else ""
            draft.refuse(
                f"{key} is true, but needs zero_optimization.offload_optimizer with DeepSpeed's CPU Adam{other}"
            )
        draft.reasons[key] = "from the JSON; an update smaller than half a bit of a weight is lost"
    if draft.get("bf16.bf16_optimizer_states") is True and draft.get("bf16.bf16_master_weights_and_grads") is not True:
        draft.refuse("bf16.bf16_optimizer_states is true, but needs bf16.bf16_master_weights_and_grads true as well")
