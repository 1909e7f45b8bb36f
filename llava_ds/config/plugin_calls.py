"""Calls of a plugin's functions: their arguments, what they return, and the place of an error. For --plugin only."""

import inspect
import logging
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import wraps
from pathlib import Path

from llava_ds.constants import ConfigError, DataError
from llava_ds.extensions.table import EXTENSIONS

# Result types by name: a class to check with isinstance, or an attribute that the result must have.
TYPES = {"int": int, "dict": dict, "Mapping": Mapping, "list": list, "tuple": tuple, "Iterator": Iterable}
TYPES |= {"Module": "named_parameters", "Objective": "scales", "EncodedDataset": "fingerprint", "Tensor": "dtype"}
ELEMENTS = {"str": str, "dict": dict, "Window": "micro_batches"}  # types of elements in lists and iterators
# Report errors in these at once: they run in other processes, or where the model's folder would be blamed.
CAUGHT = {"module": ConfigError, "build": ConfigError, "convert": DataError, "load": DataError}


def place(function: object, line: int | None = None) -> str:
    """Return the file, line (by default the first) and name of a plugin's function."""
    function = getattr(function, "__wrapped__", function)
    code = getattr(function, "__code__", None) or getattr(function, "f_code", None)
    if isinstance(function, type):
        return f"--plugin {sys.modules[function.__module__].__file__}: {function.__qualname__}"
    if code is None:
        return f"--plugin: {function!r}"
    return f"--plugin {code.co_filename}:{line or code.co_firstlineno} in {code.co_qualname}"


def returned(function: object, found: object, expected: str) -> ConfigError:
    """Return the error for a value that a plugin's function returned. expected: what to return instead."""
    shown = f"{' '.join(repr(found).split()):.60}"
    if hasattr(found, "dtype"):
        shown = f"{str(found.dtype).removeprefix('torch.')} {tuple(found.shape)} on {found.device}"
    return ConfigError(f"{place(function)} returned {shown}, expected {expected}")


def error_of_plugin(error: BaseException, files: Collection[str] = ()) -> str | None:
    """Describe an error by the innermost line of a plugin that led to it, or None.

    files: by default those of all loaded plugins. With --verbose, prints the traceback.
    """
    files, frames = files or {trigger.file for trigger in EXTENSIONS.values() if trigger.digest}, []
    while error is not None and not frames:
        found, walked = error, list(traceback.walk_tb(error.__traceback__))
        frames = [each for each in walked if each[0].f_code.co_filename in files]
        error = found.__cause__ or found.__context__
    if not frames:
        return None
    if logging.getLogger("llava_ds.details").level == logging.INFO:
        traceback.print_exception(found)
    frame, line = frames[-1]
    text = f"{place(frame, line)}: {type(found).__name__}: {' '.join(str(found).split())}"
    if isinstance(found, KeyError):
        extras = [getattr(value, "extra", None) for value in frame.f_locals.values()]
        known = next((each for each in extras if isinstance(each, dict) and found.args[0] not in each), None)
        text += "" if known is None else f" is no key of Batch.extra, which has {', '.join(sorted(known)) or 'none'}"
    (last, at), package = walked[-1], str(Path(__file__).parents[1])
    return f"{text} (raised at {file}:{at})" if (file := last.f_code.co_filename).startswith(package) else text


def checked(function: Callable, takes: object, gives: object, name: str) -> Callable:
    """Wrap a function of a plugin so that its result is checked. Raises ConfigError if it takes other arguments.

    takes: the arguments' names, None for any; gives: the annotation of the result; name: of the slot or method.
    """
    if takes is not None:
        signature = inspect.signature(function)
        try:
            signature.bind(*takes)
        except TypeError:
            given = f"{signature}, but is called with ({', '.join(takes)})"
            raise ConfigError(f"{place(function)} takes {given}: write these arguments") from None
    expected = gives if isinstance(gives, str) else inspect.formatannotation(gives).replace("collections.abc.", "")
    outer, _, inner = expected.partition("[")
    kind = TYPES.get(outer.rpartition(".")[2])
    inner = ELEMENTS.get(inner.partition("[")[0].rstrip("]").rpartition(".")[2])

    @wraps(function)
    def call(*given: object, **named: object) -> object:
        try:
            found = function(*given, **named)
        except Exception as error:
            if isinstance(error, (ConfigError, DataError)) or name not in CAUGHT:
                raise
            raise CAUGHT[name](error_of_plugin(error) or f"{place(function)}: {error}") from error
        if not _is_of(found, kind):
            raise CAUGHT.get(name, ConfigError)(str(returned(function, found, expected)))
        if kind == "named_parameters":
            _check_dtypes(function, found)
        if name == "load":
            _check_loaded(function, found, given[0].names)
        if name == "groups" and not (
            found and all(isinstance(one, dict) and {"params", "lr"} <= {*one} for one in found)
        ):
            raise returned(function, found, "groups that have params and lr, like the argument")
        if kind is Iterable:
            return _elements(function, found, inner, expected)
        return list(_elements(function, found, inner, expected)) if kind is list else found

    return call if kind or name in CAUGHT else function


def _is_of(found: object, kind: type | str | None) -> bool:
    """True if a value is an instance of a class, or has an attribute; always for None."""
    return kind is None or (isinstance(found, kind) if isinstance(kind, type) else hasattr(found, kind))


def _elements(function: Callable, found: Iterable, kind: type | str | None, expected: str) -> Iterator:
    """Yield the elements. Raises ConfigError if one is not of this kind."""
    for each in found:
        if not _is_of(each, kind):
            raise returned(function, each, f"elements of {expected}")
        if kind == "micro_batches" and not each.micro_batches:
            raise returned(function, each, "windows with micro-batches")
        yield each


def _check_loaded(function: Callable, found: Mapping, names: Collection[str]) -> None:
    """Raise DataError for values that are not CPU tensors, and for keys not in `names`."""
    for key, value in found.items():
        if key not in names:
            raise DataError(f"{place(function)} returned the key {key!r}, expected one of {', '.join(names)}")
        if getattr(getattr(value, "device", None), "type", None) != "cpu":
            raise DataError(str(returned(function, value, f"a tensor on the CPU as {key!r}")))


def _check_dtypes(function: Callable, module: object) -> None:
    """Raise ConfigError for parameters that don't have torch's default dtype, the model's."""
    import torch

    wanted = torch.get_default_dtype()
    for name, parameter in module.named_parameters():
        if parameter.dtype != wanted:
            found, wanted = (str(each).removeprefix("torch.") for each in (parameter.dtype, wanted))
            raise ConfigError(
                f"{place(function)} returned a module with {found} in {name}, expected {wanted}, the model's: give "
                "layers no dtype, and convert what they compute"
            )


def check_class(kind: type) -> None:
    """Wrap the methods that a plugin's class overrides. Raises ConfigError for other arguments, or a missing method."""
    bases = [each for each in kind.__mro__ if each.__module__ != kind.__module__]
    for base in bases[:-1]:
        for name, plain in vars(base).items():
            owner = next(each for each in kind.__mro__ if each is base or name in vars(each))
            if not (inspect.isfunction(plain) and inspect.isfunction(vars(owner)[name])):
                continue
            signature = inspect.signature(plain)
            if owner not in bases:
                given = [*signature.parameters], signature.return_annotation, name
                setattr(owner, name, checked(vars(owner)[name], *given))
            elif owner is base and "NotImplementedError" in plain.__code__.co_names:
                file = sys.modules[kind.__module__].__file__
                raise ConfigError(f"--plugin {file}: {kind.__name__} has no {name}: define {name}{signature}")
