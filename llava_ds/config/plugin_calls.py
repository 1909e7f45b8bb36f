"""Check the arguments and results of a plugin's functions, and locate errors in them. Used with --plugin only."""

import inspect
import logging
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import CodeType, FrameType
from weakref import WeakValueDictionary

from llava_ds.constants import ConfigError, DataError
from llava_ds.extensions.table import EXTENSIONS

# Result types by name: a class to check with isinstance, or an attribute that the result must have.
TYPES = {"int": int, "dict": dict, "Mapping": Mapping, "list": list, "tuple": tuple, "Iterator": Iterable}
TYPES |= {"Module": "named_parameters", "Objective": "scales", "EncodedDataset": "fingerprint", "Tensor": "dtype"}
TYPES |= {"ModelPlan": "text_config", "Axis": "divides_model", "str": str, "None": type(None)}
ELEMENTS = {"str": str, "dict": dict, "Window": "micro_batches", "Tensor": "dtype"}  # types of elements
# Convert errors of these functions at once: they run in other processes, or in code that blames the model's folder.
CAUGHT = {"module": ConfigError, "build": ConfigError, "convert": DataError, "load": DataError}


def place(function: object, line: int | None = None) -> str:
    """Return the file, line (by default the first) and name of a plugin's function."""
    function = getattr(function, "__wrapped__", function)
    code = function if isinstance(function, CodeType) else None
    code = code or getattr(function, "__code__", None) or getattr(function, "f_code", None)
    if isinstance(function, type):
        return f"--plugin {sys.modules[function.__module__].__file__}: {function.__qualname__}"
    if code is None:
        return f"--plugin: {function!r}"
    return f"--plugin {code.co_filename}:{line or code.co_firstlineno} in {code.co_qualname}"


def returned(function: object, found: object, expected: str) -> ConfigError:
    """Return the error for a value that a plugin's function returned. expected: what to return instead."""
    return ConfigError(f"{place(function)} returned {described(found):.300}, expected {expected}")


def described(value: object) -> str:
    """Describe a value briefly. Tensors, also in a tuple or dictionary, are described by dtype, shape and device."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        kind = "" if type(value).__name__ in ("Tensor", "Parameter") else f"{type(value).__name__} "
        return (
            f"{kind}{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)} on {getattr(value, 'device', 'cpu')}"
        )
    if isinstance(value, (tuple, list)) and 0 < len(value) < 5:
        return f"({', '.join(map(described, value))})"
    if isinstance(value, Mapping) and len(value) < 5:
        return f"{{{', '.join(f'{key!r}: {described(each)}' for key, each in value.items())}}}"
    return f"{' '.join(repr(value).split()):.60}"


@contextmanager
def last_returned() -> Iterator[list]:
    """Record the last return of a plugin's function. Yields a list that is set to its code, line and value."""
    files, found, before = _files(), [], sys.getprofile()

    def record(frame: FrameType, event: str, value: object) -> None:
        if event == "return" and frame.f_code.co_filename in files:
            found[:] = frame.f_code, frame.f_lineno, value

    sys.setprofile(record)
    try:
        yield found
    finally:
        sys.setprofile(before)


def _files() -> set[str]:
    """Return the files of all loaded plugins."""
    return {trigger.file for trigger in EXTENSIONS.values() if trigger.digest}


def error_of_plugin(error: BaseException, files: Collection[str] = ()) -> str | None:
    """Describe an error and the innermost line of a plugin in its traceback; None if no plugin is in it.

    files: the plugins' files, by default of all loaded plugins. With --verbose, the traceback is printed.
    """
    files, frames = files or _files(), []
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
    """Wrap a plugin's function to check its results. Raises ConfigError if its signature has the wrong arguments.

    takes: names of the arguments, None for any; gives: annotation of the result; name: name of the slot or method.
    """
    if takes is not None:
        signature = inspect.signature(function)
        try:
            signature.bind(*takes)
        except TypeError:
            given = f"{signature}, but is called with ({', '.join(takes)})"
            slot = "" if getattr(function, "__name__", name) == name else f" as {name}"
            raise ConfigError(f"{place(function)} takes {given}{slot}: write these arguments") from None
    expected = gives if isinstance(gives, str) else inspect.formatannotation(gives).replace("collections.abc.", "")
    kinds = [TYPES.get(each.partition("[")[0].rpartition(".")[2]) for each in expected.split(" | ")]
    kind = None if None in kinds or expected == "None" else kinds[0] if len(kinds) == 1 else tuple(kinds)
    inner = expected.partition("[")[2]
    length = inner.count(",") + 1  # number of elements, if it is a tuple
    inner = ELEMENTS.get(inner.partition("[")[0].rpartition(", ")[2].rstrip("]").rpartition(".")[2])

    @wraps(function)
    def call(*given: object, **named: object) -> object:
        try:
            found = function(*given, **named)
            if kind == "named_parameters" and hasattr(found, kind):
                _check_module(function, found)
        except Exception as error:
            if isinstance(error, TypeError) and error.__traceback__.tb_next is None:  # the call itself failed
                raise CAUGHT.get(name, ConfigError)(f"{place(function)}: {error}: write other arguments") from error
            if isinstance(error, (ConfigError, DataError)) or name not in CAUGHT:
                raise
            raise CAUGHT[name](error_of_plugin(error) or f"{place(function)}: {error}") from error
        if not _is_of(found, kind) or (kind is tuple and len(found) != length):
            raise CAUGHT.get(name, ConfigError)(str(returned(function, found, expected)))
        if name == "load":
            _check_loaded(function, found, given[0].names)
        if name == "stride" and found < 1:
            raise returned(function, found, "a number from 1")
        if name == "groups":
            _check_groups(function, found, given[-1])
        if expected.startswith("dict") and inner == "dtype" and not all(_is_of(each, inner) for each in found.values()):
            raise returned(function, found, expected)
        if name == "windows":
            return _windows(function, _elements(function, found, inner, expected), given[0], given[2])
        if kind is Iterable:
            return _elements(function, found, inner, expected)
        return list(_elements(function, found, inner, expected)) if kind is list else found

    return call if kind or name in CAUGHT else function


def _is_of(found: object, kind: type | tuple | str | None) -> bool:
    """True if a value is an instance of the class, or has the attribute, or if kind is None. kind: one or several."""
    if kind is Iterable and isinstance(found, str):  # a string is iterable, too, but surely a mistake
        return False
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return any(
        each is None or (hasattr(found, each) if isinstance(each, str) else isinstance(found, each)) for each in kinds
    )


def _elements(function: Callable, found: Iterable, kind: type | str | None, expected: str) -> Iterator:
    """Yield the elements of a result. Raises ConfigError for an element of another kind."""
    for each in found:
        if not _is_of(each, kind):
            raise returned(function, each, f"elements of {expected}")
        yield each


def _windows(function: Callable, found: Iterator, part: object, done: int) -> Iterator:
    """Yield the windows of the steps after `done`. Raises ConfigError for too few windows, and for a repeated one."""
    count, seen = 0, WeakValueDictionary()
    for each in found:
        if not each.micro_batches:
            raise returned(function, each, "windows with micro-batches")
        first = each.micro_batches[0]
        if seen.get(id(first)) is first:
            raise ConfigError(f"{place(function)} yields a window twice, expected each once: Window.passes repeats one")
        seen[id(first)] = first
        count += 1
        yield each
    steps = part.plan.steps.num_steps - done
    if count < steps:
        raise ConfigError(f"{place(function)} yields {count} windows, expected one for each of the {steps} steps left")


def _check_groups(function: Callable, found: list, plain: list[dict]) -> None:
    """Raise ConfigError if a parameter group has no rate, or if a parameter is in two groups or in none."""
    is_right = found and all(isinstance(one, dict) and {"params", "lr"} <= {*one} for one in found)
    params = [each for one in found for each in one["params"]] if is_right else []
    rates = [one["lr"] for one in found] if is_right else []
    if not (
        params
        and all(hasattr(each, "grad") for each in params)
        and len({*map(id, params)}) == len(params)
        and {*map(id, params)} >= {id(each) for one in plain for each in one["params"]}
        and all(isinstance(rate, (int, float)) and rate >= 0 for rate in rates)
    ):
        raise returned(
            function, found, "groups that have params and lr, like the argument: each parameter once, and rates from 0"
        )


def _check_loaded(function: Callable, found: Mapping, names: Collection[str]) -> None:
    """Raise DataError if a loaded value is not a CPU tensor, or if its key is not in `names`."""
    for key, value in found.items():
        if key not in names:
            raise DataError(f"{place(function)} returned the key {key!r}, expected one of {', '.join(names)}")
        if getattr(getattr(value, "device", None), "type", None) != "cpu":
            raise DataError(str(returned(function, value, f"a tensor on the CPU as {key!r}")))


def _check_module(function: Callable, module: object) -> None:
    """Raise ConfigError if a parameter has no values, is not in state_dict(), or has not torch's default dtype."""
    import torch

    state, names = module.state_dict(), {name for name, _ in module.named_parameters(remove_duplicate=False)}
    buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    if not isinstance(state, dict) or (state.keys() ^ names) - buffers:
        found = ", ".join(state) or "nothing" if isinstance(state, dict) else described(state)
        raise ConfigError(
            f"{place(function)} returned a module whose state_dict() has {found:.200}, expected its parameters, "
            f"{', '.join(sorted(names))[:200] or 'none'}: leave state_dict() and get_extra_state() as in nn.Module"
        )
    for name, value in ((name, each) for part in module.modules() for name, each in vars(part).items()):
        if isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf:
            raise ConfigError(f"{place(function)}: {name} is a tensor with a gradient: make it an nn.Parameter")
    wanted = torch.get_default_dtype()
    for name, parameter in module.named_parameters():
        if torch.nn.parameter.is_lazy(parameter) or (parameter.is_meta and torch.get_default_device().type != "meta"):
            raise ConfigError(
                f"{place(function)} returned a module without values in {name}: give its shape, and no device"
            )
        if parameter.dtype != wanted:
            found, wanted = (str(each).removeprefix("torch.") for each in (parameter.dtype, wanted))
            raise ConfigError(
                f"{place(function)} returned a module with {found} in {name}, expected {wanted}, the model's: give "
                "layers no dtype, and convert what they compute"
            )


def _check_attribute(owner: type, name: str, plain: object) -> None:
    """Wrap a property that a plugin's class overrides, to check its values. Raises ConfigError if it is a method, has
    another type than the base class's value, or is a smaller number."""
    own, kind = vars(owner)[name], {dict: Mapping, tuple: Sequence}.get(type(plain), type(plain))
    if isinstance(plain, property) and inspect.isfunction(own):
        raise ConfigError(f"{place(own)}: {name} is a property: write @property above it")
    is_value = kind in (Mapping, Sequence, int, bool, str) and name[0] != "_" and not isinstance(own, property)
    if is_value and (not isinstance(own, kind) or (kind is int and own < plain)):
        least = f" from {plain}" if kind is int else ""
        raise ConfigError(f"{place(owner)}.{name} is {own!r:.60}, expected {kind.__name__}{least}")
    if isinstance(plain, property) and isinstance(own, property):
        gives = inspect.signature(plain.fget).return_annotation
        setattr(owner, name, property(checked(own.fget, ["self"], gives, name)))


def check_class(kind: type) -> None:
    """Check and wrap the methods that a plugin's class overrides. Raises ConfigError for wrong or missing ones."""
    bases = [each for each in kind.__mro__ if each.__module__ != kind.__module__]
    for base in bases[:-1]:
        for name, plain in vars(base).items():
            owner = next(each for each in kind.__mro__ if each is base or name in vars(each))
            if owner not in bases:
                _check_attribute(owner, name, plain)
            if not (inspect.isfunction(plain) and inspect.isfunction(vars(owner)[name])):
                continue
            signature = inspect.signature(plain)
            if owner not in bases:
                given = [*signature.parameters], signature.return_annotation, name
                setattr(owner, name, checked(vars(owner)[name], *given))
            elif owner is base and "NotImplementedError" in plain.__code__.co_names:
                file = sys.modules[kind.__module__].__file__
                raise ConfigError(f"--plugin {file}: {kind.__name__} has no {name}: define {name}{signature}")
