"""--deepspeed_config auto takes the first configuration that fits, by the estimate."""

from pathlib import Path

import pytest

from llava_ds.config.parsing import CHOOSE_DS_CONFIG, parse_arguments
from llava_ds.constants import ConfigError
from llava_ds.extensions.planning.auto import Devices, choose_ds_config
from llava_ds.extensions.planning.shapes import shape_named

CONFIGS = Path(__file__).parents[3] / "ds_configs"
GB = 10**9


def choose(memory_gb: float, ranks: int = 1, node_gb: float | None = None, device_type: str = "cuda", **flags: object):
    """The stage and where the optimizer lies, and the line that says why."""
    given = {"bf16": True, "per_device_train_batch_size": 1, "gradient_checkpointing": True, **flags}
    argv = [token for name, value in given.items() for token in (f"--{name}", str(value))]
    args, _ = parse_arguments(argv, to_train=False)
    devices = Devices(ranks, 8, device_type, memory_gb * GB, node_gb and node_gb * GB)
    raw, line = choose_ds_config(CONFIGS, shape_named("llava-v1.5-7b", args), args, devices)
    zero = raw["zero_optimization"]
    return (zero["stage"], zero.get("offload_optimizer", {}).get("device", "none")), line


@pytest.mark.parametrize(
    ("memory_gb", "ranks", "flags", "expected"),
    [
        (192, 1, {}, (0, "none")),
        (192, 1, {"bf16": False, "fp16": True}, (1, "none")),
        (141, 1, {}, (3, "none")),
        (80, 8, {}, (2, "none")),
        (80, 8, {"gradient_accumulation_steps": 4}, (1, "none")),
        (24, 8, {}, (3, "none")),
        (24, 1, {}, (2, "cpu")),
        (16, 2, {"tune_mm_mlp_adapter": True}, (3, "none")),
    ],
)
def test_the_fastest_that_fits_is_taken(memory_gb, ranks, flags, expected):
    found, line = choose(memory_gb, ranks, **flags)
    assert found == expected
    assert f"zero{expected[0]}" in line and f"{memory_gb:.1f} GB" in line


def test_nothing_is_offloaded_that_the_node_has_no_room_for_nor_from_a_cpu_to_itself():
    assert choose(24, node_gb=500)[0] == (2, "cpu")
    for more in ({"node_gb": 40}, {"device_type": "cpu"}):
        with pytest.raises(ConfigError, match=r"no estimate of zero0.* fits.*the smallest change that fits"):
            choose(24, **more)


def test_what_the_flags_rule_out_is_said_as_by_any_file():
    with pytest.raises(ConfigError, match="can't share it evenly"):
        choose(80, ranks=3, train_batch_size=8)


def test_a_file_called_auto_is_named_by_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args, _ = parse_arguments(["--deepspeed_config", CHOOSE_DS_CONFIG, "--output_dir", "out"])
    assert args.training.deepspeed_config == "auto"
    with pytest.raises(ConfigError, match="no such file"):
        parse_arguments(["--deepspeed_config", "./auto", "--output_dir", "out"])
