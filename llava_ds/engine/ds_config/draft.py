"""The state of a DeepSpeed JSON while it is resolved: values, flags, a reason for each filled value, and problems."""

import json
import logging
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

from llava_ds.config.arguments import Arguments

AUTO = "auto"
LONGEST_VALUE = 80  # maximum number of characters of a value in a message


@dataclass
class Draft:
    """The state of resolve_ds_config; the resolve_* functions fill it in.

    config: a copy of the JSON; args: the flags, completed by values of the JSON that no flag contradicts. Keys are
    dotted paths. Every filled value has a reason; problems are collected, not raised.
    """

    config: dict
    args: Arguments
    dp: int
    hidden_size: int
    device_type: str
    is_local: bool  # this machine will train: check its packages and compilers
    reasons: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    ruled: set[str] = field(default_factory=set)  # keys that have a rule for "auto"
    wrong: set[str] = field(default_factory=set)  # keys that the schema refused

    def get(self, key: str) -> object:
        """Return the value at a dotted key, or None."""
        return value_at(self.config, key)

    def fill(self, key: str, value: object, why: str) -> None:
        """Write a value that the JSON leaves open, with its reason."""
        *path, last = key.split(".")
        place = self.config
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
        self.reasons[key] = why
        self.ruled.add(key)

    def refuse(self, problem: str) -> None:
        """Record a problem: its place, the value found, and the remedy."""
        if problem not in self.problems:
            self.problems.append(problem)

    def is_open(self, key: str) -> bool:
        """True if the JSON leaves the value to the flags: it is absent or "auto"."""
        return self.get(key) in (None, AUTO)

    def agree(self, key: str, *flags: str) -> object:
        """Make a JSON key and the equivalent flags agree. Returns their value, a list if there are several flags.

        If the JSON leaves the key open, it is set to the flags' value; otherwise the flags are set to its value.
        Refuses a value in the JSON that is not a number from 0 (for a boolean flag: not a boolean), or that contradicts
        a flag given by the user.
        """
        self.ruled.add(key)
        values = [self.args.as_dict()[flag] for flag in flags]
        wanted = values[0] if len(flags) == 1 else values
        named = " ".join(f"--{flag}" for flag in flags)
        if self.is_open(key):
            self.fill(key, wanted, named)
            return wanted
        written = self.get(key)
        if isinstance(wanted, bool):
            fits, kind = isinstance(written, bool), "true or false"
        elif len(flags) > 1:
            fits = isinstance(written, list) and len(written) == len(flags) and all(map(is_number, written))
            kind = f"a list of {len(flags)} numbers from 0"
        else:
            fits, kind = is_number(written), "a number from 0"
        if not fits:
            self.refuse(f'{key} is {as_json(written)} in the DeepSpeed JSON: write {kind}, or "auto"')
            return wanted
        if written != wanted and set(flags) & self.args.given:
            self.refuse(
                f"{key} is {as_json(written)} in the DeepSpeed JSON but {named} is {wanted}: "
                'make them equal, or write "auto"'
            )
            return written
        self.args = self.args.replaced(**dict(zip(flags, written if len(flags) > 1 else [written])))
        return written


def is_number(value: object) -> bool:
    """True for a number from 0 that a float can hold, False for booleans."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max


def value_at(config: dict, key: str) -> object:
    """Return the value at a dotted key of nested dicts, or None."""
    value: object = config
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            return None
        value = value[part]
    return value


def as_json(value: object) -> str:
    """Write a value as JSON, shortened."""
    text = json.dumps(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]} ..."


def size_shown(value: object) -> object:
    """Return a size as shown in a message; "N" if it is invalid."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else "N"


def trial_error(run: Callable[[], object]) -> str | None:
    """Call `run` with warnings hidden. Returns the message of its error, or None."""
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run()
    except (ValueError, TypeError, RuntimeError, LookupError, ArithmeticError, AttributeError, AssertionError) as error:
        return str(error) or type(error).__name__
    finally:
        logger.setLevel(level)
    return None


def open_keys(config: dict, prefix: str = "") -> list[str]:
    """Return the dotted keys whose value is still "auto"."""
    found = []
    for key, value in config.items():
        if isinstance(value, dict):
            found += open_keys(value, f"{prefix}{key}.")
        elif value == AUTO or (isinstance(value, list) and _holds_auto(value)):
            found.append(prefix + key)
    return found


def _holds_auto(value: object) -> bool:
    if isinstance(value, (list, dict)):
        return any(map(_holds_auto, value.values() if isinstance(value, dict) else value))
    return value == AUTO
