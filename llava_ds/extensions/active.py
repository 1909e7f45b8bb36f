"""Load an extension's flags if the command line gives any, and its code if the run uses the extension."""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from llava_ds.constants import ConfigError, did_you_mean
from llava_ds.extensions.architecture import Architecture, FolderPart, TextPart
from llava_ds.extensions.base import (
    PROPERTIES,
    Adapter,
    Extension,
    ExtensionFlags,
    Hook,
    MeshPart,
    Phase,
    ReportPart,
    SessionPart,
    StatePart,
    Wrap,
)
from llava_ds.extensions.table import EXTENSIONS

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

    from llava_ds.config.arguments import Arguments
    from llava_ds.data.dataset import EncodedDataset
    from llava_ds.engine.ds_config.resolve import ResolvedConfig
    from llava_ds.engine.warm_up import NewEngine
    from llava_ds.extensions.plugin_slots import RecordFields
    from llava_ds.model.llava import LlavaModel
    from llava_ds.model.open.folder import ModelFolder
    from llava_ds.model.open.model_plan import ModelPlan
    from llava_ds.runtime.mesh import Mesh
    from llava_ds.runtime.ranks import Ranks
    from llava_ds.tracking.run_files import RunFiles
    from llava_ds.train.objectives.objective import Objective
    from llava_ds.train.plan import Plan, PlanDraft
    from llava_ds.train.start import Start


@dataclass(frozen=True)
class Active:
    """The extensions of a run, by name, in the order of the table."""

    extensions: Mapping[str, Extension] = field(default_factory=dict)

    @property
    def hooks(self) -> list[tuple[Phase, type[Hook]]]:
        """The hooks of all extensions."""
        return [hook for each in self.extensions.values() for hook in each.hooks]

    @property
    def mesh_parts(self) -> tuple[MeshPart, ...]:
        """The mesh parts of all extensions."""
        return tuple(each.mesh for each in self.extensions.values() if each.mesh is not None)

    def check_model(self, args: "Arguments", config: "PreTrainedConfig") -> list[str]:
        """Return a line for every conflict with a language model. config: its configuration."""
        found = (each.fits for each in self.extensions.values() if each.fits is not None)
        return [line for fits in found for line in fits(args, config)]

    @property
    def open_data(self) -> Callable[..., "EncodedDataset"] | None:
        """The extensions' function that opens the training data; None if no extension has one."""
        return next((each.open_data for each in self.extensions.values() if each.open_data is not None), None)

    @property
    def wraps(self) -> list[Wrap]:
        """The wraps of all extensions."""
        return [each.wrap for each in self.extensions.values() if each.wrap is not None]

    @property
    def modules(self) -> dict[str, Callable[..., "nn.Module"]]:
        """The functions that build the extensions' modules, by extension name."""
        return {name: each.module for name, each in self.extensions.items() if each.module is not None}

    @property
    def adapter(self) -> Adapter | None:
        """The adapter to export; None to export a complete model."""
        return next((each.adapter for each in self.extensions.values() if each.adapter is not None), None)

    @property
    def states(self) -> list[StatePart]:
        """The tensors that checkpoints store in addition to the engine's files."""
        return [each.state for each in self.extensions.values() if each.state is not None]

    def kernels(self, model: "LlavaModel", plan: "ModelPlan", resolved: "ResolvedConfig", ranks: "Ranks") -> list[str]:
        """Change a model's computation. Returns lines to print."""
        return [line for wrap in self.wraps for line in wrap.kernels(model, plan, resolved, ranks)]

    def started(self, new: "NewEngine") -> list[str]:
        """Act on the engine before its first step. Returns lines to print."""
        return [line for wrap in self.wraps for line in wrap.started(new)]

    def check(self, resolved: "ResolvedConfig") -> None:
        """Raise ConfigError for conflicts with the resolved DeepSpeed JSON."""
        lines = [line for each in self.extensions.values() if each.check is not None for line in each.check(resolved)]
        if lines:
            raise ConfigError("\n".join(lines))

    def plan(self, draft: "PlanDraft") -> dict[str, object]:
        """Let the extensions plan, and return Plan.own."""
        return {name: each.plan(draft) for name, each in self.extensions.items() if each.plan is not None}

    def parts(self, plan: "Plan", started: "Start") -> list[SessionPart]:
        """Create the extensions' parts for a session."""
        return [each.part(plan, started) for each in self.extensions.values() if each.part is not None]

    def objective(self, plan: "Plan", mesh: "Mesh", plain: "Objective") -> "Objective":
        """Return the plain objective as replaced or wrapped by the extensions."""
        for each in self.extensions.values():
            plain = plain if each.objective is None else each.objective(plan, mesh, plain)
        return plain


def owners(flags: Collection[str]) -> list[str]:
    """Return the extensions that own these flags or aliases."""
    return [name for name, trigger in EXTENSIONS.items() if not set(trigger.flags.split()).isdisjoint(flags)]


def own_keys() -> list[str]:
    """Return the top-level keys of a DeepSpeed JSON that belong to an extension."""
    return [key for trigger in EXTENSIONS.values() for key in trigger.keys.split()]


def reading(keys: Collection[str]) -> list[str]:
    """Return the extensions that own these top-level keys of a DeepSpeed JSON."""
    return [name for name, trigger in EXTENSIONS.items() if not set(trigger.keys.split()).isdisjoint(keys)]


def plugins() -> dict[str, str]:
    """Return the sha256 of each loaded plugin, by name."""
    return {name: trigger.digest for name, trigger in EXTENSIONS.items() if trigger.digest}


# Record fields of the objective, by its name. Set when data are opened, so that forked loader processes inherit them.
OF_OBJECTIVE: "dict[str, RecordFields]" = {}


def plugin_entries(projector: str) -> dict[str, object]:
    """Return config.json's entries for all loaded plugins, and for those not needed to answer with this projector."""
    found, kind = plugins(), projector.partition(":")[0]
    free = [name for name in found if name != kind and not flags_class(name).differs]
    return {"llava_ds_plugin": found, "llava_ds_answers_without": free} if found else {}


def record_fields() -> "dict[str, RecordFields]":
    """Return the additional record keys that loaded plugins and the objective read, by plugin or objective."""
    found = {name: _extension(name).fields for name in plugins()} | OF_OBJECTIVE
    return {name: fields for name, fields in found.items() if fields is not None}


def no_fields() -> dict[str, None]:
    """Return the plugins' keys in Batch.extra, each with None, for a sample that has no such fields."""
    return {f"{name}.{key}": None for name in plugins() for key in getattr(_extension(name).fields, "names", ())}


def converters() -> "dict[str, RecordFields]":
    """Return the entries of record_fields() that convert records."""
    return {name: each for name, each in record_fields().items() if "convert" in vars(type(each))}


def requested(given: Mapping[str, object]) -> list[str]:
    """Return the extensions that these flags request. Giving an extension's own flag is enough, whatever the value."""
    return [name for name, trigger in EXTENSIONS.items() if trigger.requested(given)]


def flags_class(name: str) -> type[ExtensionFlags]:
    """Return the class of an extension's flags.

    Raises ConfigError if the class can't be loaded, or has an unknown attribute.
    """
    if not (EXTENSIONS[name].flags or EXTENSIONS[name].digest):
        return ExtensionFlags
    kind = _part(name, "flags", "Flags")
    where = f"{_path(name, 'flags')}: Flags"
    refuse_unknown(vars(kind).keys() - {field.name for field in dataclasses.fields(kind)}, ExtensionFlags, where)
    for names in (kind.needs, kind.breaks):
        for name in () if isinstance(names, property) else names:
            if name not in PROPERTIES:
                raise ConfigError(f"{where}: unknown property {name!r}: {_hint(name, PROPERTIES)}")
    return kind


def report_parts(run: "RunFiles") -> list[ReportPart]:
    """Return the report parts of extensions whose flags or files the run has."""

    def has_part(name: str) -> bool:
        there = [
            leaf
            for leaf in EXTENSIONS[name].leaves.split()
            if any((each / leaf).exists() for each in (run.output_dir, run.folder))
        ]
        return bool(there or name in owners(run.flags)) and (Path(__file__).parent / name / "report.py").is_file()

    parts = []
    for name in filter(has_part, EXTENSIONS):
        kind = _part(name, "report", "Report")
        refuse_unknown(vars(kind), ReportPart, f"llava_ds/extensions/{name}/report.py: Report")
        parts.append(kind(run))
    return parts


def active(names: Iterable[str], text: "PreTrainedConfig | None" = None) -> Active:
    """Load the code of the named extensions, and of those that a language model needs. text: its configuration.

    Raises ConfigError if one can't be loaded, or has an unknown attribute.
    """
    names = {*names, *(() if text is None else _of_text(text))}
    return Active({name: _extension(name) for name in EXTENSIONS if name in names})


def _of_text(config: "PreTrainedConfig") -> list[str]:
    return [
        name
        for name, trigger in EXTENSIONS.items()
        if config.model_type in trigger.text_types.split()
        or any(
            isinstance(value := getattr(config, field, None), dict) or value is True
            for field in trigger.text_fields.split()
        )
    ]


def text_part(config: "PreTrainedConfig") -> TextPart:
    """Load and return the text part of the extension that a language model needs, else a default that does nothing."""
    parts = (_extension(name).text for name in _of_text(config))
    return next((part for part in parts if part is not None), TextPart())


def values_of(flag: str) -> dict[str, str]:
    """Return the values of a flag that extensions add, with their titles."""
    return {value: each.title for each in EXTENSIONS.values() for value in each.values.get(flag, ())}


def folder_part(model_type: object) -> FolderPart | None:
    """Load and return the part of an extension that reads folders with this model_type; None if no extension does."""
    for name, trigger in EXTENSIONS.items():
        if model_type in trigger.model_types.split():
            return _extension(name).folder
    return None


def opener_of(file: str) -> Callable[[str, str | None], "ModelFolder"]:
    """Return the function that reads folders with this file, given path and --model_base. Raises ConfigError."""
    for name, trigger in EXTENSIONS.items():
        if trigger.opens == file:
            return _extension(name).open_folder
    raise ConfigError(f"no extension in llava_ds/extensions reads folders with {file}: give a folder without this file")


def architecture_of(config: "PreTrainedConfig") -> Architecture | None:
    """Return the architecture of a model's configuration; None if the core composes the model or nothing reads it."""
    part = folder_part(config.model_type)
    return part.architecture(config) if part is not None and config.model_type in part.model_types else None


def model_types() -> list[str]:
    """Load the extensions that read model folders, and return the model_types that they support."""
    parts = [_extension(name).folder for name, trigger in EXTENSIONS.items() if trigger.model_types]
    return [kind for part in parts for kind in part.model_types]


def choice(flag: str, value: object) -> Callable:
    """Return an extension's function for a value of a core flag. Raises ConfigError if no extension adds this value."""
    for name, trigger in EXTENSIONS.items():
        if value in trigger.values.get(flag, ()):
            return _extension(name).choices[flag]
    raise ConfigError(f"--{flag} {value} needs an extension that is not in llava_ds/extensions: give another value")


def store_of(url: str) -> ModuleType:
    """Return the module that reads a URL. Raises ConfigError if no extension does."""
    return _store(url.partition("://")[0].lower())


@functools.cache
def _store(scheme: str) -> ModuleType:
    for name, trigger in EXTENSIONS.items():
        if trigger.schemes == "*" or scheme in trigger.schemes.split():
            return _extension(name).store()
    raise ConfigError(f"no extension in llava_ds/extensions reads {scheme}:// URLs: give a path on this machine")


def _extension(name: str) -> Extension:
    trigger = EXTENSIONS[name]
    if not (trigger.flags or trigger.values or trigger.model_types or trigger.digest):  # only scripts of run/ use it
        return Extension()
    found: Extension = _part(name, "extension", "extension")
    path = _path(name, "extension")
    if found.part is not None:
        if not (isinstance(found.part, type) and issubclass(found.part, SessionPart)):
            raise ConfigError(f"{path}: part: give a class of extensions/base.py's SessionPart")
        refuse_unknown(vars(found.part), found.part.__base__, f"{path}: {found.part.__name__}")
    if found.wrap is not None:
        where = f"{path}: {type(found.wrap).__name__}"
        if not isinstance(found.wrap, Wrap):
            raise ConfigError(f"{where}: give a value of a class of extensions/base.py's Wrap")
        refuse_unknown(vars(type(found.wrap)), Wrap, where)
    if found.folder is not None:
        kind = type(found.folder)
        refuse_unknown(vars(kind), FolderPart, f"{path}: {kind.__name__}")
    if found.text is not None:
        kind = type(found.text)
        refuse_unknown(vars(kind), TextPart, f"{path}: {kind.__name__}")
    for phase, hook in found.hooks:
        where = f"{path}: {getattr(hook, '__name__', hook)}"
        if not (isinstance(phase, Phase) and isinstance(hook, type) and issubclass(hook, Hook)):
            raise ConfigError(f"{where}: a hook is a pair of a Phase and a subclass of Hook (extensions/base.py)")
        refuse_unknown(vars(hook), Hook, where)
    return found


def _part(name: str, module: str, attribute: str) -> object:
    """Import a module of an extension's folder, and return one of its attributes."""
    path = _path(name, module)
    try:
        loaded: ModuleType = importlib.import_module(f"llava_ds.extensions.{name}.{module}")
    except Exception as error:  # any error of the extension's code, with the extension's name
        raise ConfigError(f"{path} can't be loaded: {type(error).__name__}: {error}") from error
    if not hasattr(loaded, attribute):
        raise ConfigError(f"{path} has no {attribute}: {_hint(attribute, vars(loaded))}")
    return getattr(loaded, attribute)


def _path(name: str, module: str) -> str:
    """Return the file of an extension's module, for messages."""
    return EXTENSIONS[name].file or f"llava_ds/extensions/{name}/{module}.py"


def refuse_unknown(names: Iterable[str], base: type, where: str) -> None:
    """Raise ConfigError for a public name that the base class lacks: nothing would ever call it."""
    for name in names:
        if not name.startswith("_") and not hasattr(base, name):
            known = [each for each in dir(base) if not each.startswith("_")]
            raise ConfigError(
                f"{where}: nothing reads {name}: {_hint(name, known)} (a name of your own begins with an underscore)"
            )


def _hint(name: str, known: Iterable[str]) -> str:
    known = [each for each in known if not each.startswith("_")]
    return did_you_mean(name, known, f"give one of {', '.join(known)}")
