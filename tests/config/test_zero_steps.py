"""Flags that are given as 0: either the run says what it switches off, or 0 is refused with the flag that does."""

import pytest

from llava_ds.config.parsing import build_parser, parse_arguments
from llava_ds.config.rules import INSTEAD_OF_ZERO, SWITCHED_OFF
from llava_ds.constants import ConfigError

PLAIN = ["--output_dir", "out", "--deepspeed_config", "zero2"]


@pytest.mark.parametrize(("name", "what"), SWITCHED_OFF.items())
def test_what_a_zero_switches_off_is_said(name, what):
    assert parse_arguments([*PLAIN, f"--{name}", "0"])[1] == [f"--{name} 0: {what}"]
    assert parse_arguments(PLAIN, defaults={name: 0})[1] == []


@pytest.mark.parametrize(("name", "instead"), INSTEAD_OF_ZERO.items())
def test_a_zero_that_means_nothing_is_refused_with_what_switches_off(name, instead):
    with pytest.raises(ConfigError) as caught:
        parse_arguments([*PLAIN, f"--{name}", "0"])
    assert f"--{name} is 0: give 1 or more; {instead}" in str(caught.value)


def test_what_is_never_off_takes_no_zero():
    with pytest.raises(ConfigError, match=r"--logging_steps is 0: give 1 or more$"):
        parse_arguments([*PLAIN, "--logging_steps", "0"])


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_a_zero_against_a_strategy_is_refused(strategy):
    words = [*PLAIN, "--eval_fraction", "0.1", "--eval_strategy", strategy, "--eval_steps", "0"]
    with pytest.raises(ConfigError) as caught:
        parse_arguments(words)
    assert str(caught.value) == (
        f"--eval_steps 0 and --eval_strategy {strategy}: the first computes the eval loss only at the end, the "
        "second also before: give only one"
    )


def test_help_says_what_zero_means():
    helps = {action.dest: action.help for action in build_parser()._actions}
    for name in SWITCHED_OFF:
        assert "0" in helps[name]
