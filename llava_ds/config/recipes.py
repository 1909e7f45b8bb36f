"""Files shipped with the package: the scripts of run/, ds_configs/, and recipes, which are YAML files of flags."""

import os
import re
from pathlib import Path

from llava_ds.constants import ConfigError, in_short
from llava_ds.files.writing import path_problem

_PACKAGE = Path(__file__).parents[1]
# In a checkout, run/ and ds_configs/ are next to the package; setup.py installs them inside the package.
_ROOT = _PACKAGE if (_PACKAGE / "run").is_dir() else _PACKAGE.parent
RUN = _ROOT / "run"
RECIPES = RUN / "recipes"
DS_CONFIGS = _ROOT / "ds_configs"

MAX_RECIPE_BYTES = 1_000_000
NOT_IN_RECIPES = ("recipe", "help", "h", "local_rank")
FLAT = "a YAML mapping of flag names to single values"


def found(path: str, shipped: Path, suffix: str) -> str:
    """Return the user's path, or the path of a shipped file of this name if the user's path does not exist.

    "zero3", "zero3.json" and "ds_configs/zero3.json" find ds_configs/zero3.json from any working directory.
    """
    given = Path(path)
    file = shipped / (given.name if given.suffix == suffix else f"{given.name}{suffix}")  # a name may contain dots
    parent = given.parent.as_posix()
    named = parent == "." or shipped.as_posix().endswith(f"/{parent}")
    return str(file) if named and not os.path.exists(os.path.expanduser(path)) and os.path.isfile(file) else path


def recipe_of(argv: list[str]) -> str | None:
    """Return the path of --recipe on a command line, or None. If it is repeated, the last one counts."""
    path = None
    for i, token in enumerate(argv):
        if token.startswith("--recipe="):
            path = token.split("=", 1)[1]
        elif token == "--recipe":
            if i + 1 == len(argv):
                raise ConfigError("--recipe needs the path of a YAML file")
            path = argv[i + 1]
    return path


def read_recipe(path: str | Path) -> dict[str, object]:
    """Read the flags of a recipe. Raises ConfigError if it can't be read or is not a flat mapping of scalars."""
    import yaml  # not at the top, because it slows down commands without a recipe

    if problem := path_problem(str(path)):
        raise ConfigError(f"--recipe {problem}")
    file = Path(os.path.expanduser(found(str(path), RECIPES, ".yaml")))
    if not os.path.isfile(file):  # opening a FIFO would wait for a writer
        problem = "that is not a file" if os.path.exists(file) else "no such file"
        raise ConfigError(f"--recipe {in_short(path)} can't be read: {problem}")
    try:
        if file.stat().st_size > MAX_RECIPE_BYTES:
            raise ConfigError(f"--recipe {path} has more than {MAX_RECIPE_BYTES:,} bytes: give a YAML file of flags")
        recipe = yaml.safe_load(file.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ConfigError(f"--recipe {path} is nested too deeply: it must be {FLAT}") from error
    except ConfigError:
        raise
    except (OSError, ValueError, yaml.YAMLError) as error:  # ValueError: invalid UTF-8, or an impossible date
        raise ConfigError(f"--recipe {path} can't be read: {error}") from error
    if not isinstance(recipe, dict) or any(isinstance(v, (dict, list, set, bytes)) for v in recipe.values()):
        raise ConfigError(f"--recipe {path} must be {FLAT}")
    for name, value in recipe.items():
        if not isinstance(name, str) or not re.fullmatch(r"\w[\w-]*", name):
            raise ConfigError(f"--recipe {path}: {in_short(repr(name))} is not a flag's name, like learning_rate")
        if name in NOT_IN_RECIPES:
            raise ConfigError(f"--recipe {path} names {name}, allowed on the command line only: leave it out")
        if isinstance(value, int) and value.bit_length() > 64:
            raise ConfigError(f"--recipe {path}: {name} is {in_short(value)}, and no flag takes that")
    return recipe
