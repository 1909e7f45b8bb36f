"""Other trainers' and other versions' names in a DeepSpeed JSON: advice repeats what was asked, or none is given."""

import pytest
from ds_json import refused, resolve

IGNORED = "DeepSpeed would ignore it, remove it"


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("data_parallel_size", 4, "remove it, it follows from the ranks that are started and from the other axes"),
        (
            "dtype",
            "bf16",
            'remove it, write "bf16": {"enabled": true}, or "fp16" instead, or omit both for fp32',
        ),
        (
            "mixed_precision",
            "no",
            'remove it, write "bf16": {"enabled": true}, or "fp16" instead, or omit both',
        ),
        ("kernel_inject", True, "remove it, it is a key of DeepSpeed's inference, and this JSON is for training"),
        ("lr", 1e-4, "remove it, write it in optimizer.params"),
        ("zero", {"stage": 3}, "remove it, write zero_optimization as an object with stage"),
        ("monitor_config", {}, "remove it, write tensorboard, wandb, comet or csv_monitor at the top level"),
        ("grad_clip", 1.0, "is an old spelling: write gradient_clipping"),
        ("fp32_allreduce", True, 'is an old spelling: write "communication_data_type": "fp32"'),
        ("warmup_ratio", 0.1, "it is a flag, give --warmup_ratio 0.1"),
        ("zenflow", {"topk_ratio": 0.1}, "remove it, ZenFlow is not supported yet"),
        ("topk_ratio", 0.1, "it belongs to ZenFlow, not supported yet: remove it"),
        ("cpu_offload", True, 'write "offload_optimizer": {"device": "cpu"}, in zero_optimization'),
        ("mics_shard_size", 8, IGNORED),
        ("offload_optimizer", {"device": "cpu"}, "it belongs in zero_optimization"),
        # Similar as strings, of another meaning or another kind
        ("context_parallel", 2, IGNORED),
        ("master_port", 29500, IGNORED),
        ("tensorboard_dir", "logs", IGNORED),
        ("comm", 3, IGNORED),
        ("deepspeed_config", {"zero_stage": 3}, IGNORED),
        ("quantization", 8, IGNORED),
        ("optimizers", 1, IGNORED),
        # Slips
        ("optimizers", {"type": "AdamW"}, "did you mean optimizer?"),
        ("micro_batch_size", 4, "did you mean train_micro_batch_size_per_gpu?"),
        ("gradient_acumulation_step", 4, "did you mean gradient_accumulation_steps?"),
        ("activationcheckpointing", {}, "did you mean activation_checkpointing?"),
    ],
)
def test_advice_about_a_name_means_the_same_or_is_not_given(name, value, advice):
    (line,) = refused({name: value})
    assert advice in line


@pytest.mark.parametrize("section", [{}, {"zero_optimization": {"stage": 9}}, {"zero_optimization": {}}])
def test_a_dotted_key_is_no_key_of_a_section(section):
    lines = refused({"zero_optimization.stage": 3, "bf16.enabled": True, **section})
    (stage,) = (line for line in lines if line.startswith('"zero_optimization.stage" in the DeepSpeed JSON is not a'))
    assert stage.endswith('nest it, as {"zero_optimization": {"stage": ...}}')
    assert any('{"bf16": {"enabled": ...}}' in line for line in lines)
    assert any("zero_optimization.stage is 9" in line for line in lines) == (
        "stage" in section.get("zero_optimization", {})
    )


# As axolotl's and InternVL's files have them: DeepSpeed 0.19 takes names of stage 3 without their prefix.
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_live_parameters", 10**9),
        ("max_reuse_distance", 10**9),
        ("prefetch_bucket_size", 10**6),
        ("param_persistence_threshold", 10**5),
        ("gather_16bit_weights_on_model_save", True),
    ],
)
def test_names_of_stage_3_without_their_prefix_are_the_same_keys(name, value):
    resolved = resolve({"zero_optimization": {"stage": 3, name: value}}).config["zero_optimization"]
    assert resolved == {"stage": 3, f"stage3_{name}": value}
    both = refused({"zero_optimization": {"stage": 3, name: value, f"stage3_{name}": value}})
    assert both == [f"zero_optimization has both {name} and stage3_{name}, but they are one key: remove one"]


def test_auto_is_huggingfaces_formula_or_refused_with_deepspeeds_default():
    zero = {"stage": 3, "prefetch_bucket_size": "auto", "param_persistence_threshold": "auto"}
    filled = resolve({"zero_optimization": zero}).config["zero_optimization"]
    assert filled == {"stage": 3, "stage3_prefetch_bucket_size": 2073, "stage3_param_persistence_threshold": 480}
    zero = {"stage": 3, "max_live_parameters": "auto", "offload_param": {"device": "cpu", "buffer_size": "auto"}}
    why = "but Hugging Face's integration and DeepSpeed don't fill it in: leave it out for DeepSpeed's default"
    assert refused({"zero_optimization": zero, "fp16": {"initial_scale_power": "auto"}}) == [
        f'zero_optimization.offload_param.buffer_size is "auto", {why}, 100000000, or write a value',
        f'zero_optimization.stage3_max_live_parameters is "auto", {why}, 1000000000, or write a value',
        f'fp16.initial_scale_power is "auto", {why}, 16, or write a value',
    ]


@pytest.mark.parametrize("block", ["optimizer", "scheduler"])
def test_auto_within_a_block_whose_type_is_refused_is_not_complained_about(block):
    (line,) = refused({block: {"type": "Nonsense", "params": {"lr": "auto", "warmup_num_steps": "auto"}}})
    assert line.startswith(f'{block}.type "Nonsense" in the DeepSpeed JSON is unknown: give one of')
