"""Flags of preferences: those that don't go together are refused, and what the tiny recipes say of them."""

import pytest

from llava_ds.config.parsing import parse_arguments, tiny_defaults
from llava_ds.config.recipes import RECIPES
from llava_ds.constants import ConfigError

NEEDED = ["--output_dir", "out", "--deepspeed_config", "zero2"]


def refusal(*flags: str) -> str:
    with pytest.raises(ConfigError) as refused:
        parse_arguments([*NEEDED, *flags])
    return str(refused.value)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            ["--loss_reduction", "micro_batch", "--objective", "dpo"],
            "is for --objective sft, not dpo: leave",
        ),
        (["--label_smoothing", "0.1"], "--label_smoothing belongs to --objective dpo, not sft: leave one of them"),
        (["--objective", "reward", "--rpo_alpha", "1"], "--rpo_alpha belongs to --objective dpo, not reward"),
        (
            ["--objective", "dpo", "--desirable_weight", "2"],
            "--desirable_weight belongs to --objective kto",
        ),
        (["--objective", "kto", "--loss_type", "ipo"], "--loss_type belongs to --objective dpo"),
        (["--objective", "reward", "--beta", "1"], "--beta belongs to --objective dpo and kto"),
        (["--objective", "kto"], "--objective kto needs --data_path with preferences"),
        (["--objective", "reward"], "--objective reward needs --data_path with preferences"),
        (["--reward_loss", "tokens"], "--reward_loss belongs to --objective reward, not sft"),
        (["--objective", "reward", "--tune_mm_mlp_adapter", "True"], "train the language model as well"),
        (["--objective", "dpo", "--simpo_gamma", "1"], "--simpo_gamma has no effect with --loss_type sigmoid"),
        (["--objective", "dpo", "--cpo_alpha", "1"], "--cpo_alpha has no effect with --loss_type sigmoid"),
        (
            ["--objective", "dpo", "--loss_type", "orpo", "--rpo_alpha", "1"],
            "--rpo_alpha has no effect with --loss_type orpo: it is for sigmoid and hinge and ipo and simpo",
        ),
        (
            ["--objective", "dpo", "--loss_type", "cpo", "--ref_model_name_or_path", "m"],
            "--ref_model_name_or_path has no effect with --loss_type cpo",
        ),
        (
            ["--objective", "dpo", "--loss_type", "dapo"],
            "invalid choice: 'dapo' (choose from 'sigmoid', 'hinge'",
        ),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags, expected):
    assert expected in refusal(*flags)


def test_a_wrong_objective_is_all_that_is_said():
    [line] = refusal("--objective", "dop", "--beta", "0.1").splitlines()
    assert line.startswith("--objective: invalid choice: 'dop'")


def test_the_objective_alone_brings_the_flags():
    for flags, (beta, loss_type) in (([], (0.1, "sigmoid")), (["--beta", "0.5", "--loss_type", "ipo"], (0.5, "ipo"))):
        own = parse_arguments([*NEEDED, "--objective", "dpo", "--data_path", __file__, *flags])[0].own["preference"]
        assert (own.beta, own.loss_type) == (beta, loss_type)
    assert "preference" not in parse_arguments(NEEDED)[0].own


def test_the_tiny_recipes_answers_are_not_asked_of_a_reward_model():
    argv = [*NEEDED, "--objective", "reward", "--data_path", __file__]
    assert "sample_steps" not in tiny_defaults(argv, RECIPES)
    assert parse_arguments(argv, defaults=tiny_defaults(argv, RECIPES))
