"""Measure one part of the package: python run/dev/measure.py NAME [--flag value ...]

NAME -h describes the measurement and its flags.
"""

import argparse
import importlib
import inspect
import sys

# Measurement functions by name, with their modules in run/dev/measured/.
MEASUREMENTS = {
    "planning": "step_planning",
    **dict.fromkeys(("packing", "preflight"), "data_costs"),
    **dict.fromkeys(("shared_prompts", "image_prefix"), "prompt_costs"),
    "rivals": "rivals",
    "spread": "pack_spread",
}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(MEASUREMENTS))
    name = parser.parse_args(argv[:1]).name
    measure = getattr(importlib.import_module(f"measured.{MEASUREMENTS[name]}"), name)
    measure(**vars(flags_of(measure).parse_args(argv[1:])))


def flags_of(measure) -> argparse.ArgumentParser:
    """Build a parser with a flag per parameter of a function, typed like its default."""
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
