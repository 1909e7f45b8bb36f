"""The flag of sequence parallelism in flags, DeepSpeed JSON and messages, and what can't be shared out."""

import importlib.util
import json
from pathlib import Path

import pytest
import toys
from ds_json import arguments as flags_of
from extension_there import if_there, needs_extension
from transformers import AutoConfig

from llava_ds.checkpoint.comparison import data_ranks
from llava_ds.config.parsing import parse_arguments
from llava_ds.constants import ConfigError
from llava_ds.engine.ds_config.parallel import check_model, with_axes
from llava_ds.engine.ds_config.resolve import axes_from
from llava_ds.extensions.sequence_parallel.flags import Flags


def arguments(*flags: str):
    needed = ["--output_dir", "here", "--deepspeed_config", __file__]
    return parse_arguments([*needed, *flags])[0]


@pytest.mark.parametrize(
    ("raw", "flags", "size"),
    [
        (None, [], 1),
        ({}, ["--sequence_parallel_size", "4"], 4),
        ({}, ["--sp_size", "4"], 4),
        ({"sequence_parallel_size": 1}, ["--sp_size", "1"], 1),
        ({"sequence_parallel_size": "auto"}, ["--sp_size", "4"], 4),
        ({"sequence_parallel_size": 4}, [], 4),
        ({"sequence_parallel_size": 4}, ["--sp_size", "4"], 4),
        ({"sequence_parallel_size": 1}, [], 1),
        ({"sequence_parallel_size": None}, [], 1),
    ],
)
def test_flag_and_json_are_one_number(raw, flags, size):
    assert with_axes(arguments(*flags), raw).size_of("sp") == size


@pytest.mark.parametrize("value", [0, -2, 2.0, True, "two", [2], 10**30])
def test_what_is_no_size_is_refused(value):
    with pytest.raises(ConfigError, match=r"sequence_parallel_size is .* in the DeepSpeed JSON: write a whole number"):
        with_axes(arguments(), {"sequence_parallel_size": value})


def test_two_sizes_are_refused():
    with pytest.raises(ConfigError, match="2 in the DeepSpeed JSON but --sequence_parallel_size is 4: make them equal"):
        with_axes(arguments("--sp_size", "4"), {"sequence_parallel_size": 2})

    with pytest.raises(ConfigError, match="2 in the DeepSpeed JSON but --sequence_parallel_size is 1: make them equal"):
        with_axes(arguments("--sp_size", "1"), {"sequence_parallel_size": 2})


def test_every_problem_of_the_json_is_named_with_its_size():
    with pytest.raises(ConfigError) as refused:
        axes_from({"sequence_parallel_size": True, "train_batchsize": 4, "sequence_paralel_size": 2}, arguments())
    lines = sorted(str(refused.value).splitlines())
    assert lines[0].startswith("sequence_paralel_size in the DeepSpeed JSON is not a")
    assert "did you mean sequence_parallel_size?" in lines[0]
    assert lines[1].startswith("sequence_parallel_size is true in the DeepSpeed JSON: write a whole number")
    assert lines[2].startswith("train_batchsize")


def test_other_trainers_names_lead_to_ours():
    with pytest.raises(ConfigError, match=r"--context_parallel_size: did you mean --sequence_parallel_size\?"):
        arguments("--context_parallel_size", "2")
    for name in ("cp_size", "context_parallel_size"):
        said = f'{name} is 4 in the DeepSpeed JSON: remove it, write "sequence_parallel_size": 4, which divides'
        with pytest.raises(ConfigError, match=said):
            axes_from({name: 4, "sequence_parallel_size": "x"}, arguments())


@needs_extension("preference")
def test_a_size_in_the_json_meets_what_flags_need():
    flags = ("--objective", "reward", "--data_path", __file__)
    with pytest.raises(ConfigError, match="--objective reward needs all tokens of a sample on one rank"):
        with_axes(arguments(*flags), {"sequence_parallel_size": 2})


def test_ranks_with_the_same_samples_are_counted_in_a_saved_identity():
    saved = {"world_size": 8, "flags": {"sequence_parallel_size": 4, "learning_rate": 1e-3}}
    assert data_ranks(saved) == 2 and data_ranks({"world_size": 8, "flags": {}}) == 8


def test_more_ranks_for_a_sample_are_advised_where_it_is_alone():
    alone = flags_of(sequence_parallel_size=2)
    (line,) = Flags.saving_memory(alone, 20, is_one_sample=True)
    assert line.startswith("--sequence_parallel_size 4, on several GPUs")
    routed = flags_of(**if_there("mixtures", moe_enable=True))
    for args, is_one_sample in ((alone, False), *(((routed, True),) if routed.broken else ())):
        assert list(Flags.saving_memory(args, 20, is_one_sample=is_one_sample)) == []


def test_heads_that_cannot_be_shared_out():
    llama = toys.language_model_config("llama")  # 4 heads, 2 of keys
    for size in ("1", "2", "4"):
        check_model(arguments("--sp_size", size), llama)
    reason = "--sequence_parallel_size is 3: .* 4 heads, with 2 of keys, can't be divided over 3 ranks: give 1, 2, 4"
    with pytest.raises(ConfigError, match=reason):
        check_model(arguments("--sp_size", "3"), llama)


def test_heads_that_differ_between_layers():
    config = AutoConfig.for_model(
        "gemma4_text", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], hidden_size=48,
        num_attention_heads=6, num_key_value_heads=3, num_global_key_value_heads=2, attention_k_eq_v=True,
    )  # fmt: skip
    check_model(arguments("--sp_size", "6"), config)
    with pytest.raises(ConfigError, match="6 heads, with 2 of keys, can't be divided over 3 ranks: give 1, 2, 6"):
        check_model(arguments("--sp_size", "3"), config)


def test_heads_of_layers_with_a_state_that_cannot_be_shared_out():
    config = AutoConfig.for_model(
        "qwen3_5_text", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], hidden_size=32,
        num_attention_heads=8, num_key_value_heads=8, linear_num_key_heads=2, linear_num_value_heads=4,
    )  # fmt: skip
    check_model(arguments("--sp_size", "2"), config)
    with pytest.raises(ConfigError, match="layers with a state have 2 and 4 heads of keys and values: give a divisor"):
        check_model(arguments("--sp_size", "4"), config)


@needs_extension("tensor_parallel")
def test_heads_that_are_cut_and_exchanged():
    with pytest.raises(ConfigError, match="--sequence_parallel_size is 4, and --tensor_parallel_size 2 leaves"):
        check_model(arguments("--tp_size", "2", "--sp_size", "4"), toys.language_model_config("llama"))
    check_model(arguments("--tp_size", "2", "--sp_size", "2"), toys.language_model_config("llama"))


@needs_extension("planning")
def test_the_estimate_takes_the_size_from_the_json(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("estimate", Path(__file__).parents[3] / "run" / "estimate.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    written = tmp_path / "shared.json"
    written.write_text(json.dumps({"zero_optimization": {"stage": 3}, "sequence_parallel_size": 4}))
    flags = ["--model", "llava-v1.5-7b", "--deepspeed_config", str(written), "--json", "--num_gpus"]
    found = []
    for more in ([], ["--sequence_parallel_size", "4"]):
        script.main([*flags, "8", *more])
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1] and found[0]["setup"]["sp"] == 4
    with pytest.raises(ConfigError, match="--sequence_parallel_size 4 does not divide 6 ranks: give one of 1, 2, 3, 6"):
        script.main([*flags, "6"])
