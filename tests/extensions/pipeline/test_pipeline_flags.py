"""The flag of pipeline parallelism in flags and DeepSpeed JSON, and what can't be cut into stages."""

from types import SimpleNamespace

import pytest
import torch
import toys
from ds_json import resolve
from extension_there import needs_extension
from placements import SHAPES, check_owners, check_that_each_number_counts_once, module_of

from llava_ds.config.parsing import parse_arguments
from llava_ds.constants import ConfigError
from llava_ds.engine.ds_config.parallel import check_model, with_axes
from llava_ds.engine.ds_config.resolve import axes_from
from llava_ds.engine.placement import Share
from llava_ds.extensions.active import active
from llava_ds.extensions.pipeline.flags import Flags
from llava_ds.extensions.pipeline.stage_runner import OwnedByStages
from llava_ds.extensions.pipeline.stages import check_layers, layers_of_stages
from llava_ds.extensions.table import EXTENSIONS
from llava_ds.train.early_flags import read_flags

J = "in the DeepSpeed JSON"


def arguments(*flags: str):
    needed = ["--output_dir", "here", "--deepspeed_config", __file__]
    return parse_arguments([*needed, *flags])[0]


@pytest.mark.parametrize(
    ("raw", "flags", "size"),
    [
        (None, ["--pipeline_parallel_size", "2"], 2),
        (None, ["--pp_size", "2"], 2),
        ({"stages": 2}, [], 2),
        ({"stages": 2, "partition": "best", "seed_layers": False}, ["--pp_size", "2"], 2),
        ({"stages": "auto"}, ["--pp_size", "2"], 2),
        ({"stages": 1}, [], 1),
        ({}, [], 1),
    ],
)
def test_flag_and_the_section_of_a_pipeline_are_one_number(raw, flags, size):
    assert with_axes(arguments(*flags), {"pipeline": raw}).size_of("pp") == size


@pytest.mark.parametrize(
    ("raw", "flags", "said"),
    [
        (
            {"pipeline_model_parallel_size": 2},
            [],
            f'pipeline_model_parallel_size is 2 {J}: remove it, write "pipeline": {{"stages": 2}}',
        ),
        ({"pipeline": 2}, [], f'pipeline is 2 {J}: write {{"stages": 2}}'),
        ({"pipeline": {"stages": "two"}}, [], f'pipeline.stages is "two" {J}: write a whole number above 0, or "auto"'),
        (
            {"pipeline": {"stages": 2}},
            ["--pp_size", "4"],
            f'pipeline.stages is 2 {J} but --pipeline_parallel_size is 4: make them equal, or write "auto"',
        ),
        (
            {"pipeline": {"stages": 2, "partition": "parameters"}},
            [],
            f'pipeline.partition is "parameters" {J}: remove it, stages are cut to equal FLOPs',
        ),
        (
            {"pipeline": {"stages": 2, "micro_batches": 4}},
            [],
            f'pipeline.micro_batches is 4 {J}: remove it, write {{"stages": 2}} alone',
        ),
    ],
)
def test_what_the_json_says_wrong_is_refused_before_ranks_meet(raw, flags, said):
    with pytest.raises(ConfigError) as refused:
        axes_from(raw | {"pipeline": {"stages": 0}, **raw}, arguments(*flags))
    lines = str(refused.value).splitlines()
    assert any(line.startswith(said) for line in lines), lines


@pytest.mark.parametrize(
    "nothing",
    [
        {"pipeline": {"stages": 1}},
        {"pipeline": {"stages": "auto", "partition": "best"}},
        {"pipeline_model_parallel_size": 1},
    ],
)
def test_a_json_that_asks_for_nothing_is_taken(nothing):
    assert axes_from(nothing, arguments()).size_of("pp") == 1
    assert "pipeline" not in resolve(nothing).config


def test_other_trainers_names_lead_to_ours():
    with pytest.raises(ConfigError, match=r"--pipeline_model_parallel_size: did you mean --pipeline_parallel_size\?"):
        arguments("--pipeline_model_parallel_size", "2")


def test_frozen_layers_leave_a_stage_without_trained_weights():
    with pytest.raises(ConfigError, match=r"needs a language model whose .* which --unfreeze_topk_llm 2 takes away"):
        arguments("--unfreeze_topk_llm", "2", "--freeze_backbone", "True", "--pp_size", "2")


def test_more_stages_are_advised_where_there_are_some():
    (line,) = Flags.saving_memory(arguments("--pp_size", "2"), 20, is_one_sample=False)
    assert line.startswith("--pipeline_parallel_size 4: ")
    assert list(Flags.saving_memory(arguments(), 20, is_one_sample=True)) == []


def test_two_stages_have_every_number_once():
    owners = {name: min(number // 4, 1) for number, name in enumerate(SHAPES)}
    everything = tuple(Share(name, shape, torch.float32, owner=owners[name]) for name, shape in SHAPES.items())
    of_stage = [{name: SHAPES[name] for name in SHAPES if owners[name] == index} for index in range(2)]
    ranks = [(OwnedByStages("pp", 2, i, everything=everything), module_of(own)) for i, own in enumerate(of_stage)]
    check_that_each_number_counts_once(ranks)
    check_owners(ranks)


PP = "--pipeline_parallel_size 2"
PAIRS = {  # by extension: the flag that needs something, and the flag that takes it
    "compile": ("--torch_compile True", PP),
    "auto_layers": ("--gradient_checkpointing auto", PP),
    "lora": (PP, "--lora_enable True"),
}
PAIRS = {name: pair for name, pair in PAIRS.items() if name in EXTENSIONS}


@pytest.mark.skipif(not PAIRS, reason="there is none of these extensions")
def test_every_pair_of_a_command_line_is_named():
    others = [flag for pair in PAIRS.values() for flag in pair if flag != PP]
    with pytest.raises(ConfigError) as caught:
        arguments(*" ".join([PP, *others]).split())
    lines = str(caught.value).splitlines()
    pairs = [(line.split(" needs ")[0], line.split(", which ")[1].split(" takes ")[0]) for line in lines]
    assert sorted(pairs) == sorted(PAIRS.values())


def test_the_first_stage_has_the_layers_that_the_tower_feeds():
    assert layers_of_stages(100, 10, 0, 12, 3) == [1, 5, 6]
    assert layers_of_stages(100, 10, 0, 12, 3, 4) == [4, 4, 4]
    assert layers_of_stages(0, 10, 0, 5, 3, 3) == [3, 1, 1]
    fed = SimpleNamespace(fed_layers=3)
    check_layers(5, fed, 3)
    with pytest.raises(ConfigError, match=r"first 3 layers, .*: with 5 layers give 3 or fewer"):
        check_layers(5, fed, 4)


def test_more_stages_than_layers():
    with pytest.raises(ConfigError, match="--pipeline_parallel_size is 3: the language model has 2 layers"):
        check_model(arguments("--pp_size", "3"), toys.language_model_config("llama"))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen2_5", "qwen3", "mistral", "phi3"])
def test_families_whose_layers_are_cut_into_stages(family):
    check_model(arguments("--pp_size", "2"), toys.language_model_config(family))


@pytest.mark.parametrize(
    ("family", "found"),
    [
        ("gpt2", "names of layers"),
        ("granite", "trunk changes the inputs or outputs of its layers"),
        ("mixtral", "stages don't exchange the routers' loss or experts"),
    ],
)
def test_families_that_are_not_cut_into_stages(family, found):
    with pytest.raises(ConfigError, match=found):
        check_model(arguments("--pp_size", "2"), toys.language_model_config(family))


@needs_extension("mixtures")
def test_an_upcycled_folder_is_not_cut_into_stages():
    config = toys.language_model_config("llama")
    config.moe = {"moe_layers_idx": [0], "num_experts": 4, "top_k_experts": 2, "use_residual": False}
    with pytest.raises(ConfigError, match="stages don't exchange the routers' loss or experts"):
        check_model(arguments("--pp_size", "2"), config)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage is 2, at which ranks would send gradients"),
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage is 3, at which ranks would gather a stage's"),
        (
            {
                "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
                "zero_force_ds_cpu_optimizer": False,
            },
            'zero_optimization.offload_optimizer.device is "cpu", an untested combination',
        ),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "torch_autocast is on"),
        ({"compile": {"deepcompile": True}}, "compile.deepcompile traces a whole model"),
    ],
)
def test_what_does_not_go_with_stages(raw, said):
    resolved = SimpleNamespace(config=raw, args=arguments("--pp_size", "2"))
    with pytest.raises(ConfigError) as caught:
        active(["pipeline"]).check(resolved)
    (line,) = str(caught.value).splitlines()
    assert said in line and line.startswith("--pipeline_parallel_size is 2, but ")


def test_the_reason_comes_before_missing_flags(tmp_path):
    base = [word for name, value in toys.write_base(tmp_path).items() for word in (f"--{name}", str(value))]
    flags = ["--deepspeed_config", "zero1", "--output_dir", "out", "--data_path", __file__, *base]
    with pytest.raises(ConfigError) as caught:
        read_flags([*flags, "--pipeline_parallel_size", "99", "--eval_data_split", "x"])
    layers, asked = str(caught.value).splitlines()
    assert layers.startswith("--pipeline_parallel_size is 99: the language model has ")
    assert asked.startswith("--eval_data_split ")
