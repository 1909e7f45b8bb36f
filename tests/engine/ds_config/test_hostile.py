"""Values that nobody means: refused in one ConfigError, whatever they are and wherever they stand."""

import random

import pytest
from ds_json import arguments, refused, resolve
from extension_there import if_there

from llava_ds.constants import ConfigError
from llava_ds.engine.ds_config import optimizer_block, scheduler_block
from llava_ds.engine.ds_config.draft import open_keys
from llava_ds.engine.ds_config.resolve import read_ds_config, resolve_ds_config
from llava_ds.engine.ds_config.schema import fields_of, sections

HUGE = 10**400
VALUES = [
    *(None, "auto", True, False, 0, 1, -1, 0.5, 1e-5, 1e300, 10**30, HUGE, float("nan"), float("inf")),
    *("x", "", "1e-5", "true", "cpu", "é", "\ud800", "Auto", "None"),
    *([], [1], ["auto"], [0.9, 0.95], [1.5, -1], [[1]], {}, {"a": 1}, {"a": "auto"}, [{"a": "auto"}], [None]),
]


def nested(depth: int) -> object:
    value: object = {}
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    "raw",
    [
        {"optimizer": {"type": "Lamb", "params": {"torch_adam": True}}},
        {"torch_autocast": {"enabled": True, "lower_precision_safe_modules": True}},
        {"optimizer": {"type": "Adafactor", "params": {"eps": []}}, "zero_allow_untested_optimizer": True},
        {"optimizer": {"type": "Rprop", "params": {"etas": []}}},
        {"optimizer": {"type": "Rprop", "params": {"step_sizes": [1e-6, "x"]}}},
        {"optimizer": {"type": "AdamW", "params": {"lr": HUGE}}},
        {"optimizer": {"type": "SGD", "params": {"capturable": True}}},
        {"optimizer": {"type": "SGD", "params": {"fused": "x"}}},
        {"fp16": {"loss_scale": HUGE}},
        {"gradient_clipping": HUGE},
        {"bf16.x.y": 1},
        {"": 1},
        {"\ud800": 1},
        {"hybrid_engine": nested(900)},
        {"optimizer": {"type": "AdamW", "params": {"betas": nested(900)}}},
        {"zero_optimization": {"stage": 2, "reduce_bucket_size": 10**30}},
        {"gradient_predivide_factor": float("inf"), "zero_optimization": {"stage": 0}},
        {"csv_monitor": {"enabled": True, "output_path": "/dev/null/x"}},
        {"wall_clock_breakdown": "false"},
        {"steps_per_print": "10"},
        {"compile": {"deepcompile": 1}},
        {"torch_autocast": {"enabled": 1}},
        {"scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 0}}},
        {"scheduler": {"type": "StepLR", "params": {"step_size": 0}}},
        {"scheduler": {"type": "CyclicLR", "params": {"base_lr": [1e-4], "max_lr": "auto"}}},
        {"scheduler": {"type": "OneCycleLR", "params": {"max_lr": "auto", "total_steps": 5}}},
        {"scheduler": {"type": "ExponentialLR", "params": {"gamma": float("nan")}}},
        {"scheduler": {"type": "ExponentialLR", "params": {"gamma": -10}}},
        {
            "optimizer": {"type": "Adagrad"},
            "scheduler": {"type": "OneCycleLR", "params": {"max_lr": "auto", "total_steps": 20}},
        },
    ],
    ids=lambda raw: str(raw)[:60],
)
def test_it_is_refused_in_lines_of_bearable_length(raw):
    lines = refused(raw)
    assert lines and all(len(line) < 600 for line in lines)


def test_deepspeeds_short_names_are_the_long_ones():
    zero = {"stage": 3, "param_persistence_threshold": "auto", "max_live_parameters": 10}
    config = resolve({"zero_optimization": zero}).config["zero_optimization"]
    assert config["stage3_param_persistence_threshold"] == 480 and config["stage3_max_live_parameters"] == 10
    [line] = refused({"zero_optimization": {**zero, "stage3_max_live_parameters": 5}})
    assert "max_live_parameters and stage3_max_live_parameters, but they are one key" in line
    [line] = refused({"zero_optimization": {"stage": 3, "module_granularity_threshold": 5}})
    assert line.startswith("zero_optimization.stage3_module_granularity_threshold ends this kind of model's first step")


def test_what_is_off_asks_for_nothing():
    raw = {
        "amp": {"enabled": False},
        "autotuning": {"enabled": False},
        **if_there("tensor_parallel", tensor_parallel={"autotp_size": 1}),
        **if_there("pipeline", pipeline={}),
        "zero_optimization": {"stage": 2, "cpu_offload": False},
    }
    assert not {"amp", "autotuning", "tensor_parallel", "pipeline"} & set(resolve(raw).config)


KEYS = [f"{place}.{name}" if place else name for place, model in sections().items() for name in fields_of(model)]


def test_some_values_of_every_key_resolve_or_are_refused():
    rng = random.Random("some")
    for key in KEYS:
        for value in rng.sample(VALUES, 4):
            _tried(placed(key, value, rng.choice([0, 3])))


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_any_value_of_any_key_resolves_or_is_refused(stage):
    for key in KEYS:
        for value in VALUES:
            _tried(placed(key, value, stage))


def placed(key: str, value: object, stage: int) -> dict:
    raw: dict = {"zero_optimization": {"stage": stage}}
    *path, last = key.split(".")
    place = raw
    for part in path:
        place = place.setdefault(part, {})
    place[last] = value
    return raw


def test_any_optimizer_and_schedule_resolves_or_is_refused():
    rng = random.Random("blocks")
    taken = 0
    types = [*optimizer_block.OPTIMIZERS, *optimizer_block.IMPOSSIBLE, "x", "", 3, "auto"]
    schedules = [*scheduler_block.DEEPSPEED, *scheduler_block.TORCH, *scheduler_block.IMPOSSIBLE, "x", None]
    good = [1e-3, "auto", 0.9, [0.9, 0.95], True, 5]
    for _ in range(300):
        kind, schedule = rng.choice(types), rng.choice(schedules)
        wild = rng.choice([0.0, 0.05, 0.5])
        known = (
            list(optimizer_block.known_params(kind, torch_adam=True, offload=False)) if kind in types[:15] else ["lr"]
        )
        names = list(scheduler_block.known_params(schedule)) if schedule in schedules[:15] else ["a"]
        raw = {"zero_optimization": {"stage": rng.choice([0, 1, 2, 3])}, "zero_allow_untested_optimizer": True}
        for block, type_, keys in (("optimizer", kind, known), ("scheduler", schedule, names)):
            if rng.random() < 0.7:
                chosen = [name for name in keys if rng.random() < 0.3]
                params = {name: rng.choice(VALUES if rng.random() < wild else good) for name in chosen}
                raw[block] = {"type": type_, "params": params}
        taken += _tried(raw)
    assert taken > 10


def _tried(raw: dict) -> bool:
    """Whether it resolves; what does is whole."""
    try:
        config = resolve_ds_config(raw, ARGUMENTS, dp=1, hidden_size=48, num_steps=10).config
    except ConfigError as error:
        assert (str(error).strip() and str(error).isprintable()) or "\n" in str(error)
        return False
    assert open_keys(config) == []
    return True


ARGUMENTS = arguments()


@pytest.mark.parametrize(
    ("content", "reads"),
    [
        (b'\xef\xbb\xbf{"steps_per_print": 1}', True),
        (b'\xef\xbb\xbf{"steps_per_print": 1} // why', True),
        (b'{"a": "// no comment", "b": "# nor this", "c": "/* nor */"}', True),
        (b'{"a": 1 /* over\ntwo lines */, "b": 2} # end', True),
        (b'{"a": "quote \\" // inside"}', True),
        (b'{"gradient_clipping": 1 // a line end is a comma to Hjson\n "bf16": {}}', True),
        (b'{"a": [1, 2,], "b": {"c": 1,},}', True),
        (b"{a: 1, b: text\n}", True),
        (b"{'a': 'x: y, z'}", True),
        (b'{"a": {"nvme_path": /local_nvme\n}}', True),
        (b'{"a": auto, "b": 2\n}', False),
        (b'{"a": {"nvme_path": /local_nvme, "pin_memory": true\n}}', False),
        (b'{"a": 1, "a": 2,}', False),
        (b'{"a": 1,,}', False),
        (b'"a": 1', False),
        (b"a: 1", False),
        (b'{"a": 1e999,}', False),
        (b'{"a":' * 2000, False),
        (b'{"train_batch_size": ' + b"9" * 5000 + b"}", False),
        (b"[" * 100_000, False),
        (b"", False),
        (b"\xff\xfe{\x00}\x00", False),
        (b'{"a": 1', False),
    ],
    ids=lambda value: str(value)[:40],
)
def test_files(content, reads, tmp_path):
    path = tmp_path / "ds.json"
    path.write_bytes(content)
    if reads:
        assert isinstance(read_ds_config(path), dict)
    else:
        with pytest.raises(ConfigError, match=r"ds\.json"):
            read_ds_config(path)
