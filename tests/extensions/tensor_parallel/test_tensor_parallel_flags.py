"""The flag of tensor parallelism in flags and DeepSpeed JSON, and what can't be cut."""

import re
from types import SimpleNamespace

import pytest
import toys
from ds_json import resolve
from placements import LAYER, SHAPES, check_that_each_number_counts_once, module_of

from llava_ds.config.parsing import parse_arguments
from llava_ds.constants import ConfigError
from llava_ds.engine.ds_config.parallel import check_model, with_axes
from llava_ds.engine.ds_config.resolve import axes_from, resolve_ds_config
from llava_ds.extensions.active import active
from llava_ds.extensions.tensor_parallel.matrices import CutMatrices, rules

J = "in the DeepSpeed JSON"


def arguments(*flags: str):
    needed = ["--output_dir", "here", "--deepspeed_config", __file__]
    return parse_arguments([*needed, *flags])[0]


@pytest.mark.parametrize(
    ("raw", "flags", "size"),
    [
        (None, ["--tensor_parallel_size", "2"], 2),
        (None, ["--tp_size", "2"], 2),
        (None, ["--deepspeed_autotp_size", "2"], 2),
        ({"autotp_size": 2}, [], 2),
        ({"tp_size": 2}, [], 2),
        ({"tp": {"tp_size": 2, "tp_grain_size": 1}}, [], 2),
        ({"autotp_size": 2, "tp": {"tp_size": 1}}, ["--tp_size", "2"], 2),
        ({"autotp_size": "auto"}, ["--tp_size", "2"], 2),
        ({"autotp_size": 0}, [], 1),
        ({}, [], 1),
    ],
)
def test_flag_and_deepspeeds_section_are_one_number(raw, flags, size):
    args = arguments(*flags)
    assert with_axes(args, {"tensor_parallel": raw}).size_of("tp") == size


def test_a_section_that_is_no_object():
    with pytest.raises(ConfigError, match=r'tensor_parallel is 2 in the DeepSpeed JSON: write \{"autotp_size": 2\}'):
        with_axes(arguments(), {"tensor_parallel": 2})


@pytest.mark.parametrize(
    ("raw", "flags", "said"),
    [
        ({"tp_size": 2}, [], f'tp_size is 2 {J}: remove it, write "tensor_parallel": {{"autotp_size": 2}}'),
        ({"tp_size": True}, [], f'tp_size is true {J}: remove it, write "tensor_parallel": {{"autotp_size": N}}'),
        ({"tensor_parallel": 2}, [], f'tensor_parallel is 2 {J}: write {{"autotp_size": 2}}'),
        ({"tensor_parallel": {"tp": 2}}, [], f'tensor_parallel.tp is 2 {J}: write {{"tp_size": 2}}'),
        (
            {"tensor_parallel": {"autotp_size": "two"}},
            [],
            f'tensor_parallel.autotp_size is "two" {J}: write a whole number above 0, or "auto"',
        ),
        (
            {"tensor_parallel": {"autotp_size": 2, "tp_size": 1}},
            [],
            f"tensor_parallel.autotp_size is 2 and tensor_parallel.tp_size is 1 {J}: write one of them",
        ),
        (
            {"tensor_parallel": {"autotp_size": 2}},
            ["--tp_size", "4"],
            f'tensor_parallel.autotp_size is 2 {J} but --tensor_parallel_size is 4: make them equal, or write "auto"',
        ),
        (
            {"tensor_parallel": {"autotp_size": 2, "tp": {"mpu": {"a": 1}}}},
            [],
            f'tensor_parallel.tp.mpu is {{"a": 1}} {J}: remove it, it is an object of Megatron\'s',
        ),
        (
            {"tensor_parallel": {"tp_size": 2, "tp_grain_size": 64}},
            [],
            f"tensor_parallel.tp_grain_size is 64 {J}: remove it, matrices are cut into equal parts, by heads",
        ),
        (
            {"tensor_parallel": {"autotp_size": 2, "partition_config": {}}},
            [],
            f"tensor_parallel.partition_config is {{}} {J}: remove it, which matrices are cut follows from the model",
        ),
        (
            {"tensor_parallel": {"autotp_size": 2, "tp_overlap_comm": True}},
            [],
            f"tensor_parallel.tp_overlap_comm is true {J}: remove it, DeepSpeed 0.19.8 gets",
        ),
        (
            {"tensor_parallel": {"autotp_size": 2, "size": 2}},
            [],
            f'tensor_parallel.size is 2 {J}: remove it, write {{"autotp_size": 2}} alone',
        ),
    ],
)
def test_what_the_json_says_wrong_is_refused(raw, flags, said):
    with pytest.raises(ConfigError) as refused:
        resolve_ds_config(raw, arguments(*flags), dp=1, hidden_size=32)
    lines = str(refused.value).splitlines()
    assert any(line.startswith(said) for line in lines), lines


@pytest.mark.parametrize(
    "nothing",
    [
        {"tp_size": 1},
        {"tensor_parallel": {"tp_size": 1}},
        {"tensor_parallel": {"autotp_size": 0, "enabled": False}},
        {"tensor_parallel": {"autotp_size": 1, "tp_grain_size": 1, "tp": {"tp_size": 1, "mpu": None}}},
        {"tensor_parallel": {"autotp_size": "auto"}},
        {"tensor_parallel": {"autotp_size": 1, "tp_size": 1}},
    ],
)
def test_a_json_that_asks_for_nothing_is_taken(nothing):
    assert axes_from(nothing, arguments()).size_of("tp") == 1
    assert "tensor_parallel" not in resolve(nothing).config


def test_all_keys_of_the_section_that_mean_something_else_are_named():
    with pytest.raises(ConfigError) as refused:
        axes_from({"tensor_parallel": {"autotp_size": 2, "qqq": 1, "rrr": 2}}, arguments())
    lines = str(refused.value).splitlines()
    assert [line.partition(" is ")[0] for line in lines] == ["tensor_parallel.qqq", "tensor_parallel.rrr"]
    assert all(line.endswith('write {"autotp_size": 2} alone') for line in lines)


@pytest.mark.parametrize("name", ["--tensor_model_parallel_size", "--tp"])
def test_other_trainers_names_lead_to_ours(name):
    with pytest.raises(ConfigError, match=rf"{name}: did you mean --tensor_parallel_size\?"):
        arguments(name, "2")


def test_two_ranks_have_every_number_once():
    own = {name: list(shape) for name, shape in SHAPES.items()}
    for name, dim in (("q_proj.weight", 0), ("q_proj.bias", 0), ("o_proj.weight", 1)):
        own[f"{LAYER}.self_attn.{name}"][dim] //= 2
    check_that_each_number_counts_once([(CutMatrices("tp", 2, index), module_of(own)) for index in range(2)])


def test_every_reason_against_cut_matrices_is_given_at_once():
    llama = toys.language_model_config("llama", attention_dropout=0.1)
    with pytest.raises(ConfigError) as caught:
        check_model(arguments("--tp_size", "3"), llama)
    lines = str(caught.value).splitlines()
    assert all(line.startswith("--tensor_parallel_size is 3: ") for line in lines)
    reasons = (
        "4 heads, with 2 of keys, can't be divided over 3 ranks: give 1, 2",
        "attention_dropout is 0.1 in its config.json",
        "q_proj.weight can't be divided into 3 parts",
    )
    assert len(lines) == len(reasons) and all(reason in line for reason, line in zip(reasons, lines))


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (
            {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}},
            "hpz_partition_size makes its own groups of ranks",
        ),
        ({"compile": {"deepcompile": True}}, "compile.deepcompile cuts matrices by its own rules"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/tmp"}}},
            'zero_optimization.offload_param.device is "nvme", an untested combination: write "cpu"',
        ),
        ({"optimizer": {"type": "lamb", "params": {"lr": 0.1}}}, "Lamb's updates depend on a layer's norm"),
        (
            {"optimizer": {"type": "Muon", "params": {"lr": 0.1}}},
            "Muon's updates depend on whole matrices, and no rank has these",
        ),
        ({"optimizer": {"type": "Adafactor", "params": {"lr": 0.1}}}, "Adafactor's updates depend on a matrix's rows"),
    ],
)
def test_what_does_not_go_with_cut_matrices(raw, said):
    resolved = SimpleNamespace(config=raw, args=arguments("--tp_size", "2"))
    with pytest.raises(ConfigError) as caught:
        active(["tensor_parallel"]).check(resolved)
    (line,) = str(caught.value).splitlines()
    assert said in line and line.startswith("--tensor_parallel_size is 2, but ")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "granite"])
def test_families_whose_matrices_are_cut(family):
    check_model(arguments("--tp_size", "2"), toys.language_model_config(family))


@pytest.mark.parametrize(
    ("family", "found"),
    [
        ("phi3", "qkv_proj.weight"),
        ("gpt2", "other names"),
        ("opt", "out_proj.weight"),
        ("mixtral", "mlp.gate.weight"),
        ("olmoe", "q_norm.weight"),
    ],
)
def test_families_that_are_not_cut_are_refused_by_name(family, found):
    with pytest.raises(ConfigError, match=rf"the language model's layers have .*{found}, but only self_attn"):
        check_model(arguments("--tp_size", "2"), toys.language_model_config(family))


def test_deepspeed_cuts_by_rules_of_this_trainer():
    own = rules(2)
    assert own["autotp_size"] == 2 and own["partition_config"]["use_default_specs"] is False
    specs = own["partition_config"]["layer_specs"]
    layer = "language_model.model.layers.3."
    kinds = {
        f"{layer}self_attn.q_proj.weight": "column",
        f"{layer}mlp.up_proj": "column",
        f"{layer}self_attn.o_proj": "row",
        f"{layer}mlp.down_proj.weight": "row",
        f"{layer}self_attn.k_norm.weight": "skip",
    }
    for name, kind in kinds.items():
        assert [rule["partition_type"] for rule in specs if re.match(rule["patterns"][0], name)] == [kind], name
    for name in ("vision_tower.tower.vision_model.encoder.layers.0.self_attn.q_proj", "language_model.lm_head"):
        assert not any(re.match(rule["patterns"][0], name) for rule in specs), name
