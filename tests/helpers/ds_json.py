"""Resolving a DeepSpeed JSON with flags as a user gives them."""

from pathlib import Path

import pytest

from llava_ds.config.arguments import Arguments
from llava_ds.config.parsing import parse_arguments
from llava_ds.constants import ConfigError
from llava_ds.engine.ds_config.resolve import ResolvedConfig, resolve_ds_config

CONFIGS = Path(__file__).parents[2] / "ds_configs"
H = 48  # hidden size


def arguments(**flags: object) -> Arguments:
    """Flags as a user gives them on the command line."""
    argv = [token for name, value in flags.items() for token in (f"--{name}", str(value))]
    return parse_arguments([*argv, "--output_dir", "out", "--deepspeed_config", str(CONFIGS / "zero2.json")])[0]


def resolve(
    raw: dict,
    *,
    dp: int = 1,
    device_type: str = "cpu",
    num_steps: int | None = 10,
    is_local: bool = True,
    **flags: object,
) -> ResolvedConfig:
    return resolve_ds_config(
        raw,
        arguments(**flags),
        dp=dp,
        hidden_size=H,
        device_type=device_type,
        num_steps=num_steps,
        is_local=is_local,
    )


def refused(raw: dict, **options: object) -> list[str]:
    """The lines of the error with which a JSON is refused; options are resolve's."""
    with pytest.raises(ConfigError) as caught:
        resolve(raw, **options)
    return str(caught.value).splitlines()
