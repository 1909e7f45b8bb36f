"""The flags of sample answers, and the recipes that ask for them."""

from pathlib import Path

import pytest

from llava_ds.config.parsing import parse_arguments, tiny_defaults
from llava_ds.constants import ConfigError

RECIPES = Path(__file__).parents[3] / "run" / "recipes"
PLAIN = ["--output_dir", "out", "--deepspeed_config", "zero2"]


def test_every_recipe_that_takes_minutes_asks_for_answers():
    for path in sorted(RECIPES.glob("*.yaml")):
        pairs = ["--data_path", str(path)] if path.stem in ("tiny-dpo", "tiny-reward") else []
        args, _ = parse_arguments([*PLAIN, "--recipe", str(path), *pairs])
        without = args.training.objective == "reward" or path.stem.startswith("real-small")  # minutes on a CPU
        steps = getattr(args.own.get("samples"), "sample_steps", None)
        assert steps == (None if without else 0.1), path


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"sample_steps": 1.5}, "give a whole number of steps, or a part of all steps below 1"),
        ({"num_sample_questions": 0}, "--num_sample_questions is 0: give 1 or more$"),
        ({"sample_data_path": __file__}, "has questions for --sample_steps: give it, too"),
        ({"sample_steps": 1, "objective": "reward"}, "--sample_steps can't be used with --objective reward"),
    ],
)
def test_what_has_no_use_is_refused(flags, said):
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    with pytest.raises(ConfigError, match=said):
        parse_arguments([*PLAIN, *words])


def test_the_tiny_recipes_answers_are_not_asked_of_a_reward_model():
    argv = [*PLAIN, "--objective", "reward", "--data_path", __file__]
    assert "sample_steps" not in tiny_defaults(argv, RECIPES)
    assert parse_arguments(argv, defaults=tiny_defaults(argv, RECIPES))
