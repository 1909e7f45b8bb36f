"""The flags of mixtures, in the DeepSpeed JSON too, and what they don't go with."""

import re

import pytest
from ds_json import arguments, refused, resolve

from llava_ds.config.parsing import parse_arguments
from llava_ds.constants import ConfigError
from llava_ds.engine.ds_config.parallel import with_axes
from llava_ds.engine.ds_config.resolve import axes_from
from llava_ds.extensions.active import active
from llava_ds.extensions.base import Axis
from llava_ds.extensions.mixtures.flags import Flags
from llava_ds.runtime.mesh import check_sizes

J = "in the DeepSpeed JSON"
NEEDED = ["--output_dir", "here", "--deepspeed_config", __file__]


def zero(stage: int, **keys: object) -> dict:
    return {"zero_optimization": {"stage": stage, **keys}}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num_experts", "4"], "--num_experts without --moe_enable would train a dense model"),
        (["--moe_mode", "dense", "--use_residual", "True"], "--moe_mode, --use_residual without --moe_enable"),
        (["--moe_enable", "True", "--top_k_experts", "5"], "--top_k_experts 5 must be at most --num_experts 4"),
        (
            ["--moe_enable", "True", "--tune_mm_mlp_adapter", "True"],
            "--moe_enable True, but only the projector is trained",
        ),
        (
            ["--moe_enable", "True", "--moe_mode", "dense", "--moe_layers_idx", "1"],
            "--moe_mode and --moe_layers_idx both",
        ),
        (["--moe_enable", "True", "--min_capacity", "4"], "--min_capacity has no effect without --capacity_factor"),
        (["--moe_enable", "True", "--num_experts", "1"], "--num_experts is 1: give 2 or more"),
        (["--moe_enable", "True", "--capacity_factor", "0"], "--capacity_factor is 0"),
    ],
)
def test_flags_of_experts_that_contradict_each_other_are_refused(flags, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_arguments(flags)


def test_flags_of_moe_llavas_scripts_are_read():
    flags = "--moe_enable True --num_experts 4 --top_k_experts 2 --capacity_factor 1.5 --moe_layers_idx 0 2"
    argv = [*flags.split(), "--train_modules", "gate_proj", "up_proj", "wg"]
    flags = parse_arguments(argv, to_train=False)[0].own["mixtures"]
    assert (flags.moe_layers_idx, flags.train_modules) == ("0,2", "gate_proj,up_proj,wg")
    argv = ["--moe_enable", "False", "--num_experts", "4"]  # switched off in a script
    assert "mixtures" not in parse_arguments(argv, to_train=False)[0].own  # nor refused


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--ep", ": did you mean --ep_size?"),
        ("--expert_model_parallel_size", ": did you mean --ep_size?"),
        ("--eval_capacity_factor", ": leave it out, because eval and inference drop no tokens"),
    ],
)
def test_other_trainers_flags_lead_to_what_is_meant_here(flag, says):
    with pytest.raises(ConfigError, match=re.escape(f"unknown flag {flag}{says}")):
        parse_arguments(["--output_dir", "out", "--deepspeed_config", __file__, flag, "2"])


# The JSON, flags, and the line of the error.
EP, KEY = "--ep_size is 2, ", "moe_expert_parallel_size"
OTHER_STAGE = "but DeepSpeed's expert layer works with ZeRO 0 to 2: give ds_configs/zero2.json"
OWN_SCALE = "each rank would choose its own loss scale: use bf16"
RECOMPUTED = {"activation_checkpointing": {"number_checkpoints": 4}}
WRONG = [
    ({"expert_parallel_size": 2}, {}, f'expert_parallel_size is 2 {J}: remove it, write "{KEY}": 2, which divides'),
    ({KEY: 2, **zero(2)}, {}, None),
    ({KEY: "two", **zero(2)}, {}, f'{KEY} is "two" {J}: write a whole number'),
    ({KEY: 2, **zero(2)}, {"ep_size": 4}, f'{KEY} is 2 {J} but --ep_size is 4: make them equal, or write "auto"'),
    (zero(3), {"moe_enable": True}, f"--moe_enable is True, {OTHER_STAGE}"),
    (zero(3), {"ep_size": 2}, EP + OTHER_STAGE),
    (
        {"optimizer": {"type": "AdamW", "params": {}}, **zero(2)},
        {"ep_size": 2},
        f"{EP}but expert parallelism needs torch's AdamW, set by flags (with any other, DeepSpeed averages expert "
        "norms over the ranks that share the experts): leave optimizer out of the JSON",
    ),
    (
        zero(2),
        {"optim": "adamw_8bit", "ep_size": 2},
        f"{EP}but expert parallelism needs torch's AdamW: leave out --optim",
    ),
    (
        zero(2, offload_optimizer={"device": "cpu"}),
        {"ep_size": 2},
        f"{EP}but zero_optimization.offload_optimizer steps before the gradient norm over all ranks is checked: "
        "remove it",
    ),
    (
        zero(2, compute_grad_norm=False),
        {"ep_size": 2},
        f"{EP}but expert parallelism needs the gradient norm: remove zero_optimization.compute_grad_norm",
    ),
    (
        {"fp16": {"enabled": True}, **zero(2)},
        {"ep_size": 2, "fp16": True, "device_type": "cuda"},
        f"{EP}but with fp16 {OWN_SCALE}",
    ),
    (
        {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, **zero(2)},
        {"ep_size": 2},
        f"{EP}but with torch_autocast {OWN_SCALE}",
    ),
    (
        RECOMPUTED,
        {"router_aux_loss_coef": 0.01},
        f"activation_checkpointing.number_checkpoints is set {J}, and its checkpointing keeps no gradient of the "
        "routers' choices, but --router_aux_loss_coef needs it: remove the section, and give --gradient_checkpointing "
        "all",
    ),
]


@pytest.mark.parametrize(("raw", "flags", "line"), WRONG)
def test_what_the_json_does_not_go_with_is_refused(raw, flags, line):
    try:
        resolved = resolve(raw, **flags)
        active(resolved.args.own).check(resolved)
    except ConfigError as error:
        assert line is not None and str(error).startswith(line)
    else:
        assert line is None


def test_another_trainers_key_is_answered_with_the_one_to_write():
    (line,) = refused({"ep_size": 8})
    assert 'remove it, write "moe_expert_parallel_size": 8, which divides experts over ranks' in line


def test_all_unknown_keys_are_in_one_message():
    raw = {
        "zzz": 1,
        "zero_optimization": {"stage": 2, "aaa": 1},
        "optimizer": {"type": "AdamW", "params": {"foo": 1}},
        "scheduler": {"type": "WarmupLR", "params": {"bar": 1}},
        "moe_expert_parallel_size": "many",
    }
    names = ("zzz", "zero_optimization.aaa", "optimizer.params.foo", "scheduler.params.bar")
    with pytest.raises(ConfigError) as caught:  # before ranks meet
        axes_from(raw, arguments())
    for lines in (refused(raw), str(caught.value).splitlines()):
        assert all(any(line.startswith(name) for line in lines) for name in names), lines


def test_axes_that_can_be_used_are_taken_before_ranks_meet():
    assert axes_from({"moe_expert_parallel_size": 2}, arguments()).size_of("ep") == 2


@pytest.mark.parametrize(
    ("raw", "flags", "size"),
    [
        (None, ["--ep_size", "2"], 2),
        ({}, ["--moe_expert_parallel_size", "2"], 2),
        ({"moe_expert_parallel_size": 2}, [], 2),
        ({"moe_expert_parallel_size": "auto"}, ["--ep_size", "2"], 2),
        ({"moe_expert_parallel_size": 1}, [], 1),
    ],
)
def test_flag_and_json_say_how_many_ranks_share_experts(raw, flags, size):
    assert with_axes(parse_arguments([*NEEDED, *flags])[0], raw).size_of("ep") == size


AXIS = Axis("tp", "tensor_parallel_size", 2, 2, True)


@pytest.mark.parametrize(
    ("world_size", "ep", "shared", "said"),
    [
        (6, 3, [], None),
        (6, 4, [], "--ep_size 4 does not divide 6 ranks: give one of 1, 2, 3, 6"),
        (4, 2, [AXIS], "--ep_size 2 can't be combined with ranks that share samples"),
    ],
)
def test_ranks_that_cant_share_experts_are_refused(world_size, ep, shared, said):
    axes = [*shared, Flags(ep_size=ep).axis]
    if said is None:
        check_sizes(world_size, axes)
        return
    with pytest.raises(ConfigError, match=said):
        check_sizes(world_size, axes)
