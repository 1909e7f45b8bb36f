"""Any JSON of known keys: it resolves, and DeepSpeed takes what comes out, or it is refused in one ConfigError."""

import random
import typing
from typing import Annotated

import pytest
from ds_json import H, arguments
from pydantic import BaseModel

from llava_ds.constants import ConfigError
from llava_ds.engine.ds_config.draft import open_keys
from llava_ds.engine.ds_config.keys import UNSUPPORTED
from llava_ds.engine.ds_config.resolve import resolve_ds_config
from llava_ds.engine.ds_config.schema import DeepSpeedJson, options

WEIRD = [
    None,
    "auto",
    "auto",
    True,
    False,
    0,
    1,
    2,
    3,
    -1,
    0.5,
    1e9,
    "x",
    "",
    [],
    [1],
    {},
    {"a": 1},
    float("nan"),
    10**30,
]
FREE = {
    "train_batch_size": [4, 8, 24],
    "train_micro_batch_size_per_gpu": [1, 2, 8],
    "gradient_accumulation_steps": [1, 2],
    "gradient_clipping": [0.0, 1.0],
    "zero_optimization.stage": [0, 1, 2, 3],
    "zero_optimization.offload_optimizer.device": ["none", "none", "cpu"],
    "zero_optimization.offload_param.device": ["none", "none", "cpu"],
    # Mostly refused when true, for what else they need.
    "bf16.bf16_master_weights_and_grads": [False] * 9 + [True],
    "bf16.bf16_optimizer_states": [False] * 9 + [True],
    "fp16.fp16_master_weights_and_grads": [False] * 9 + [True],
    "fp16.enabled": [False] * 4 + [True],
    "torch_autocast.enabled": [False] * 4 + [True],
}


def plausible(rng: random.Random, key: str, annotation: object) -> object:
    """A value of the kind that a key wants."""
    if key in FREE:
        return rng.choice(FREE[key])
    kind = rng.choice([o for o in options(annotation) if o is not type(None)])
    if typing.get_origin(kind) is Annotated:
        kind = typing.get_args(kind)[0]
    if typing.get_origin(kind) is typing.Literal:
        return rng.choice(typing.get_args(kind))
    if typing.get_origin(kind) in (list, list):
        return []
    values = {bool: [True, False], int: [1, 2, 1000], float: [0.0, 0.5, 1.0], str: ["out"], dict: [{}], list: [[]]}
    return rng.choice(values.get(kind, ["auto"]))


def drawn(rng: random.Random, model: type[BaseModel], wildness: float, prefix: str = "") -> dict:
    """A section with some of its keys; now and then a value of another kind."""
    section = {}
    for name, info in model.model_fields.items():
        key = prefix + name
        if rng.random() < (0.75 if key not in FREE and key not in ("zero_optimization", "bf16", "fp16") else 0.4):
            continue
        if key in UNSUPPORTED and rng.random() > wildness:
            continue
        below = next((o for o in options(info.annotation) if isinstance(o, type) and issubclass(o, BaseModel)), None)
        if rng.random() < wildness:
            section[info.alias or name] = rng.choice(WEIRD)
        elif below is not None:
            section[name] = drawn(rng, below, wildness, f"{key}.")
        elif rng.random() < 0.1:
            section[info.alias or name] = "auto"
        else:
            section[info.alias or name] = plausible(rng, key, info.annotation)
    return section


@pytest.mark.parametrize("wildness", [0.0, 0.03, 0.3])
def test_any_json_of_known_keys_resolves_or_is_refused_once(wildness):
    from deepspeed.runtime.config import DeepSpeedConfig

    rng = random.Random(f"any {wildness}")
    resolved = refused = 0
    flags = [arguments(), arguments(bf16=True), arguments(train_batch_size=8, max_grad_norm=1.0)]
    for _ in range(400):
        raw = drawn(rng, DeepSpeedJson, wildness)
        raw.pop("optimizer", None), raw.pop("scheduler", None)  # test_hostile.py draws them
        device = rng.choice(["cpu", "cuda"])
        try:
            config = resolve_ds_config(
                raw, rng.choice(flags), dp=1, hidden_size=H, device_type=device, num_steps=10, is_local=False
            ).config
        except ConfigError as error:
            refused += 1
            assert str(error).strip()
            continue
        resolved += 1
        assert open_keys(config) == []
        if config.get("aio", {}).get("use_gds"):
            continue  # DeepSpeed asks the machine for a GPU
        DeepSpeedConfig(config)
    assert refused > 15 and (resolved > 10 or wildness > 0.1)
