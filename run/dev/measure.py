"""Measure a part of the package by itself: python run/dev/measure.py NAME [--flag value ...]

NAME -h says what is measured and which flags there are.
"""

import argparse
import importlib
import inspect
import sys

# What is measured, a function, by its name: the module of run/dev/measured/ that has it.
MEASUREMENTS = {
    "planning": "step_planning",
    **dict.fromkeys(("packing", "preflight"), "data_costs"),
}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(MEASUREMENTS))
    name = parser.parse_args(argv[:1]).name
    measure = getattr(importlib.import_module(f"measured.{MEASUREMENTS[name]}"), name)
    measure(**vars(flags_of(measure).parse_args(argv[1:])))


def flags_of(measure) -> argparse.ArgumentParser:
    """A parser with a flag for each parameter of a function, of the kind of its default."""
    parser = argparse.ArgumentParser(
        prog=f"measure.py {measure.__name__}",
        description=inspect.getdoc(measure),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, parameter in inspect.signature(measure).parameters.items():
        default = parameter.default
        if isinstance(default, bool):
            parser.add_argument(f"--{name}", action="store_true")
            continue
        several = isinstance(default, tuple)
        kind = type(default[0] if several else default)
        parser.add_argument(f"--{name}", type=kind, default=default, nargs="+" if several else None, help="%(default)s")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
