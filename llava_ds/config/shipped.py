"""Files shipped with the package: the scripts of run/, their recipes, and ds_configs/."""

import os
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
# Next to the package in a checkout; inside it after pip install (setup.py).
_ROOT = _PACKAGE if (_PACKAGE / "run").is_dir() else _PACKAGE.parent
RUN = _ROOT / "run"
RECIPES = RUN / "recipes"
DS_CONFIGS = _ROOT / "ds_configs"


def found(path: str, shipped: Path, suffix: str) -> str:
    """Return a user's path, or the shipped file of this name if nothing exists at the path.

    "zero3", "zero3.json" and "ds_configs/zero3.json" all find ds_configs/zero3.json, also outside the checkout.
    """
    given = Path(path)
    file = shipped / (given.name if given.suffix == suffix else f"{given.name}{suffix}")  # names have dots
    parent = given.parent.as_posix()
    named = parent == "." or shipped.as_posix().endswith(f"/{parent}")
    return str(file) if named and not os.path.exists(os.path.expanduser(path)) and os.path.isfile(file) else path
