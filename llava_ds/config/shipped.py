"""Files beside the package: the scripts of run/, their recipes, and ds_configs/."""

import os
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
# Beside the package in a checkout; within it where pip has installed it (setup.py).
_ROOT = _PACKAGE if (_PACKAGE / "run").is_dir() else _PACKAGE.parent
RUN = _ROOT / "run"
RECIPES = RUN / "recipes"
DS_CONFIGS = _ROOT / "ds_configs"


def found(path: str, shipped: Path, suffix: str) -> str:
    """A path that a user gave, or the file of this name that is shipped, where there is none at the path.

    Takes "zero3", "zero3.json" and "ds_configs/zero3.json" for ds_configs/zero3.json: the last is what the
    documentation writes, and works in folders other than the checkout, too.
    """
    given = Path(path)
    here = shipped / (given.name if given.suffix else f"{given.name}{suffix}")
    parent = given.parent.as_posix()
    named = parent == "." or shipped.as_posix().endswith(f"/{parent}")
    return str(here) if named and not os.path.exists(os.path.expanduser(path)) and os.path.isfile(here) else path
