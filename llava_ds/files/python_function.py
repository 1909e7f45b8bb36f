"""Load a function or a class from a Python file that a flag names. The file runs with the user's permissions."""

import importlib.util
import inspect
import math
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path

from llava_ds.constants import ConfigError, DataError, in_short


def attribute_of_file(flag: str, name: str, kind: str) -> Callable:
    """Run a file, and return name (path.py:NAME) in it. kind: "function" or "class". Raises ConfigError on failure."""
    path, _, attribute = name.rpartition(":")
    file = Path(path).expanduser()
    if file.suffix != ".py" or not file.is_file():
        raise ConfigError(f"{flag} {name}: no Python file {path} found")
    spec = importlib.util.spec_from_file_location(f"functions_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(
            f"{flag} {name}: {file} can't be run{raised_at(error, name)}: {type(error).__name__}: {in_short(error)}"
        ) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ConfigError(f"{flag} {name}: {file} has no {kind} {attribute}")
    return found


def function_of_file(flag: str, name: str, may_skip: bool = False) -> Callable[..., list[float]]:
    """Load a user's function path.py:function that scores completions, and return a checked wrapper.

    The wrapper takes lists of prompts, completions, references and ids, and optionally more lists by name (columns). It
    passes the lists that the user's function has as parameters, or all if that has **. may_skip: True if the function
    may return None for a completion (becomes nan). Raises ConfigError if the function is missing. The wrapper
    raises DataError if a parameter has no list, or if the result is not a number per completion.
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
            found = list(found) if isinstance(found, Iterator) else found
        except Exception as error:
            at = _judged(error, completions)
            which = f"the first of {len(completions)} answers" if at is None else "the answer"
            raise DataError(
                f"{flag} {name} failed{raised_at(error, name)}: {in_short(repr(error))}\n"
                f"  {which}: {in_short(repr(completions[at or 0]))}\n"
                f"  to the prompt: {in_short(repr(prompts[at or 0]))}, of record {in_short(ids[at or 0])}"
            ) from error
        try:
            return _as_numbers(found, completions, may_skip)
        except ValueError as error:
            expected = "a finite number, or None where it does not apply," if may_skip else "a finite number"
            raise DataError(
                f"{flag} {name} gave {error}: return a list with {expected} for each of the {len(completions)} answers"
            ) from None

    return of_all


def raised_at(error: Exception, name: str) -> str:
    """Return " at FILE:LINE" for the last line of the user's file in a traceback, or "". name: path.py:attribute."""
    path = name.rpartition(":")[0]
    real = os.path.abspath(os.path.expanduser(path))
    lines = [each.lineno for each in traceback.extract_tb(error.__traceback__) if each.filename == real]
    return f" at {path}:{lines[-1]}" if lines else ""


def _judged(error: Exception, completions: list[str]) -> int | None:
    """Return the index of the answer that is a local variable in the error's traceback, the innermost frame first."""
    at = {id(text): i for i, text in reversed(list(enumerate(completions)))}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][1:]
    held = (id(value) for frame in reversed(frames) for value in frame.f_locals.values())
    return next((at[each] for each in held if each in at), 0 if len(completions) == 1 else None)


def _as_numbers(found: object, completions: list[str], may_skip: bool) -> list[float]:
    """Convert a function's result to floats, None to nan. Raises ValueError that describes an invalid result."""
    try:
        values = None if isinstance(found, (str, bytes, Mapping, Set)) else list(found)
    except TypeError:
        values = None
    if values is None or len(values) != len(completions):
        found_what = "which is not a list" if values is None else f"a list of {len(values)}"
        raise ValueError(f"{in_short(repr(found))}, {found_what}")
    numbers = []
    for value, text in zip(values, completions):
        try:
            numbers.append(math.nan if may_skip and value is None else float(value))
        except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several numbers
            numbers.append(math.inf)
        if not math.isfinite(numbers[-1]) and not (may_skip and value is None):
            raise ValueError(f"{in_short(repr(value))} for the answer {in_short(repr(text))}")
    return numbers


def _wanted(what: str, function: Callable, lists: dict[str, list]) -> dict[str, list]:
    """Select the lists that a function has as parameters, or all if it has **. Raises DataError if one is missing."""
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
