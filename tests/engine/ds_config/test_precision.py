"""Precision: every documented key passes, and what can't be trained in is refused before a model is built."""

import pytest
import torch
from ds_json import refused, resolve

ZERO0, ZERO1 = ({"zero_optimization": {"stage": stage}} for stage in (0, 1))

FP16 = {
    "enabled": True,
    "auto_cast": False,
    "loss_scale": 0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "consecutive_hysteresis": False,
    "min_loss_scale": 1,
    "fp16_master_weights_and_grads": False,
}
BF16 = {
    "enabled": True,
    "immediate_grad_update": True,
    "check_grad_overflow": False,
    "bf16_master_weights_and_grads": True,
    "bf16_optimizer_states": True,
}


def test_every_documented_key_passes_as_it_stands():
    assert resolve({**ZERO1, "fp16": FP16}, device_type="cuda").config["fp16"] == FP16
    static = {**FP16, "loss_scale": 128.0}
    assert resolve({**ZERO1, "fp16": static}, device_type="cuda").config["fp16"] == static
    resolved = resolve({**ZERO1, "bf16": BF16})
    assert resolved.config["bf16"] == BF16 and resolved.dtype == torch.bfloat16
    assert "is lost" in resolved.reasons["bf16.bf16_master_weights_and_grads"]
    types = {"grad_accum_dtype": "fp32", "param_dtype": "bf16", "buffer_dtype": "fp32", "keep_in_fp32_modules": []}
    more = {"data_types": types, "communication_data_type": "fp32", "seq_parallel_communication_data_type": "bf16"}
    config = resolve({**ZERO1, "bf16": {"enabled": True}, **more}).config
    assert {key: config[key] for key in more} == more


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_is_for_every_stage_and_fp16_from_the_first(stage):
    raw = {"zero_optimization": {"stage": stage}}
    assert resolve(raw, device_type="cuda", bf16=True).dtype == torch.bfloat16
    if stage:
        assert resolve(raw, device_type="cuda", fp16=True).dtype == torch.float16
    else:
        line = (
            "fp16 is on at ZeRO-0, but there DeepSpeed divides gradients by a loss scale without multiplying the loss "
            "by it: use ds_configs/zero1.json, or --bf16"
        )
        assert refused(raw, device_type="cuda", fp16=True) == [line]


def test_autocast_leaves_the_weights_in_fp32_and_its_dtype_is_filled():
    resolved = resolve({**ZERO1, "torch_autocast": {"enabled": True}})
    assert resolved.config["torch_autocast"]["dtype"] == "bfloat16" and resolved.dtype == torch.float32
    assert "torch_autocast.dtype" in resolved.reasons
    off = {
        "torch_autocast": {"enabled": False, "dtype": "float16", "lower_precision_safe_modules": ["torch.nn.Linear"]}
    }
    assert resolve({**off, "bf16": {"enabled": True}}).config["torch_autocast"] == off["torch_autocast"]


def test_autocast_may_stand_beside_bf16_weights():
    resolved = resolve({**ZERO1, "torch_autocast": {"enabled": True}, "bf16": {"enabled": True}})
    assert (resolved.dtype, resolved.compute_dtype) == (torch.bfloat16, torch.bfloat16)


def test_deepspeeds_own_word_for_its_default_does_not_stay():
    assert "keep_in_fp32_modules" not in resolve({"data_types": {"keep_in_fp32_modules": "auto"}}).config["data_types"]


def autocast(**values: object) -> dict:
    return {**ZERO1, "torch_autocast": {"enabled": True, **values}}


WRONG = [
    (
        {"fp16": {"initial_scale_power": 1.5}},
        "fp16.initial_scale_power is 1.5 in the DeepSpeed JSON: write a whole num",
    ),
    (
        {"fp16": {"loss_scale_window": 0}},
        "fp16.loss_scale_window is 0 in the DeepSpeed JSON: write a whole number",
    ),
    ({"fp16": {"hysteresis": 0}}, "fp16.hysteresis is 0 in the DeepSpeed JSON: write a whole number from 1"),
    ({"fp16": {"min_loss_scale": 0}}, "fp16.min_loss_scale is 0 in the DeepSpeed JSON: write a whole number from 1"),
    (
        {"fp16": {"loss_scale": "auto"}},
        "fp16.loss_scale is \"auto\", but Hugging Face's integration and DeepSpeed don't fill it in: leave it out",
    ),
    (
        {**ZERO0, "bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
        "bf16.bf16_master_weights_and_grads is true, but ZeRO-0 has no such weights: use a stage from 1, or",
    ),
    (
        {**ZERO1, "bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
        "bf16.bf16_master_weights_and_grads is true, but needs zero_optimization.offload_optimizer with DeepSpeed's "
        "CPU Adam, or bf16.bf16_optimizer_states true",
    ),
    (
        {**ZERO1, "fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
        "fp16.fp16_master_weights_and_grads is true, but needs zero_optimization.offload_optimizer with",
    ),
    (
        {**ZERO1, "bf16": {"enabled": True, "bf16_optimizer_states": True}},
        "bf16.bf16_optimizer_states is true, but needs bf16.bf16_master_weights_and_grads true as well",
    ),
    (autocast(dtype="float16"), "torch_autocast.dtype is float16, but there is no GPU: write bfloat16"),
    (
        autocast(lower_precision_safe_modules=["Linear"]),
        "torch_autocast.lower_precision_safe_modules: Linear can't be imported: write a class with its",
    ),
    (
        {**autocast(dtype="float16"), "bf16": {"enabled": True}},
        'torch_autocast.dtype is float16 with bf16.enabled: write "bfloat16", or bf16 false',
    ),
    (
        {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}, "torch_autocast": {"enabled": True}},
        "torch_autocast.enabled and zero_optimization.zero_quantized_weights exclude each other: choose one",
    ),
    (
        {**ZERO0, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
        "data_types.grad_accum_dtype is fp32, but at ZeRO-0 gradients have the weights' bf16: leave it out, or",
    ),
    (
        {**ZERO1, "bf16": {"enabled": True}, "data_types": {"param_dtype": "fp32"}},
        "data_types.param_dtype is fp32, but the run's precision is bf16: leave it out",
    ),
]


@pytest.mark.parametrize(("raw", "expected"), WRONG, ids=range(len(WRONG)))
def test_what_can_not_be_trained_in_is_refused(raw, expected):
    lines = refused(raw)
    assert any(line.startswith(expected) for line in lines), lines


def test_clipping_under_autocasts_loss_scale_is_refused_where_zero_clips_first():
    raw = autocast(dtype="float16") | {"gradient_clipping": 1.0}
    line = (
        "gradient_clipping is 1.0 with torch_autocast in float16, but ZeRO would clip the scaled gradients: give "
        '--max_grad_norm 0, write "dtype": "bfloat16", or use stage 0'
    )
    assert refused(raw, device_type="cuda") == [line]
    resolve(raw | ZERO0, device_type="cuda")
    resolve(autocast(dtype="float16"), device_type="cuda")


def test_a_gpu_that_only_imitates_bfloat16_is_told_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla V100")
    says = "bfloat16 is on, but this machine's Tesla V100 does not compute in it: "
    assert refused({}, device_type="cuda", bf16=True) == [says + "use --fp16 True, or fp32"]
    assert refused(autocast(), device_type="cuda") == [says + 'write "dtype": "float16", or fp32']
    resolve(ZERO1, device_type="cuda", fp16=True)


def test_torchs_adamw_goes_without_the_overflow_check_of_bf16_and_others_keep_it():
    key = "check_grad_overflow"
    plain = resolve({"zero_optimization": {"stage": 2}}, bf16=True)
    assert plain.config["bf16"][key] is False and f"bf16.{key}" in plain.reasons
    assert key not in resolve({"zero_optimization": {"stage": 2}}).config["bf16"]
    assert resolve({"bf16": {"enabled": True, key: True}}).config["bf16"][key] is True
    unguarded = (
        {"optimizer": {"type": "SGD"}, "zero_allow_untested_optimizer": True},
        {"zero_optimization": {"stage": 2, "compute_grad_norm": False}},
        {
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            "zero_force_ds_cpu_optimizer": False,
        },
    )
    assert all(key not in resolve(raw, bf16=True).config["bf16"] for raw in unguarded)
