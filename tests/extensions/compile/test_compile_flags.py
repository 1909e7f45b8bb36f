"""--torch_compile beside other flags, and the backends that there are."""

from types import SimpleNamespace

import pytest
from ds_json import CONFIGS, arguments

from llava_ds.config.parsing import parse_arguments
from llava_ds.constants import ConfigError
from llava_ds.extensions.active import active

NEEDED = ["--output_dir", "out", "--deepspeed_config", str(CONFIGS / "zero2.json")]


def test_a_backend_alone_compiles_nothing():
    with pytest.raises(ConfigError, match="--torch_compile_backend eager needs --torch_compile True"):
        parse_arguments([*NEEDED, "--torch_compile_backend", "eager"])
    args, _ = parse_arguments([*NEEDED, "--torch_compile", "False", "--torch_compile_backend", "nonsense"])
    active(args.own).check(SimpleNamespace(args=args, config={}))


@pytest.mark.parametrize(
    ("flags", "config", "message"),
    [
        ({"torch_compile_backend": "eager"}, {}, None),
        (
            {"torch_compile_backend": "egaer"},
            {},
            "egaer is unknown to torch: give one of .*eager",
        ),
        ({}, {"compile": {"deepcompile": True}}, "compile.deepcompile is true .* but --torch_compile is True: both"),
    ],
)
def test_what_it_can_not_run_with(flags, config, message):
    args = arguments(torch_compile=True, **flags)
    resolved = SimpleNamespace(args=args, config=config)
    if message is None:
        active(["compile"]).check(resolved)
    else:
        with pytest.raises(ConfigError, match=message):
            active(["compile"]).check(resolved)
