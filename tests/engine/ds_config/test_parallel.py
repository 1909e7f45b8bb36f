"""The sizes of the mesh in flags and JSON, and what can't be trained on it."""

import pytest
import toys

from llava_ds.config.parsing import parse_arguments
from llava_ds.constants import ConfigError
from llava_ds.engine.ds_config.parallel import check_axes, for_engine, with_axes


def arguments(*flags: str):
    needed = ["--output_dir", "here", "--deepspeed_config", __file__]
    return parse_arguments([*needed, *flags])[0]


@pytest.mark.parametrize(
    ("raw", "flags", "size"),
    [
        (None, [], 1),
        ({}, ["--sequence_parallel_size", "4"], 4),
        ({}, ["--sp_size", "4"], 4),
        ({"sequence_parallel_size": "auto"}, ["--sp_size", "4"], 4),
        ({"sequence_parallel_size": 4}, [], 4),
        ({"sequence_parallel_size": 4}, ["--sp_size", "4"], 4),
        ({"sequence_parallel_size": 1}, [], 1),
    ],
)
def test_flag_and_json_are_one_number(raw, flags, size):
    assert with_axes(arguments(*flags), raw).training.sequence_parallel_size == size


@pytest.mark.parametrize("value", [0, -2, 2.0, True, "two", [2], 10**30])
def test_what_is_no_size_is_refused(value):
    with pytest.raises(ConfigError, match=r"sequence_parallel_size is .* in the DeepSpeed JSON: write a whole number"):
        with_axes(arguments(), {"sequence_parallel_size": value})


def test_two_sizes_are_refused():
    with pytest.raises(ConfigError, match="2 in the DeepSpeed JSON but --sequence_parallel_size is 4: make them equal"):
        with_axes(arguments("--sp_size", "4"), {"sequence_parallel_size": 2})


def test_every_reason_against_a_mesh_is_given_at_once():
    llama = toys.language_model_config("llama")  # 4 heads, 2 of keys
    drawn = ["--objective", "grpo", "--reward_funcs", "exact"]
    check_axes(arguments(*drawn), llama)  # nothing is shared
    for size in ("2", "4"):
        check_axes(arguments("--sp_size", size), llama)
    with pytest.raises(ConfigError) as caught:
        check_axes(arguments("--sp_size", "3", *drawn, "--router_aux_loss_coef", "0.1"), llama)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3 and all(line.startswith("--sequence_parallel_size is 3: ") for line in lines)
    assert "4 heads, with 2 of keys, can't be shared out over 3 ranks: give 1, 2, 4" in lines[0]
    assert "--objective grpo needs an answer's tokens on one rank" in lines[1]
    assert "--router_aux_loss_coef balances experts over all tokens" in lines[2]


@pytest.mark.parametrize("objective", ["reward", "grpo", "ppo"])
def test_objectives_that_need_whole_answers(objective):
    args = arguments("--sp_size", "2").replaced(objective=objective)
    with pytest.raises(ConfigError, match=f"--objective {objective} needs"):
        check_axes(args, toys.language_model_config("llama"))


def test_deepspeed_is_not_told_how_many_samples_a_step_has():
    micro = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    config = {"train_batch_size": 8, **micro, "zero_optimization": {"stage": 2}}
    assert for_engine(config) == {**micro, "zero_optimization": {"stage": 2}}
    assert "train_batch_size" in config
    assert for_engine({"train_batch_size": 8}) == {"train_batch_size": 8}  # of inference, which has no other number
