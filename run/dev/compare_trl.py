"""Compare preference optimisation and GRPO with TRL's: run/dev/compare_trl.py equal|fixture --trl_python PYTHON

equal: the same model and data give the same losses, step by step.
fixture: writes what TRL's formulas give to tests/helpers/trl_losses.json, by which make test notices a drift of ours.
TRL runs in an environment of its own, whose interpreter is PYTHON: make compare-trl makes one.
"""

import sys

from llava_ds.runtime.command import Parser, begin, exit_with, new_folder

if __name__ == "__main__":
    begin("run/dev/compare_trl.py")


import argparse
import json
from functools import partial
from pathlib import Path

from benchmark.trl_equal import equal_pairs, equal_policies
from benchmark.trl_formulas import write_fixture
from benchmark.trl_runs import Sides

from llava_ds.constants import ConfigError

FIXTURE = Path(__file__).parents[2] / "tests" / "helpers" / "trl_losses.json"
LIMIT = 1e-5  # of the difference of a loss, over all steps


def main(argv: list[str]) -> None:
    """Compare what the command line names."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=list(COMMANDS))
    parser.add_argument("--trl_python", required=True, help="interpreter of the environment that has TRL")
    parser.add_argument("--model_path", default="output/tiny-finetune", help="an exported LLaVA; default: %(default)s")
    parser.add_argument("--output_dir", type=new_folder, default="output/compare-trl", help="default: %(default)s")
    own = parser.parse_args(argv)
    model, folder = Path(own.model_path).resolve(), Path(own.output_dir).resolve()
    if not (model / "config.json").is_file():
        raise ConfigError(f"--model_path {model}: there is no config.json in it, run make finetune or name another")
    folder.mkdir(parents=True, exist_ok=True)
    COMMANDS[own.what](Sides(own.trl_python, model, folder))


def equal(sides: Sides) -> None:
    """Compare losses step by step, print the largest differences, and refuse those above LIMIT."""
    rows: dict[str, dict[str, float]] = {}
    for part in (partial(equal_pairs, sides, False), partial(equal_pairs, sides, True), partial(equal_policies, sides)):
        found = part()
        for name, row in found.items():
            print(f"{name:<42} " + "  ".join(f"{what} {value:.1e}" for what, value in row.items()), flush=True)
        rows |= found
        (sides.folder / "equal.json").write_text(json.dumps({"versions": sides.versions, **rows}, indent=1))
    print(", ".join(f"{name} {version}" for name, version in sides.versions.items()))
    if wrong := [name for name, row in rows.items() if not row["loss"] < LIMIT]:
        raise ConfigError(f"the losses of {', '.join(wrong)} differ by {LIMIT:g} or more")


COMMANDS = {"equal": equal, "fixture": partial(write_fixture, path=FIXTURE)}

if __name__ == "__main__":
    exit_with(partial(main, sys.argv[1:]), "run/dev/compare_trl.py")
