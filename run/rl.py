"""Train a LLaVA model on rewards of its own answers: deepspeed run/rl.py --reward_funcs exact --deepspeed_config zero2

It is run/train.py with --objective grpo by default, or ppo: same flags, checkpoints, log and export (docs/rl.md).
"""

import contextlib
import runpy
import sys
from pathlib import Path

from llava_ds.config.recipes import read_recipe, recipe_of
from llava_ds.constants import ConfigError
from llava_ds.runtime.output import env_rank


def names_objective(argv: list[str]) -> bool:
    """Return True if the command line or its recipe has --objective."""
    if any(token.split("=", 1)[0] == "--objective" for token in argv):
        return True
    with contextlib.suppress(ConfigError):  # run/train.py reports it
        recipe = recipe_of(argv)
        return recipe is not None and "objective" in read_recipe(recipe)
    return False


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]) and env_rank() == 0:
        print(__doc__)
    if not names_objective(sys.argv[1:]):
        sys.argv[1:1] = ["--objective", "grpo"]
    runpy.run_path(str(Path(__file__).with_name("train.py")), {"PROGRAM": "run/rl.py"}, "__main__")
