"""A DeepSpeed JSON and flags, as a user gives them, resolved or refused without starting anything."""

from pathlib import Path

import pytest

from llava_ds.arguments import Arguments
from llava_ds.constants import ConfigError
from llava_ds.ds_config.resolve import ResolvedConfig, resolve_ds_config
from llava_ds.parsing import parse_arguments

CONFIG = Path(__file__).parents[1] / "ds_configs" / "zero2.json"


def arguments(**flags: object) -> Arguments:
    argv = [token for name, value in flags.items() for token in (f"--{name}", str(value))]
    return parse_arguments([*argv, "--output_dir", "out", "--deepspeed_config", str(CONFIG)])[0]


def resolve(raw: dict, *, num_steps: int | None = 100, device_type: str = "cpu", **flags: object) -> ResolvedConfig:
    return resolve_ds_config(
        raw, arguments(**flags), world_size=1, hidden_size=48, device_type=device_type, num_steps=num_steps
    )


def refused(raw: dict, **options: object) -> list[str]:
    """The lines of the error."""
    with pytest.raises(ConfigError) as caught:
        resolve(raw, **options)
    return str(caught.value).splitlines()
