"""The flags of a training run, under LLaVA's and Hugging Face's names: three core sections, and one per extension.

parsing.py parses them.
"""

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llava_ds.config.data_flags import DataArguments
from llava_ds.config.flags import Flag
from llava_ds.config.model_flags import (
    TUNING_FLAGS,
    ModelArguments,
    adapted_parts,
    chosen_parts,
    trained_parts,
    trains_new_rows,
    trains_projector_only,
)
from llava_ds.config.training_flags import TrainingArguments, steps_go_across_epochs
from llava_ds.extensions.active import flags_class, owners, requested
from llava_ds.extensions.base import Axis, ExtensionFlags, ObjectiveTraits
from llava_ds.extensions.table import EXTENSIONS

__all__ = [
    "FLAGS",
    "SECTIONS",
    "TUNING_FLAGS",
    "Arguments",
    "DataArguments",
    "ModelArguments",
    "TrainingArguments",
    "adapted_parts",
    "chosen_parts",
    "every_flag",
    "every_objective",
    "every_section",
    "flag_default",
    "flags_free_on_resume",
    "steps_go_across_epochs",
    "trained_parts",
    "trains_new_rows",
    "trains_projector_only",
]


def declared_by(section: object) -> dict[str, Flag]:
    """Return the flags declared by a section or its class."""
    return {field.name: field.metadata["flag"] for field in dataclasses.fields(section) if "flag" in field.metadata}


SECTIONS = (ModelArguments, DataArguments, TrainingArguments)  # the core's; each extension has its own section
FLAGS = {name: flag for section in SECTIONS for name, flag in declared_by(section).items()}


def loaded(own: Mapping[str, ExtensionFlags], core: Iterable[object] = ()) -> dict[str, ExtensionFlags]:
    """Select the extensions of a run, in the order of EXTENSIONS: those that are always on, that a core flag requests,
    or that have a flag with another value than its default. own: flags by extension; core: the core's sections."""
    values = {name: value for section in core for name, value in vars(section).items()}
    found = {name: flags_class(name)() for name in requested(values)}
    by_flags = {name: flags for name, flags in own.items() if not EXTENSIONS[name].adds and flags != type(flags)()}
    found |= {name: own[name] for name in found if name in own} | by_flags
    return {name: found[name] for name in EXTENSIONS if name in found}


def traits_of(objective: str, own: Mapping[str, ExtensionFlags]) -> ObjectiveTraits:
    """Return the traits of an objective of the core or of an extension."""
    traits = next(filter(None, (flags.traits(objective) for flags in own.values())), ObjectiveTraits())
    return traits._replace(other_columns=True) if any(flags.judges for flags in own.values()) else traits


@dataclass(frozen=True)
class Arguments:
    """The flags of a run, in sections.

    given: names of the flags that the user gave, on the command line or in a recipe; own: the extensions' sections.
    """

    model: ModelArguments
    data: DataArguments
    training: TrainingArguments
    given: frozenset[str]
    own: Mapping[str, ExtensionFlags] = field(default_factory=lambda: loaded({}))

    def __post_init__(self) -> None:
        of_model = {name: flags for name, flags in self.own.items() if flags.of_model}
        if self.model.own != of_model:
            model = dataclasses.replace(self.model)
            object.__setattr__(model, "own", of_model)
            object.__setattr__(self, "model", model)

    @property
    def sections(self) -> list[object]:
        """All sections, including the extensions'."""
        return [self.model, self.data, self.training, *self.own.values()]

    @property
    def flags(self) -> dict[str, Flag]:
        """Declarations of all flags of the run, by name."""
        return {name: flag for section in self.sections for name, flag in declared_by(section).items()}

    @property
    def traits(self) -> ObjectiveTraits:
        """Traits of the run's objective."""
        return traits_of(self.training.objective, self.own)

    @property
    def own_models(self) -> dict[str, Path]:
        """Model folders in the values of extensions' flags, by flag."""
        flags = {name: flag for section in self.own.values() for name, flag in declared_by(section).items()}
        values = self.as_dict()
        return {name: Path(values[name]) for name in flags if flags[name].path == "model" and values[name] is not None}

    @property
    def extra_moments(self) -> int:
        """Number of values per trained weight that extensions add to the optimizer's states."""
        return sum(flags.moments for flags in self.own.values())

    @property
    def compiles(self) -> bool:
        """True if an extension may compile layers."""
        return any(flags.compiles for flags in self.own.values())

    @property
    def fuses(self) -> bool:
        """True if an extension replaces parts of layers with fused kernels."""
        return any(flags.fuses for flags in self.own.values())

    @property
    def mlp_tokens(self) -> int | None:
        """Tokens that an MLP of the language model processes at a time; None for all."""
        return next((flags.mlp_tokens for flags in self.own.values() if flags.mlp_tokens is not None), None)

    @property
    def rewinds(self) -> bool:
        """True if an extension may rewind the run to an earlier checkpoint."""
        return any(flags.rewinds for flags in self.own.values())

    @property
    def all_axes(self) -> tuple[Axis, ...]:
        """Axes of the mesh in the order in which ranks are laid out; axes inside the data axis come last."""
        found = (flags.axis for flags in self.own.values())
        axes = (axis for axis in found if axis is not None and axis.size > 1)
        return tuple(sorted(axes, key=lambda axis: (axis.in_data, axis.order)))

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Axes outside the data axis. Ranks along these axes have the same samples."""
        return tuple(axis for axis in self.all_axes if not axis.in_data)

    def size_of(self, axis: str) -> int:
        """Number of ranks on an axis; 1 if the run does not have it."""
        return next((each.size for each in self.all_axes if each.name == axis), 1)

    @property
    def broken(self) -> frozenset[str]:
        """Keys of PROPERTIES that do not hold in this run because of extensions' flags."""
        return frozenset(key for flags in self.own.values() for *_, breaks in flags.features() for key in breaks)

    @property
    def ranks_per_sample(self) -> int:
        """Number of ranks that train on the same samples."""
        return math.prod(axis.size for axis in self.axes)

    @property
    def ranks_per_token(self) -> int:
        """Number of ranks among which the tokens of every micro-batch are divided."""
        return math.prod(axis.size for axis in self.axes if not axis.divides_model)

    @property
    def zeros(self) -> dict[str, str]:
        """Effect of the value 0, for flags of extensions that accept it."""
        return {name: what for flags in self.own.values() for name, what in flags.zeros.items()}

    @property
    def evaluates(self) -> bool:
        """True if evaluations have something to measure."""
        data = self.data
        own = any(flags.evaluates for flags in self.own.values())
        return bool(data.eval_fraction) or data.eval_data_path is not None or own

    def replaced(self, **values: object) -> "Arguments":
        """Return a copy with new values for flags of any section."""

        def with_values(section: object) -> object:
            return dataclasses.replace(section, **{k: v for k, v in values.items() if k in declared_by(section)})

        model, data, training = map(with_values, (self.model, self.data, self.training))
        core = model, data, training
        own = {**{name: flags_class(name)() for name in requested(values)}, **loaded(self.own, core)}
        own = loaded({name: with_values(flags) for name, flags in own.items()}, core)
        return dataclasses.replace(self, model=model, data=data, training=training, own=own)

    def as_dict(self) -> dict[str, object]:
        """Map every flag of the run to its value."""
        return {name: getattr(section, name) for section in self.sections for name in declared_by(section)}

    def same_on_every_rank(self) -> dict[str, object]:
        """Map the flags that must be equal on all ranks to their values. Leaves out paths and per-machine flags."""
        flags = self.flags
        return {
            f"--{name}": value
            for name, value in self.as_dict().items()
            if flags[name].path is None and not flags[name].per_machine
        }


def every_objective() -> dict[str, ObjectiveTraits]:
    """Map the objectives that extensions add to their traits."""
    names = [(name, value) for name, trigger in EXTENSIONS.items() for value in trigger.adds.get("objective", ())]
    return {value: flags_class(name)().traits(value) for name, value in names}


def every_section() -> list[type]:
    """List the classes of all sections, including those of extensions that no flag requests."""
    return [*SECTIONS, *map(flags_class, EXTENSIONS)]


def every_flag() -> dict[str, Flag]:
    """Return the declarations of all flags, including those of extensions that no flag requests."""
    return {name: flag for section in every_section() for name, flag in declared_by(section).items()}


def declared_in(names: Collection[str]) -> dict[str, Flag]:
    """Return the declarations of the core's flags, and of all flags of extensions that own any of these names."""
    return {**FLAGS, **{flag: of for name in owners(names) for flag, of in declared_by(flags_class(name)).items()}}


def flags_free_on_resume(flags: Mapping[str, Flag], rewinds: bool = False) -> set[str]:
    """Return the names of the flags that a resumed run may change freely. rewinds: Arguments.rewinds."""
    return {name for name, flag in flags.items() if flag.resume == "free" or (flag.resume == "rewind" and not rewinds)}


def flag_default(name: str) -> object:
    """Return the default of a flag, or None for an unknown name."""
    sections = (*SECTIONS, *map(flags_class, owners([name])))
    return next((getattr(section, name) for section in sections if hasattr(section, name)), None)


def rate_note(args: Arguments) -> list[str]:
    """Return a line if the learning rate is the default and too high for the objective, or []."""
    training, usual = args.training, args.traits.learning_rate
    is_default = "learning_rate" not in args.given and training.learning_rate == type(training).learning_rate
    if usual is None or not is_default:
        return []
    return [
        f"--learning_rate {training.learning_rate:g} is the default of tuning on answers: give one for --objective "
        f"{training.objective} (usually about {usual:g})"
    ]
