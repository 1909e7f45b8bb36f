"""Load the files of --plugin. Each becomes an extension, like a folder of extensions/. Imported only with --plugin."""

import argparse
import collections
import dataclasses
import fnmatch
import functools
import hashlib
import importlib.util
import math
import os
import re
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from llava_ds.config.arguments import FLAGS, Arguments
from llava_ds.config.plugin_calls import check_class, checked, error_of_plugin
from llava_ds.constants import ConfigError, did_you_mean
from llava_ds.extensions import active
from llava_ds.extensions.base import (
    Adapter,
    Extension,
    ExtensionFlags,
    MeshPart,
    StatePart,
    Wrap,
)
from llava_ds.extensions.plugin_slots import ProjectorKind, RecordFields
from llava_ds.extensions.table import EXTENSIONS, Trigger

# Core flags to which a plugin can add its name as a value by Extension.choices, and the class of the choice.
CHOICES = {"mm_projector_type": ProjectorKind}
# Slots that only folders of extensions/ can have, because they need an entry in the table of extensions.
OF_FOLDERS = ("store", "folder", "open_folder", "text")
OF_CHECKPOINTS = (".*", "engine", "latest", "manifest.json", "trainer.json", "layout-*", "random-*", "zero_to_*")
CALLED = ("check", "fits", "plan", "open_data", "complete", "module", "beside", "objective")
VALUES = {"fields": RecordFields, "adapter": Adapter, "state": StatePart, "mesh": MeshPart}
NOT_TRIED = "a plugin whose Flags define no needs counts as untested with this"
UNTRIED = dict.fromkeys(("whole_matrices", "whole_layers", "whole_sample", "one_model"), NOT_TRIED)


def load_named(argv: Sequence[str], recipe: object = None) -> None:
    """Load the plugins that a command line names, or else those of the recipe. Raises ConfigError."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--plugin", nargs="+", action="extend", default=[])
    try:
        files = parser.parse_known_args(["--topic" if token in ("-h", "--help") else token for token in argv])[0].plugin
    except argparse.ArgumentError:
        raise ConfigError("--plugin needs the path of a Python file") from None
    load(files or ([] if recipe is None else [str(recipe)]))


def load(files: Iterable[str]) -> None:
    """Load plugins, and unload other plugins that this process loaded before. Raises ConfigError.

    files: paths, or several paths separated by commas.
    """
    given = [_read(file.strip()) for text in files for file in text.split(",")]
    for name in active.plugins():
        if all((EXTENSIONS[name].file, EXTENSIONS[name].digest) != (str(one.path), one.digest) for one in given):
            _forget(name)
    for one in dict.fromkeys(given):
        if (there := EXTENSIONS.get(one.path.stem)) is None:
            _load(one.path.stem, one)
        elif there.file != str(one.path):
            taken = f"two files are named {one.path.name}" if there.digest else "an extension has this name"
            raise ConfigError(f"--plugin {one.path}: {taken}: rename the file")


class _File(NamedTuple):
    """A plugin's file, its source, and the SHA-256 of the source."""

    path: Path
    source: bytes
    digest: str


def _read(file: str) -> _File:
    path = Path(os.path.expanduser(file)).absolute()
    if not re.fullmatch(r"[a-z][a-z0-9_]*\.py", path.name):
        raise ConfigError(f"--plugin {file}: name the file in small letters, digits and _, like my_idea.py")
    try:
        source = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--plugin {file} can't be read: {error.strerror}: give a Python file") from error
    return _File(path, source, hashlib.sha256(source).hexdigest())


def _forget(name: str) -> None:
    EXTENSIONS.pop(name, None)
    for module in ("extension", "flags"):
        sys.modules.pop(f"llava_ds.extensions.{name}.{module}", None)


def _load(name: str, file: _File) -> None:
    """Run a plugin's file, check its extension, and add the extension to EXTENSIONS."""
    where = f"--plugin {file.path}"
    module = _run(name, file)
    extension, flags = getattr(module, "extension", None), getattr(module, "Flags", None)
    if not isinstance(extension, Extension):
        found = "no value named extension" if extension is None else f"extension = {extension!r:.60}"
        raise ConfigError(f"{where} has {found}: write extension = Extension(...), as in docs/plugins.md")
    _check_slots(extension, where)
    for value in (extension.fields, *extension.choices.values()):
        if isinstance(value, (RecordFields, ProjectorKind)):
            active.refuse_unknown(vars(type(value)), type(value).__base__, f"{where}: {type(value).__name__}")
    for flag, kind in extension.choices.items():
        if flag not in CHOICES:
            known = f"a plugin can only add its name to the values of {', '.join(CHOICES)}"
            raise ConfigError(f"{where}: nothing reads choices of {flag!r}: {did_you_mean(flag, CHOICES, known)}")
        if not isinstance(kind, CHOICES[flag]):
            raise ConfigError(
                f"{where}: choices of {flag!r}: give a value of a class of extensions/plugin_slots.py's "
                f"{CHOICES[flag].__name__}"
            )
    own = [each for each in vars(module).values() if getattr(each, "__module__", None) == module.__name__]
    unread = [each for each in own if isinstance(each, type) and issubclass(each, ExtensionFlags)]
    if unread and flags is None:
        raise ConfigError(f"{where}: nothing reads the flags of {unread[0].__name__}: name the class Flags")
    module.Flags = _flags(name, flags, extension, where)
    spelled = [
        word.removeprefix("--")
        for each in dataclasses.fields(module.Flags)
        for word in (each.name, *each.metadata.get("aliases", ()), *[f"no_{each.name}"] * (each.default is True))
    ]
    _refuse_taken(spelled, where)
    sys.modules[f"llava_ds.extensions.{name}.flags"] = module
    EXTENSIONS[name] = Trigger(
        next(iter((module.__doc__ or "a plugin").strip().splitlines())).rstrip("."),
        " ".join(spelled),
        always=True,
        values={flag: (name,) for flag in extension.choices},
        file=str(file.path),
        digest=file.digest,
    )
    try:
        active.flags_class(name)
        active.active([name])
        module.extension = _checked(extension, module)
    except ConfigError:
        _forget(name)
        raise


def _check_slots(extension: Extension, where: str) -> None:
    """Raise ConfigError if a slot of the extension has an invalid value."""
    for slot in OF_FOLDERS:
        if getattr(extension, slot) is not None:
            raise ConfigError(
                f"{where}: {slot} of a plugin is never called: only folders of llava_ds/extensions have it"
            )
    for slot in CALLED:
        if (value := getattr(extension, slot)) is not None and not callable(value):
            raise ConfigError(f"{where}: {slot}: give a function with the arguments in extensions/base.py's Extension")
    for slot, kind in VALUES.items():
        value = getattr(extension, slot)
        if value is not None and (not isinstance(value, kind) or type(value) is Adapter):
            file = kind.__module__.rpartition(".")[2]
            raise ConfigError(f"{where}: {slot}: give a value of extensions/{file}.py's {kind.__name__}")
    if extension.state is not None:
        _check_state(extension.state, where)
    if not isinstance(extension.choices, Mapping):
        raise ConfigError(f"{where}: choices is {extension.choices!r:.60}: give {{'mm_projector_type': MyKind()}}")
    if not isinstance(extension.hooks, (tuple, list)) or not all(
        isinstance(pair, tuple) and len(pair) == 2 for pair in extension.hooks
    ):
        raise ConfigError(f"{where}: hooks: give pairs of a Phase and a class: ((Phase.LOG, MyHook),)")
    for name in ("names", "columns"):
        keys = getattr(extension.fields, name, ())
        if not (isinstance(keys, (tuple, list)) and all(isinstance(key, str) for key in keys)):
            one = keys if isinstance(keys, str) else "my_key"
            raise ConfigError(f"{where}: fields: {name} is {keys!r}: give a tuple of keys: ({one!r},)")


def _check_state(state: StatePart, where: str) -> None:
    """Raise ConfigError if the state's file would be outside a checkpoint, or would replace one of its files."""
    file = state.file
    is_name = isinstance(file, str) and os.path.basename(file) == file != ""
    if not is_name or any(fnmatch.fnmatch(file, own) for own in OF_CHECKPOINTS):
        raise ConfigError(f"{where}: state: file is {file!r:.60}: give a name of its own, like 'my_idea.pt'")


def _checked(extension: Extension, module: ModuleType) -> Extension:
    """Check the signatures of all functions, and wrap the functions to check their results. Returns the extension."""
    values = map(type, (extension.wrap, extension.fields, extension.adapter, *extension.choices.values()))
    for kind in (extension.part, *(hook for _, hook in extension.hooks), *values):
        if isinstance(kind, type) and kind.__module__ == module.__name__:
            check_class(kind)
    functions = {}
    for slot in CALLED:
        if function := getattr(extension, slot):
            takes, gives = typing.get_args(typing.get_args(Extension.__annotations__[slot])[0])
            functions[slot] = checked(function, None if takes is ... else takes, gives, slot)
    if (state := extension.state) is not None:
        functions["state"] = state._replace(of=checked(state.of, ["model"], "dict[str, Tensor]", "state"))
    return dataclasses.replace(extension, **functions)


def _run(name: str, file: _File) -> ModuleType:
    """Run a file as a module. Raises ConfigError that names the line of any error, or of an exit."""
    full, path = f"llava_ds.extensions.{name}.extension", file.path
    module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(full, path))
    sys.modules[full] = module
    try:
        # Don't use the loader (it would read the file again): the digest must be that of the code that runs.
        exec(compile(file.source, path, "exec"), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[full]
        found = (
            error_of_plugin(error, [str(path)])
            or f"--plugin {path}:{error.lineno or 1}: {type(error).__name__}: {error}"
        )
        raise ConfigError(found + _hint(error, path)) from error
    return module


def _hint(error: BaseException, path: Path) -> str:
    """Return a hint to append to an error's message, for example the right name of a slot; "" if there is none."""
    if isinstance(error, SyntaxError) and ("unicode error" in error.msg or "null bytes" in error.msg):
        return ": save the file as UTF-8"
    if isinstance(error, ModuleNotFoundError) and (path.parent / f"{error.name.rpartition('.')[2]}.py").exists():
        return ": a plugin is one file, and can't import others of its folder: put the code into it"
    found = re.fullmatch(r"Extension\.__init__\(\) got an unexpected keyword argument '(\w+)'.*", str(error))
    if found is None:
        return ""
    known = [field.name for field in dataclasses.fields(Extension)]
    slots = ", ".join(known)
    return f": {did_you_mean(found[1], known, f'the slots are {slots}')}"


def _flags(name: str, given: object, extension: Extension, where: str) -> type[ExtensionFlags]:
    """Check the plugin's class of flags, and set the attributes that it does not define. Returns the class."""
    is_class = isinstance(given, type) and issubclass(given, ExtensionFlags) and "__dataclass_fields__" in vars(given)
    if given is not None and not is_class:
        raise ConfigError(f"{where}: Flags: give a frozen dataclass of extensions/base.py's ExtensionFlags")
    if is_class:
        check_class(given)
        _check_numbers(given, where)
    else:
        given = dataclasses.make_dataclass("Flags", [], bases=(ExtensionFlags,), frozen=True)
    for field in dataclasses.fields(given):
        flag = field.metadata.get("flag")
        if flag is None or flag.group != name:
            raise ConfigError(f'{where}: Flags.{field.name}: declare it by a function from flags_of("{name}")')
        try:
            field.metadata["help"] % collections.defaultdict(int)  # as argparse does
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{where}: Flags.{field.name}: write % in its help as %% ({error})") from error
    if "needs" not in vars(given):
        given.needs = UNTRIED
    if "requested_by" not in vars(given):
        given.requested_by = functools.partialmethod(_requested_by, where)
    if extension.mesh is not None and given.axis is ExtensionFlags.axis:
        raise ConfigError(f"{where}: nothing reads mesh without an axis: define Flags.axis, which returns an Axis")
    given.of_model = given.of_model or extension.module is not None or _changes_model(extension.wrap)
    given.differs = given.differs or getattr(extension.part, "differs", "")
    given.problems = functools.partialmethod(_problems, given.problems, extension, where)
    return given


def _changes_model(wrap: Wrap | None) -> bool:
    """True if a wrap overrides a method that is called only for extensions that change the model."""
    names = [name for name in vars(Wrap) if name[0] != "_" and name not in ("groups", "kernels", "started")]
    return isinstance(wrap, Wrap) and any(getattr(type(wrap), name) is not getattr(Wrap, name) for name in names)


def _check_numbers(given: type[ExtensionFlags], where: str) -> None:
    """Raise ConfigError if a number for the log can't be formatted."""
    for number in () if isinstance(given.numbers, property) else given.numbers.values():
        try:
            number.bar.format(0.5)
        except (AttributeError, IndexError, KeyError, ValueError) as error:
            raise ConfigError(
                f"{where}: Flags.numbers has {number!r:.80} ({error}): give a Number for each name, with a title "
                "and a text like 'loss {:.3f}'"
            ) from error


def _requested_by(flags: ExtensionFlags, where: str) -> str:
    given = (name for name, value in vars(flags).items() if value != getattr(type(flags), name))
    return next((f"--{name} {getattr(flags, name)}" for name in given), where)


def _problems(
    flags: ExtensionFlags, plain: Callable, extension: Extension, where: str, args: Arguments
) -> Iterator[str]:
    """Yield problems of the flags, and of slots that other features of the run would ignore."""
    yield from plain(flags, args)
    rate = flags.module_rate
    if rate is not None and not (isinstance(rate, (int, float)) and 0 <= rate < math.inf):
        yield f"{where}: Flags.module_rate is {rate!r:.60}: give a number from 0, or None for --learning_rate"
    adapted, objective = (
        sorted(part for own in args.own.values() for part in own.adapted_parts),
        args.training.objective,
    )
    if extension.module is not None and adapted:
        yield f"{where} has a module, but the export of an adapter ({', '.join(adapted)}) can't hold it: leave one out"
    if extension.fields is not None and extension.fields.names and objective != "sft":
        yield f"{where} reads fields of records, but --objective {objective} does not pass them on: give sft"


def _refuse_taken(names: Iterable[str], where: str) -> None:
    for name in names:
        owner = "a flag of the core" if name in FLAGS else f"a flag of {', '.join(active.owners([name]))}"
        if name in FLAGS or active.owners([name]):
            raise ConfigError(f"{where}: --{name} is {owner}: give it another name")
