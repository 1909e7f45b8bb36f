"""The flags of sample answers, and the recipes that ask for them."""

from pathlib import Path

import pytest

from llava_ds.config.parsing import parse_arguments
from llava_ds.config.recipes import read_recipe
from llava_ds.constants import ConfigError

RECIPES = Path(__file__).parents[3] / "run" / "recipes"
PLAIN = ["--output_dir", "out", "--deepspeed_config", "zero2"]


def test_every_recipe_that_takes_minutes_asks_for_answers():
    for path in sorted(RECIPES.glob("*.yaml")):
        recipe = read_recipe(path)
        without = recipe.get("objective") == "reward" or path.stem.startswith(("real-small", "ready-"))  # on a CPU
        assert recipe.get("sample_steps") == (None if without else 0.1), path


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"sample_steps": 1.5}, "give a whole number of steps, or a fraction of all steps, below 1"),
        ({"num_sample_questions": 0}, "--num_sample_questions is 0: give 1 or more$"),
        ({"sample_data_path": __file__}, "has questions for --sample_steps: give that as well"),
    ],
)
def test_what_has_no_use_is_refused(flags, said):
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    with pytest.raises(ConfigError, match=said):
        parse_arguments([*PLAIN, *words])
