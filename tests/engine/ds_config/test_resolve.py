"""The DeepSpeed JSON as a contract: filled by Hugging Face's formulas, or refused with every reason at once."""

import json
import os
import random
from types import SimpleNamespace

import pytest
import torch
from ds_json import CONFIGS, H, arguments, refused, resolve

from llava_ds.config.parsing import parse_arguments
from llava_ds.constants import ConfigError
from llava_ds.engine.ds_config.resolve import read_ds_config, resolve_ds_config
from llava_ds.engine.start import check_engine
from llava_ds.runtime.mesh import Mesh


def has_auto(value: object) -> bool:
    if isinstance(value, (dict, list)):
        return any(map(has_auto, value.values() if isinstance(value, dict) else value))
    return value == "auto"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_auto_of_our_files_is_filled(stage):
    raw = read_ds_config(CONFIGS / f"zero{stage}.json")
    assert has_auto(raw)
    config = resolve(raw, bf16=True, per_device_train_batch_size=4, gradient_accumulation_steps=3, dp=2).config
    assert not has_auto(config)
    assert config["zero_optimization"]["stage"] == stage
    assert config["bf16"]["enabled"] is True and config["fp16"]["enabled"] is False


def test_the_filled_values_are_hugging_faces():
    two = resolve({"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}).config["zero_optimization"]
    assert two["reduce_bucket_size"] == H * H
    three = resolve(read_ds_config(CONFIGS / "zero3.json")).config["zero_optimization"]
    assert three["stage3_prefetch_bucket_size"] == int(0.9 * H * H) == 2073
    assert three["stage3_param_persistence_threshold"] == 10 * H
    assert all(isinstance(three[key], int) for key in three if key.startswith(("reduce_b", "stage3_p")))


def test_what_the_json_says_stays_and_the_file_as_read_is_untouched():
    raw = {"zero_optimization": {"stage": 3, "reduce_bucket_size": 5, "sub_group_size": 7}, "steps_per_print": 3}
    before = json.dumps(raw)
    config = resolve(raw).config
    assert json.dumps(raw) == before
    zero = config["zero_optimization"]
    assert (zero["reduce_bucket_size"], zero["sub_group_size"], config["steps_per_print"]) == (5, 7, 3)
    assert "stage3_prefetch_bucket_size" not in zero  # absent is not auto


def test_explain_names_every_filled_value_and_why():
    resolved = resolve(read_ds_config(CONFIGS / "zero3.json"), bf16=True)
    text = "\n".join(resolved.explain())
    for key in ("bf16.enabled", "gradient_clipping", "train_batch_size", "stage3_prefetch_bucket_size"):
        assert key in text
    assert f"hidden size squared ({H})" in text and "--bf16" in text


WHOLE = {
    "bf16": {"enabled": False},
    "fp16": {"enabled": False},
    "gradient_clipping": 0.0,
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 1,
    "timers": {"throughput": {"enabled": False}},
    "zero_optimization": {"stage": 2},
}


def test_a_json_that_leaves_nothing_to_fill_resolves_to_itself():
    resolved = resolve(WHOLE)
    assert resolved.config == WHOLE and resolved.reasons == {}
    assert resolved.explain() == []


@pytest.mark.parametrize("raw", [{}, {"gradient_clipping": "auto"}, {"gradient_clipping": 0.5}])
def test_gradient_clipping_is_always_written(raw):
    resolved = resolve(raw)
    expected = raw.get("gradient_clipping") if raw.get("gradient_clipping") != "auto" else None
    assert resolved.config["gradient_clipping"] == (expected or 0.0) == resolved.args.training.max_grad_norm
    assert resolve({}, max_grad_norm=1.5).config["gradient_clipping"] == 1.5


def test_values_of_the_json_are_taken_over_into_flags_that_were_not_given():
    raw = {
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "gradient_clipping": 0.3,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 5,
    }
    training = resolve(raw, dp=3).args.training
    assert (training.bf16, training.max_grad_norm) == (True, 0.3)
    assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (2, 5)
    assert training.train_batch_size == 30


def test_all_conflicts_come_in_one_error_with_flag_key_and_both_values():
    raw = {
        "bf16": {"enabled": False},
        "gradient_clipping": 0.25,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 3,
        "train_batch_size": 96,
    }
    flags = {
        "bf16": True,
        "max_grad_norm": 0.75,
        "per_device_train_batch_size": 5,
        "gradient_accumulation_steps": 7,
        "train_batch_size": 99,
    }
    lines = refused(raw, **flags)
    assert len(lines) == 5
    for key, flag, in_json, given in (
        ("bf16.enabled", "bf16", "false", "True"),
        ("gradient_clipping", "max_grad_norm", "0.25", "0.75"),
        ("train_micro_batch_size_per_gpu", "per_device_train_batch_size", "4", "5"),
        ("gradient_accumulation_steps", "gradient_accumulation_steps", "3", "7"),
        ("train_batch_size", "train_batch_size", "96", "99"),
    ):
        expected = f'{key} is {in_json} in the DeepSpeed JSON but --{flag} is {given}: make them equal, or write "auto"'
        assert expected in lines


def test_equal_values_in_json_and_flags_are_no_conflict():
    raw = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}, "gradient_clipping": 1.0}
    raw["train_micro_batch_size_per_gpu"] = 4
    config = resolve(raw, bf16=True, max_grad_norm=1, per_device_train_batch_size=4).config
    assert config["train_batch_size"] == 4


def test_a_flag_spelled_with_hyphens_conflicts_too():
    argv = ["--max-grad-norm", "0.75", "--output_dir", "out", "--deepspeed_config", str(CONFIGS / "zero2.json")]
    with pytest.raises(ConfigError, match=r"gradient_clipping is 0\.25"):
        resolve_ds_config({"gradient_clipping": 0.25}, parse_arguments(argv)[0], dp=1, hidden_size=H)


def test_a_conflict_elsewhere_says_nothing_false_about_the_batch():
    raw = read_ds_config(CONFIGS / "zero2.json") | {"bf16": {"enabled": False}}
    assert [line.split()[0] for line in refused(raw, bf16=True)] == ["bf16.enabled"]
    raw = read_ds_config(CONFIGS / "zero2.json") | {"train_batch_size": 7}
    assert [line.split()[0] for line in refused(raw, dp=2)] == ["train_batch_size"]


def test_a_conflict_elsewhere_does_not_hide_one_of_the_batch():
    lines = refused({"bf16": {"enabled": False}, "train_batch_size": 7}, bf16=True, dp=2)
    assert [line.split()[0] for line in lines] == ["bf16.enabled", "train_batch_size"]


# (train_batch_size, per_device_train_batch_size, gradient_accumulation_steps) as given; ranks; the same as resolved.
BATCHES = [
    ((None, None, None), 1, (8, 8, 1)),
    ((None, None, None), 3, (24, 8, 1)),
    ((None, 4, None), 2, (8, 4, 1)),
    ((None, None, 3), 2, (48, 8, 3)),
    ((None, 2, 3), 2, (12, 2, 3)),
    ((16, None, None), 1, (16, 8, 2)),
    ((4, None, None), 2, (4, 2, 1)),
    ((12, None, 3), 2, (12, 2, 3)),
    ((12, 3, None), 2, (12, 3, 2)),
    ((12, 3, 2), 2, (12, 3, 2)),
]


@pytest.mark.parametrize("written_in", ["flags", "json"])
@pytest.mark.parametrize(("given", "ranks", "expected"), BATCHES)
def test_batch_arithmetic(given, ranks, expected, written_in):
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    flags = ("train_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps")
    names = flags if written_in == "flags" else keys
    values = {name: value for name, value in zip(names, given) if value is not None}
    raw, given_flags = ({}, values) if written_in == "flags" else (values, {})
    resolved = resolve(raw, dp=ranks, **given_flags)
    assert tuple(resolved.config[key] for key in keys) == expected
    assert tuple(resolved.args.as_dict()[flag] for flag in flags) == expected


def test_the_micro_batch_flag_is_an_upper_bound_under_a_given_total():
    for ranks, expected in ((1, (5, 4)), (2, (5, 2)), (4, (5, 1))):
        training = resolve({}, dp=ranks, train_batch_size=20, per_device_train_batch_size=6).args.training
        assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == expected


def test_two_given_numbers_win_over_a_default_total():
    argv = ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2", "--output_dir", "out"]
    args = parse_arguments(
        [*argv, "--deepspeed_config", str(CONFIGS / "zero2.json")], defaults={"train_batch_size": 48}
    )[0]
    assert resolve_ds_config({}, args, dp=1, hidden_size=H).config["train_batch_size"] == 8


def test_a_batch_that_does_not_come_out_is_refused():
    assert refused({}, train_batch_size=7, dp=2)[0].startswith(
        "train_batch_size is 7, but 2 ranks can't share it evenly: give 6 or 8"
    )
    assert "give 4, or" in refused({}, train_batch_size=3, dp=4)[0]
    lines = refused({}, train_batch_size=20, per_device_train_batch_size=3, gradient_accumulation_steps=2)
    assert lines[0].startswith(
        "train_batch_size is 20, but 3 samples per micro-batch x 2 micro-batches x 1 ranks are 6"
    )
    for wrong in (0, -1, 2.5, "8", True):
        line = refused({"train_batch_size": wrong})[0]
        assert line.startswith(f"train_batch_size is {json.dumps(wrong)} in the DeepSpeed JSON: write a whole number")


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (
            {"zero_optimization": {"stage": "auto"}},
            'zero_optimization.stage is "auto" in the DeepSpeed JSON: write 0, 1, 2 or 3',
        ),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage is 4 in the DeepSpeed JSON: write 0, 1, 2 or 3"),
        ({"zero_optimization": 3}, "zero_optimization is 3 in the DeepSpeed JSON: write an object with stage, "),
        ({"bf16": True}, "bf16 is true in the DeepSpeed JSON: write an object with enabled, "),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "bf16.enabled and fp16.enabled are both true"),
        (
            {"flops_profiler": {"top_modules": "auto"}},
            'flops_profiler.top_modules is "auto", but Hugging Face',
        ),
    ],
)
def test_a_json_that_can_not_be_used_is_refused(raw, expected):
    assert any(line.startswith(expected) for line in refused(raw))


def test_float16_without_a_gpu_is_refused():
    assert any(line.startswith("fp16 is on, but there is no GPU") for line in refused({}, fp16=True))
    assert any(line.startswith("fp16 is on, but there is no GPU") for line in refused({"fp16": {"enabled": True}}))


def test_one_precision_in_the_json_and_the_other_as_a_flag_is_refused():
    assert any("both true" in line for line in refused({"bf16": {"enabled": True}}, fp16=True))


@pytest.mark.parametrize(
    "raw",
    [
        {"bf16": {"enabled": "yes"}},
        {"fp16": {"enabled": 3}},
        {"gradient_clipping": "some"},
        {"gradient_clipping": -1.0},
        {"gradient_clipping": [1]},
        {"timers": True},
        {"timers": {"throughput": "auto"}},
        {"zero_optimization": {"stage": [2]}},
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_before_deepspeed_sees_it(raw):
    key = next(iter(raw))
    assert any(line.startswith(key) for line in refused(raw))


def test_a_file_that_is_no_json_object_is_refused(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match="can't be read as JSON"):
        read_ds_config(path)
    path.write_text("[1]")
    with pytest.raises(ConfigError, match="holds a list: expected a JSON object"):
        read_ds_config(path)
    with pytest.raises(ConfigError, match="can't be read as JSON"):
        read_ds_config(tmp_path / "missing.json")
    for name, problem in (("pipe", "a named pipe"), ("zeros", "a device")):  # neither waits nor fills the memory
        other = tmp_path / name
        os.mkfifo(other) if name == "pipe" else other.symlink_to("/dev/zero")
        with pytest.raises(ConfigError, match=f"{name} can't be read as JSON: it is {problem}, expected a file"):
            read_ds_config(other)


def test_any_combination_resolves_without_auto_or_is_refused():
    rng = random.Random(0)
    base = arguments()
    outcomes = {"resolved": 0, "refused": 0}

    def maybe(options: list) -> dict:
        """A random choice per key; None leaves the key out."""
        drawn = {key: rng.choice(values) for key, values in options}
        return {key: value for key, value in drawn.items() if value is not None}

    numbers = [None, "auto"] * 6 + [1, 2, 4, 6, 8, 12]
    for _ in range(800):
        raw = maybe(
            [
                ("train_batch_size", numbers),
                ("train_micro_batch_size_per_gpu", numbers),
                ("gradient_accumulation_steps", numbers),
                ("gradient_clipping", [None, "auto", 0.0, 1.0]),
                ("optimizer", [None] * 19 + [{"type": "Adam"}]),
            ]
        )
        for section in ("bf16", "fp16"):
            if rng.random() < 0.7:
                raw[section] = maybe([("enabled", [None, "auto", "auto", "auto", True, False])])
        if rng.random() < 0.9:
            bucket = [None, "auto", 1000]
            raw["zero_optimization"] = maybe(
                [("stage", [None, 0, 1, 2, 3]), ("reduce_bucket_size", bucket), ("stage3_prefetch_bucket_size", bucket)]
            )
        flags = maybe(
            [
                ("train_batch_size", [None, None, None, 12, 24]),
                ("per_device_train_batch_size", [None, None, None, 1, 2, 6]),
                ("gradient_accumulation_steps", [None, None, None, 1, 2, 3]),
                ("max_grad_norm", [None, 0.0, 1.0]),
                ("bf16", [None, None, True, False]),
            ]
        )
        args = base.replaced(**flags)
        args = type(args)(args.model, args.data, args.training, base.given | set(flags))
        ranks = rng.choice([1, 2, 3, 4])
        try:
            resolved = resolve_ds_config(raw, args, dp=ranks, hidden_size=H)
        except ConfigError as error:
            outcomes["refused"] += 1
            assert str(error).strip() and "don't fill it in" not in str(error)
            continue
        outcomes["resolved"] += 1
        config, training = resolved.config, resolved.args.training
        assert not has_auto(config)
        micro, accumulation = config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
        assert config["train_batch_size"] == micro * accumulation * ranks == training.train_batch_size
        assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (micro, accumulation)
        for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
            assert raw.get(key, "auto") in ("auto", config[key])
        for flag in set(flags) - {"per_device_train_batch_size"}:
            assert resolved.args.as_dict()[flag] == flags[flag]
        assert micro <= flags.get("per_device_train_batch_size", micro)
        assert training.max_grad_norm == config["gradient_clipping"]
        assert training.bf16 == config["bf16"]["enabled"]
    assert min(outcomes.values()) > 130


def test_what_the_engine_understood_is_compared_with_what_was_meant():
    resolved = resolve({"zero_optimization": {"stage": 2}}, bf16=True, max_grad_norm=1.0)
    understood = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 1,
        "zero_optimization_stage": 2,
        "gradient_clipping": 1.0,
        "get_data_types": (torch.bfloat16, torch.float32),
        "torch_autocast_enabled": False,
        "zero_offload_optimizer": None,
        "zero_offload_param": SimpleNamespace(device="none"),
    }

    def engine(ranks: int = 1, **changed: object) -> SimpleNamespace:
        methods = {name: lambda v=v: v for name, v in (understood | changed).items()}
        return SimpleNamespace(dp_world_size=ranks, **methods)

    check_engine(engine(), resolved, Mesh(dp=1, dp_rank=0))
    check_engine(engine(ranks=2), resolved, Mesh(dp=2, dp_rank=0))
    with pytest.raises(ConfigError, match="ranks: 1 in the engine, 2 in the resolved JSON"):
        check_engine(engine(), resolved, Mesh(dp=2, dp_rank=0))
    with pytest.raises(ConfigError) as caught:
        offloaded = SimpleNamespace(device="cpu")
        understood_otherwise = {"gradient_clipping": 0.0, "get_data_types": (torch.float32, None)}
        check_engine(engine(**understood_otherwise, zero_offload_optimizer=offloaded), resolved, Mesh(dp=1, dp_rank=0))
    _, *lines = str(caught.value).splitlines()
    assert lines == [
        "gradient_clipping: 0.0 in the engine, 1.0 in the resolved JSON",
        "dtype: torch.float32 in the engine, torch.bfloat16 in the resolved JSON",
        "zero_optimization.offload_optimizer.device: cpu in the engine, none in the resolved JSON",
    ]


def test_unknown_keys_are_named_with_the_nearest_known_one():
    with pytest.raises(ConfigError) as caught:
        resolve({"zero_optimisation": {"stage": 3}, "gradient_cliping": 1.0, "xyz": 1})
    lines = str(caught.value).splitlines()
    assert "gradient_cliping in the DeepSpeed JSON is not a DeepSpeed key: did you mean gradient_clipping?" in lines
    assert "zero_optimisation in the DeepSpeed JSON is not a DeepSpeed key: did you mean zero_optimization?" in lines
    assert "xyz in the DeepSpeed JSON is not a DeepSpeed key: DeepSpeed would ignore it, remove it" in lines


def test_comments_may_stand_in_the_file_and_a_key_only_once(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{\n  // why\n  "zero_optimization": {"stage": 2},  # and how\n  "steps_per_print": 5\n}')
    assert read_ds_config(path) == {"zero_optimization": {"stage": 2}, "steps_per_print": 5}
    path.write_text('{"bf16": {"enabled": true, "enabled": false}}')
    with pytest.raises(ConfigError, match=r"ds.json: enabled occurs twice in one object: remove one"):
        read_ds_config(path)
    path.write_text('{"train_batch_size": 8 "steps_per_print": 5}')
    with pytest.raises(ConfigError, match=r"can't be read as JSON: .*line 1 column 24"):
        read_ds_config(path)


ADAMW = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
HALF = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
}
SIZES_3 = {
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
}


def on(device: str) -> dict:
    return {"device": device, "pin_memory": True}


# What LLaVA's and LLaVA-NeXT's scripts/*.json say.
LLAVAS = {
    "llava zero2": {
        **HALF,
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 1e9,
            "reduce_bucket_size": "auto",
        },
    },
    "llava zero3": {
        **HALF,
        "zero_optimization": {"stage": 3, **SIZES_3, "stage3_gather_16bit_weights_on_model_save": True},
    },
    "llava zero3_offload": {
        **HALF,
        "bf16": {"enabled": True},
        "optimizer": ADAMW,
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
        },
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": on("cpu"),
            "offload_param": on("cpu"),
            **SIZES_3,
            "gather_16bit_weights_on_model_save": True,
        },
        "gradient_clipping": "auto",
        "steps_per_print": 1e5,
        "wall_clock_breakdown": False,
    },
    "next zero2_offload": {
        **HALF,
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": on("cpu"),
            "offload_param": on("cpu"),
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 1e9,
            "reduce_bucket_size": "auto",
        },
    },
    "next zero2_fused_adamw": {
        **HALF,
        "optimizer": ADAMW,
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": on("none"),
            "allgather_partitions": True,
            "allgather_bucket_size": 2e8,
            "overlap_comm": True,
            "reduce_scatter": True,
            "reduce_bucket_size": 2e8,
            "contiguous_gradients": True,
        },
        "gradient_clipping": "auto",
        "steps_per_print": 100,
        "wall_clock_breakdown": False,
    },
    "next zero3": {
        **HALF,
        "optimizer": ADAMW,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": on("none"),
            "offload_param": on("none"),
            **SIZES_3,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "gradient_clipping": "auto",
        "steps_per_print": 100,
        "wall_clock_breakdown": False,
    },
}


@pytest.mark.parametrize("name", LLAVAS)
def test_llavas_own_files_resolve_unchanged(name):
    config = resolve(LLAVAS[name], bf16=True, learning_rate=3e-4, warmup_ratio=0.3).config
    assert not has_auto(config)
    assert config["bf16"]["enabled"] is True
    if "optimizer" in LLAVAS[name]:
        assert config["optimizer"]["params"]["lr"] == 3e-4
    if "scheduler" in LLAVAS[name]:
        assert config["scheduler"]["params"] == {"warmup_min_lr": 0, "warmup_max_lr": 3e-4, "warmup_num_steps": 3}


def test_parameters_that_are_whole_are_not_offloaded():
    resolved = resolve(LLAVAS["next zero2_offload"], bf16=True)
    assert resolved.config["zero_optimization"]["offload_param"]["device"] == "none"
    assert "at stage 2 every rank holds all parameters" in "\n".join(resolved.explain())
