"""Load a function or a class from a Python file that a flag names. It runs with the user's rights."""

import importlib.util
import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import Path

from llava_ds.constants import ConfigError, DataError, in_short


def attribute_of_file(flag: str, name: str, kind: str) -> Callable:
    """Load path.py:name. kind: "function" or "class". Raises ConfigError if the file can't be run, or lacks it."""
    path, _, attribute = name.rpartition(":")
    file = Path(path).expanduser()
    if file.suffix != ".py" or not file.is_file():
        raise ConfigError(f"{flag} {name}: no Python file {path} found")
    spec = importlib.util.spec_from_file_location(f"functions_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{flag} {name}: {file} can't be run: {in_short(repr(error))}") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ConfigError(f"{flag} {name}: {file} has no {kind} {attribute}")
    return found


def function_of_file(flag: str, name: str, may_skip: bool = False) -> Callable[..., list[float]]:
    """Load path.py:function: a function from prompts, completions, references and ids to a list of numbers.

    Runs the file. The returned function takes these four lists, and optionally columns, further lists by name; it
    passes the user's function the lists that its parameters name, or all with **. may_skip: it may return None for a
    completion (becomes nan). Raises ConfigError if the function is missing; the returned function raises DataError if
    the user's has parameters without a list, or does not return such a list.
    """
    function = attribute_of_file(flag, name, "function")

    def of_all(
        prompts: list[str],
        completions: list[str],
        references: list[str],
        ids: list[str],
        columns: Mapping[str, list] | None = None,
    ) -> list[float]:
        own = {"prompts": prompts, "completions": completions, "references": references, "ids": ids}
        lists = _wanted(f"{flag} {name}", function, {**(columns or {}), **own})
        try:
            found = function(**lists)
        except Exception as error:
            raise DataError(f"{flag} {name} failed: {in_short(repr(error))}") from error
        try:
            values = list(found)
            numbers = [float(value) for value in values if not (may_skip and value is None)]
        except (TypeError, ValueError):
            values = numbers = None
        if values is None or len(values) != len(completions) or not all(map(math.isfinite, numbers)):
            expected = "a finite number, or None where it does not apply," if may_skip else "a finite number"
            raise DataError(
                f"{flag} {name} gave {in_short(repr(found))} for {len(completions)} answers: return a list with "
                f"{expected} for each"
            )
        return [math.nan if value is None else float(value) for value in values]

    return of_all


def _wanted(what: str, function: Callable, lists: dict[str, list]) -> dict[str, list]:
    """Select the lists that a function's parameters name, or all with **. Raises DataError if one is missing."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin
        return lists
    if missing := [each.name for each in parameters if _is_needed(each) and each.name not in lists]:
        raise DataError(
            f"{what} has the parameter {missing[0]!r}, but no list or column of the records has this name: use some "
            f"of {', '.join(lists)}, or give the parameter a default"
        )
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return lists
    return {each.name: lists[each.name] for each in parameters if each.name in lists}


def _is_needed(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind in (
        parameter.POSITIONAL_OR_KEYWORD,
        parameter.KEYWORD_ONLY,
    )
