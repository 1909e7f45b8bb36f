"""What an extension may add to a run: flags, and a value with optional slots.

extensions/<name>/flags.py has the class Flags, which is read with the command line and imports nothing that takes time.
extensions/<name>/extension.py has the value `extension`, and is loaded when a run has the extension.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from llava_ds.constants import DataError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from llava_ds.batch import Batch
    from llava_ds.config.arguments import Arguments
    from llava_ds.data.collate import LoadedSample
    from llava_ds.engine.ds_config.resolve import ResolvedConfig
    from llava_ds.export.bit_check import Written
    from llava_ds.export.export_plan import ExportPlan
    from llava_ds.export.tensors import Entry
    from llava_ds.geometry import ImageOptions
    from llava_ds.layouts import MediaLayout
    from llava_ds.model.open.folder import ModelFolder
    from llava_ds.model.plan import ModelPlan
    from llava_ds.model.vision import TowerPlan
    from llava_ds.train.session import Session
    from llava_ds.train.state import StepResult

# What a feature may need of a run, and another one take away, in the words of a message.
PROPERTIES = {
    "whole_matrices": "whole matrices on every rank",
    "whole_layers": "all layers on every rank",
    "whole_sample": "all tokens of a sample on one rank",
    "trained_layers": "a language model whose layers all train",
    "routerless_mlps": "MLPs without routers",
    "dense_mlps": "dense MLPs",
    "plain_weights": "weights that are not packed",
}


class ExtensionFlags:
    """The base of an extension's flags, a frozen dataclass of fields that config/flags.py declares.

    needs: keys of PROPERTIES, and why the extension can't do without; breaks: those that it takes away from others (a
    property where values decide, of either); moments: numbers that the optimizer keeps for
    each trained weight beside its own; zeros: what a 0 of a flag switches off, or of one that takes none is meant to.
    """

    needs: ClassVar[Mapping[str, str]] = {}
    breaks: ClassVar[tuple[str, ...]] = ()
    moments: ClassVar[int] = 0
    zeros: ClassVar[Mapping[str, str]] = {}

    @property
    def rewinds(self) -> bool:
        """True if the extension may take the run back to a checkpoint: then what is read, and when, decides."""
        return False

    def problems(self, args: "Arguments") -> Iterator[str]:
        """A line for everything that is wrong with these flags, or beside others."""
        yield from ()

    def asked_by(self) -> str:
        """The flag that asks for the extension, as it would be written: the first that has not its default."""
        name = next(name for name, value in vars(self).items() if value != getattr(type(self), name))
        return f"--{name} {getattr(self, name)}"


class Phase(IntEnum):
    """The moments after an optimizer step, in their order, which is the policy.

    A request to stop is heard first, so that what follows knows which step is the last; numbers are written before
    anything judges them; a run that goes back to a checkpoint neither evaluates nor saves what it gave up.
    """

    STOP = 0
    AVERAGE = 1
    LOG = 2
    JUDGE = 3
    EVALUATE = 4
    SAVE = 5


@dataclass
class StepEnd:
    """The boundary after an optimizer step, handed from hook to hook.

    finished: the run's last step; stops: the run was asked to stop here; read: the results, with numbers, of the steps
    that were read from the device here; problems: reasons why the run has to end; at_checkpoint: the weights are those
    of the last checkpoint; keeps_all: no older checkpoint gives way to the next one; paused: the time since the step is
    not a step's.
    """

    result: "StepResult"
    finished: bool
    stops: bool = False
    read: list["StepResult"] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    at_checkpoint: bool = False
    keeps_all: bool = False
    paused: bool = False
    began: float = field(default_factory=time.perf_counter)

    @property
    def step(self) -> int:
        """The number of the step that is done."""
        return self.result.step

    @property
    def last(self) -> bool:
        """True if nothing comes after this step."""
        return self.finished or self.stops or bool(self.problems)

    def raise_problems(self) -> None:
        """End the run, on every rank, if there are reasons to. Raises DataError."""
        if self.problems:
            raise DataError("\n".join(self.problems))

    def paused_s(self) -> float:
        """Seconds since the step that are not the next step's."""
        return time.perf_counter() - self.began if self.paused else 0.0


class Hook:
    """Something that acts between two steps, on every rank. Collectives are allowed: all ranks call in one order."""

    def __init__(self, session: "Session") -> None:
        self.session = session
        self.training = session.plan.args.training

    def begin(self) -> None:
        """Act before the first step."""

    def after_step(self, end: StepEnd) -> None:
        """Act after a step."""

    def flush(self) -> None:
        """Write what waits, before an error ends the run."""

    def close(self) -> None:
        """Act after the last step, if training ended as it should. Hooks are closed in the reverse of their order."""

    def after_export(self) -> None:
        """Act when the model is exported, which a run that was asked to stop leaves to the next start."""


class TensorNames(Protocol):
    """Names of an architecture's tensors. Here they are those of tower, projector and language model."""

    def from_part(self, name: str) -> str:
        """Return the name in transformers' class of a tensor here."""

    def to_memory(self, on_disk: str) -> str | None:
        """Return the name in transformers' class of a tensor in a folder; None for what the class does not have."""


class Architecture(Protocol):
    """A model of one class of transformers', which is trained with its own tower, connector, template and processor.

    kind: what it is, as messages say it; config: of the whole model; casts_pixels: False if its tower takes pixels in
    fp32, whatever its weights are in.
    """

    kind: str
    config: "PreTrainedConfig"
    casts_pixels: bool

    def outer_class(self) -> "type[PreTrainedModel]":
        """Return transformers' class."""

    def open_tokenizer(self, path: str, where: str) -> "PreTrainedTokenizerBase":
        """Open the tokenizer of a folder. where: as messages begin. Raises ConfigError."""

    def plan_tower(self, folder: Path, tokenizer: "PreTrainedTokenizerBase", where: str) -> "TowerPlan":
        """Plan the tower from the processor's files in a folder. Raises ConfigError."""

    def problems(self, args: "Arguments", kind: str) -> list[str]:
        """Return lines on flags that don't go with the model. kind: what it is, as a message says it."""

    def sharing_problems(self, args: "Arguments") -> list[str]:
        """Return those on ranks that share parts of the model, which the DeepSpeed JSON may ask for, too."""

    def try_out(self, plan: "ModelPlan", images: "ImageOptions", cache_dir: str) -> str:
        """Compare a small copy with transformers' class. Returns a line. Raises ConfigError where they differ."""

    def names(self, text_config: "PreTrainedConfig") -> TensorNames:
        """Return the names of its tensors."""

    def entries(self, export: "ExportPlan", entries: "list[Entry]") -> "list[Entry]":
        """Return the tensors to write by their names on disk."""

    def write(self, export: "ExportPlan", entries: "list[Entry]", output_dir: Path, holes: bool) -> "Written":
        """Write the folder, as transformers_folder.write_hf does."""

    def write_changed_settings(self, export: "ExportPlan", output_dir: Path) -> None:
        """Write the processor's files beside an adapter, where the run's settings are not those of its base."""

    def saved_modules(self, names: Sequence[str]) -> list[str]:
        """Return the fewest modules of transformers' class that hold these tensors of tower and connector."""

    def first_inputs(
        self,
        model: "PreTrainedModel",
        batch: "Batch",
        layouts: "list[MediaLayout]",
        pixels: "torch.Tensor",
        num_positions: int,
    ) -> "dict[str, torch.Tensor]":
        """Return arguments of transformers' class for the first positions of a sample, with the layouts of its images.

        pixels (N, 3, S, S), normalised. Raises NotCompared where it can't compute them.
        """

    def prompt_inputs(
        self, model: "PreTrainedModel", samples: "list[LoadedSample]", batch: "Batch", pixels: "torch.Tensor"
    ) -> "dict[str, torch.Tensor]":
        """Return arguments of generate() for prompts, (B, T) and padded on the left. batch: of all of them."""


class FolderPart(Protocol):
    """The model folders that an extension reads. model_types: of their config.json."""

    model_types: Collection[str]

    def read(self, path: str, config: dict, where: str) -> "ModelFolder":
        """Read a folder with one of Trigger.model_types. config: its config.json; where: as messages begin.

        Raises ConfigError, also for those that are not in model_types, with the reason.
        """

    def missing(self, config: dict) -> list[str]:
        """Return parts that a config.json has to have, and lacks."""

    def architecture(self, config: "PreTrainedConfig") -> Architecture:
        """Return the architecture of a configuration with one of model_types."""


@dataclass(frozen=True)
class Extension:
    """What an extension adds beside its flags; every slot is optional.

    check: lines on what the resolved DeepSpeed JSON makes impossible; hooks: what acts between steps, by phase; folder:
    model folders that it reads.
    """

    check: Callable[["ResolvedConfig"], Iterator[str]] | None = None
    hooks: tuple[tuple[Phase, type[Hook]], ...] = ()
    folder: FolderPart | None = None
