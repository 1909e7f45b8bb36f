"""What an extension may add to a run: flags, and a value with optional slots.

extensions/<name>/flags.py has the class Flags, which is read with the command line and imports nothing that takes time.
extensions/<name>/extension.py has the value `extension`, and is loaded when a run has the extension.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from llava_ds.constants import DataError
from llava_ds.extensions.architecture import FolderPart, TextPart

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine
    from torch import Tensor, nn
    from transformers import PreTrainedConfig

    from llava_ds.batch import Batch
    from llava_ds.config.arguments import Arguments, ModelArguments
    from llava_ds.data.dataset import EncodedDataset
    from llava_ds.data.loader import Window
    from llava_ds.data.shared_loader import Cut
    from llava_ds.engine.construct import Build
    from llava_ds.engine.ds_config.resolve import ResolvedConfig
    from llava_ds.engine.runner import Runner
    from llava_ds.engine.warm_up import NewEngine
    from llava_ds.export.bit_check import Written
    from llava_ds.export.export_plan import ExportPlan
    from llava_ds.export.tensors import Entry
    from llava_ds.extensions.architecture import Architecture
    from llava_ds.model.flops import ModelFlops
    from llava_ds.model.llava import LlavaModel
    from llava_ds.model.open.weights import Sources
    from llava_ds.model.plan import ModelPlan
    from llava_ds.runtime.mesh import Mesh
    from llava_ds.runtime.ranks import Ranks
    from llava_ds.tracking.run_files import RunFiles
    from llava_ds.train.objectives.objective import Objective
    from llava_ds.train.plan import Plan, PlanDraft
    from llava_ds.train.session import Session
    from llava_ds.train.start import Start
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
    "sharded_gradients": "gradients that ZeRO shards",
    "sharded_weights": "weights that ZeRO shards",
    "offload": "states in CPU memory",
    "known_samples": "all samples before the first step",
    "given_answers": "answers from records",
    "composed": "a model that flags compose",
    "one_model": "a single model that trains",
}


class Axis(NamedTuple):
    """An axis of the mesh beside that of the data.

    name: in Mesh.places; flag: that of its size; order: of ranks: an axis above 0 has ranks next to each other, one
    below has those of whole data axes; divides_model: its ranks hold other parameters, or parts of them, for the same
    tokens; otherwise they share the tokens of every micro-batch; in_data: it is a part of the data axis, and its ranks,
    which are next to each other, hold other parameters, each with samples of its own.
    """

    name: str
    flag: str
    size: int
    order: int
    divides_model: bool
    in_data: bool = False


class ObjectiveTraits(NamedTuple):
    """An objective as the core sees it: its records and its model. By default those of supervised answers.

    one_answer: of a record it learns the last answer alone; pairs: records have two answers; draws: the model draws
    answers, which those of records are compared with; scores: the model has a value head, and gives no text;
    second_model: a model as large trains as the model's child; metrics: numbers of an evaluation beside the loss;
    needs: keys of PROPERTIES, and why it can't do without.
    """

    one_answer: bool = False
    pairs: bool = False
    draws: bool = False
    scores: bool = False
    second_model: bool = False
    metrics: tuple[str, ...] = ()
    needs: Mapping[str, str] = {}


class Number(NamedTuple):
    """A number in the log. title: of its chart in the report; bar: its text in the progress bar, "" for none."""

    title: str
    bar: str = ""


@dataclass(frozen=True)
class ExtensionFlags:
    """The base of an extension's flags, a frozen dataclass of fields that config/flags.py declares.

    needs: keys of PROPERTIES, and why the extension can't do without; breaks: those that it takes away from others (a
    property where values decide, of either); moments: numbers that the optimizer keeps for each trained weight beside
    its own; zeros: what a 0 of a flag switches off, or of one that takes none is meant to; numbers: those that it logs
    and that have a chart, by their names; compiles: layers may be compiled; fuses: kernels of layers are fused, which
    the flag of this text asks for; needs_text: it has no use for a model that gives no text; of_model: the flags say
    what the model is, and are ModelArguments.own, too; data_path: that of takes_samples.
    keys: dotted keys of the DeepSpeed JSON that say what a flag says; other_keys: other trainers' keys of the same, as
    engine/ds_config/keys.py has UNSUPPORTED; other_names: other trainers' names of flags, by flag; not_here: such names
    without a counterpart, by the reason.
    """

    needs: ClassVar[Mapping[str, str]] = {}
    breaks: ClassVar[tuple[str, ...]] = ()
    moments: ClassVar[int] = 0
    zeros: ClassVar[Mapping[str, str]] = {}
    numbers: ClassVar[Mapping[str, Number]] = {}
    compiles: ClassVar[bool] = False
    fuses: ClassVar[str] = ""
    needs_text: ClassVar[bool] = False
    of_model: ClassVar[bool] = False
    data_path: ClassVar[str | None] = None
    keys: ClassVar[Mapping[str, str]] = {}
    other_keys: ClassVar[Mapping[str, tuple[tuple, str]]] = {}
    other_names: ClassVar[Mapping[str, str]] = {}
    not_here: ClassVar[Mapping[str, str]] = {}

    @property
    def evaluates(self) -> bool:
        """True if the extension gives numbers at evaluations."""
        return False

    @property
    def takes_samples(self) -> bool:
        """True if the extension reads samples: of data_path, or else of the eval set, or else those that are trained
        on."""
        return False

    @property
    def axis(self) -> Axis | None:
        """The axis of the mesh that the flags add."""
        return None

    @classmethod
    def in_json(cls, raw: Mapping[str, object], problems: list[str]) -> dict[str, tuple[object, str]]:
        """Return the values of flags that a DeepSpeed JSON gives, each with its key. Adds lines to problems.

        Only of flags of sizes so far: whole numbers from 1, or "auto".
        """
        return {flag: (raw[key], key) for key, flag in cls.keys.items() if raw.get(key) is not None}

    @property
    def mlp_tokens(self) -> int | None:
        """Tokens that an MLP of the language model takes at a time; None for all."""
        return None

    @property
    def adapted_parts(self) -> frozenset[str]:
        """The parts, of vision_tower, projector and language_model, that train by layers beside their own."""
        return frozenset()

    @property
    def packs(self) -> bool:
        """True if weights of the model are packed when they are read."""
        return False

    def features(self) -> Iterator[tuple[str, Mapping[str, str], tuple[str, ...]]]:
        """What flags ask for, as they would be written, with what it needs, and why, and what it breaks."""
        if self.needs or self.breaks:
            yield self.asked_by(), self.needs, self.breaks

    def projector_files(self) -> dict[str, str]:
        """Files of weights beside an adapter, in place of the model's projector, newline and tower, by their flag."""
        return {}

    def identity(self) -> dict[str, object]:
        """What counts of flags for a resumed run in place of their values, as the content at a path."""
        return {}

    def converted(self) -> "tuple[ExtensionFlags, list[str]]":
        """The flags as code reads them, and a line for each value that can't be read."""
        return self, []

    def notes(self, args: "Arguments") -> Iterator[str]:
        """A line for every flag that was given and changes nothing."""
        yield from ()

    @classmethod
    def saving_memory(cls, args: "Arguments", tokens: int, is_one_sample: bool) -> Iterator[str]:
        """A line for each flag by which a run needs less memory. tokens: of a rank's largest micro-batch;
        is_one_sample: no micro-batch could be smaller."""
        yield from ()

    @property
    def rewinds(self) -> bool:
        """True if the extension may take the run back to a checkpoint: then what is read, and when, decides."""
        return False

    def prepare(self, args: "Arguments") -> None:
        """Act before data are opened, in every script that does."""

    def traits(self, objective: str) -> ObjectiveTraits | None:
        """The traits of one of the extension's objectives, by its name; None without objectives."""
        return None

    def problems(self, args: "Arguments") -> Iterator[str]:
        """A line for everything that is wrong with these flags, or beside others."""
        yield from ()

    @classmethod
    def unasked(cls, args: "Arguments") -> Iterator[str]:
        """The same where flags were given, all with their defaults, so that the run does not have the extension."""
        yield from ()

    def json_problems(self, config: dict) -> Iterator[str]:
        """A line for everything in a DeepSpeed JSON that the flags don't go with. config: with its values filled in."""
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

    def before_export(self) -> int | None:
        """Change the model to the one that is exported; returns the step that it is of, where that is not the last."""

    def after_export(self) -> None:
        """Act when the model is exported, which a run that was asked to stop leaves to the next start."""


class ReportPart:
    """The part of an extension in report.html and the model card, from the files of a run that had its flags.

    extensions/<name>/report.py has a subclass named Report, where there is anything to say.
    """

    is_over = False  # True if the extension ended the run before its last planned step

    def __init__(self, run: "RunFiles") -> None:
        """Files may be missing or damaged."""

    def sections(self) -> dict[str, list[dict[str, object]]]:
        """Blocks by the title of a section; those of a section of the core stand at its beginning."""
        return {}

    def card(self) -> list[str]:
        """Lines of the model card."""
        return []


class SessionPart:
    """The part of an extension that lives as long as a session. All ranks call every method together.

    updates: optimizer updates of a step.
    """

    updates = 1

    def __init__(self, plan: "Plan", started: "Start") -> None:
        self.plan, self.ranks, self.mesh = plan, started.ranks, started.mesh

    def built(self, model: "LlavaModel") -> None:
        """Act on the model before the engine is started, which changes its modules."""

    def started(self, engine: "DeepSpeedEngine") -> None:
        """Act on the engine while it has the weights that the run starts from, before a checkpoint is restored."""

    def windows(self, engine: "DeepSpeedEngine", done: int, plain: "Iterator[Window]") -> "Iterator[Window]":
        """The windows of the steps that are left when `done` are done. plain: those without the extension."""
        return plain

    def of_steps(self, plain: "Objective") -> "Objective":
        """The objective of steps, where it is another than that of evaluations, which is plain."""
        return plain


class Wrap:
    """What an extension changes in each model that trains, and in the engine over them.

    All ranks call every method together, extensions in the order of the table. The lines that are returned are printed.
    Of flags that are not of_model, kernels and started alone are called.
    """

    def check(self, args: "ModelArguments") -> None:
        """Raise ConfigError where a package is missing, or a folder is wrong, before the model's folder is read."""

    def composed(
        self, text: "PreTrainedConfig", sources: "Sources", args: "ModelArguments"
    ) -> "tuple[PreTrainedConfig, Sources, list[str]]":
        """Return the language model's configuration and the weights' sources with what the extension makes of them,
        and lines about that. Raises ConfigError."""
        return text, sources, []

    def planned(self, plan: "ModelPlan", model: "LlavaModel", args: "ModelArguments") -> "ModelPlan":
        """Return the plan with what the extension makes of it. model: on the meta device."""
        return plan

    def weights_per_token(
        self, model: "LlavaModel", architecture: "Architecture | None", text: "PreTrainedConfig", args: "ModelArguments"
    ) -> dict[str, int]:
        """Numbers of weights, by part, that filled adds and that are used for a token. model: on the meta device."""
        return {}

    def assembled(self, model: "LlavaModel", build: "Build") -> None:
        """Act on a model without weights."""

    def filled(self, model: "LlavaModel", build: "Build") -> None:
        """Act on a model that has its weights."""

    def trains(self, model: "LlavaModel", args: "ModelArguments") -> None:
        """Choose what trains, where the parts that flags choose train and no others."""

    def groups(self, groups: list[dict]) -> list[dict]:
        """Return the optimizer's groups of parameters of a model with what the extension makes of them."""
        return groups

    def kernels(self, model: "LlavaModel", plan: "ModelPlan", resolved: "ResolvedConfig", ranks: "Ranks") -> list[str]:
        """Change how a model that trains computes, which has its weights and no engine yet."""
        return []

    def started(self, new: "NewEngine") -> list[str]:
        """Act on the engine before its first step, and before the largest micro-batch is tried."""
        return []


class Adapter:
    """An export that is no whole model, and opens over one. All ranks call write and exact together."""

    def write(self, export: "ExportPlan", model: "LlavaModel", folder: Path, ranks: "Ranks") -> "Written":
        """Write the adapter of a model in training; rank 0 returns the sums of the tensors' bits, others nothing."""
        raise NotImplementedError

    def exact(self, model: "LlavaModel") -> AbstractContextManager:
        """Context in which a model computes as the one that write's folder is opened over."""
        return nullcontext()

    def compare(self, folder: Path, export: "ExportPlan", batch: "Batch", logits: "Tensor") -> float:
        """Open the folder, and compare its logits (T, V) with the trained model's, as compare_logits does."""
        raise NotImplementedError

    def merged(
        self, trained: "list[Entry]", base: "list[Entry]", export: "ExportPlan", checkpoint: Path
    ) -> "list[Entry]":
        """The whole model, with what a checkpoint holds merged into what the run began with."""
        raise NotImplementedError

    def write_restored(
        self, export: "ExportPlan", trained: "list[Entry]", base: "list[Entry]", checkpoint: Path, folder: Path
    ) -> "Written":
        """Write the adapter of a checkpoint, and return the sums of the tensors' bits."""
        raise NotImplementedError


class StatePart(NamedTuple):
    """Tensors that a checkpoint has beside the engine's files. file: in the checkpoint; of: a model's, by name; where
    it has none, there is no file."""

    file: str
    of: "Callable[[LlavaModel], dict[str, Tensor]]"


class FolderForm:
    """A form of model folders that run/export.py writes: a value of its --format (Extension.choices).

    library: that opens it, for the model card.
    """

    library: ClassVar[str]

    def planned(self, export: "ExportPlan", dtype: str) -> "ExportPlan":
        """The plan of such an export. dtype: --dtype's value. Raises ConfigError for a model that can't be written."""
        raise NotImplementedError

    def write(self, export: "ExportPlan", entries: "list[Entry]", folder: Path) -> None:
        """Write the folder. entries: of the model, by their names here."""
        raise NotImplementedError

    def usage(self, folder: str) -> str:
        """How to use the folder, in markdown. folder: its name, quoted for a shell."""
        raise NotImplementedError


@dataclass(frozen=True)
class MeshPart:
    """The needs of the axis that an extension's flags add; every slot but its name is optional.

    cut: from the mesh, what cuts this rank's part out of a micro-batch, as data/shared_loader.py has it, to be sent to
    loader processes; adapt: lets a model with its weights, the one that trains or another, take such parts.
    owners: from a whole model, its FLOPs, the tokens of an image and the ranks on the axis, how many layers each rank
    has, and the rank that has each parameter, by name; build: leaves of a model without its weights what this rank has,
    and returns lines to print.
    divides: the parameters of a whole model of which each rank holds an equal part once the engine has started; engine:
    further arguments of deepspeed.initialize, "config" over the resolved JSON; started: acts on the engine that it
    returns; runner: makes what runs micro-batches, where that is not engine/runner.py's Direct.
    """

    axis: str
    cut: Callable[["Mesh"], "Cut"] | None = None
    adapt: Callable[["LlavaModel", "Mesh"], None] | None = None
    owners: Callable[["nn.Module", "ModelFlops", int, int], tuple[list[int], dict[str, int]]] | None = None
    build: Callable[["LlavaModel", "ModelPlan", "ModelArguments", "Mesh"], list[str]] | None = None
    divides: Callable[["nn.Module"], Collection["nn.Parameter"]] | None = None
    engine: Callable[["nn.Module", "Mesh"], dict[str, object]] | None = None
    started: Callable[["DeepSpeedEngine", "Mesh"], None] | None = None
    runner: Callable[["DeepSpeedEngine"], "Runner"] | None = None


@dataclass(frozen=True)
class Extension:
    """What an extension adds beside its flags; every slot is optional."""

    check: Callable[["ResolvedConfig"], Iterator[str]] | None = None  # lines on what JSON or device makes impossible
    fits: Callable[["Arguments", "PreTrainedConfig"], Iterator[str]] | None = None  # on a model's configuration
    plan: Callable[["PlanDraft"], object] | None = None  # reads and checks what the run will need: its Plan.own[name]
    choices: Mapping[str, Callable] = field(default_factory=dict)  # what its values of the core's flags do, by flag
    store: Callable[[], ModuleType] | None = None  # loads the module that reads URLs of Trigger.schemes
    open_data: Callable[..., "EncodedDataset"] | None = None  # opens the training data, as open_together does
    complete: Callable[["Plan", "Ranks"], object] | None = None  # the same as plan, once all else is planned
    wrap: Wrap | None = None  # changes the model and its engine
    adapter: Adapter | None = None  # how a model is exported that is no whole one
    state: StatePart | None = None  # what a checkpoint has beside the engine's files
    objective: Callable[["Plan", "Mesh", "Objective"], "Objective"] | None = None  # replaces or wraps one
    part: type[SessionPart] | None = None  # lives as long as the session
    hooks: tuple[tuple[Phase, type[Hook]], ...] = ()  # what acts between steps
    folder: FolderPart | None = None  # model folders that it reads
    text: TextPart | None = None  # language models that have it, whatever the flags say
    mesh: MeshPart | None = None  # of the axis that its flags add
