"""The interface of extensions: the class of their flags, and an Extension object with optional slots.

extensions/<name>/flags.py defines the class Flags. It is imported to parse the command line: import nothing slow there.
extensions/<name>/extension.py defines the object `extension`. It is loaded only if a run uses the extension.
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
    import torch
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
    from llava_ds.export.layer_by_layer import Deadline
    from llava_ds.export.tensors import Entry
    from llava_ds.extensions.architecture import Architecture
    from llava_ds.extensions.plugin_slots import RecordFields
    from llava_ds.model.llava import LlavaModel
    from llava_ds.model.open.model_folder import ModelFolder
    from llava_ds.model.open.model_plan import ModelPlan
    from llava_ds.model.open.weights import Sources
    from llava_ds.model.vision import TowerPlan
    from llava_ds.runtime.mesh import Mesh
    from llava_ds.runtime.ranks import Ranks
    from llava_ds.tracking.flops import ModelFlops
    from llava_ds.tracking.run_files import RunFiles
    from llava_ds.train.objectives.objective import Objective
    from llava_ds.train.plan import Plan, PlanDraft
    from llava_ds.train.session import Session
    from llava_ds.train.start import Start
    from llava_ds.train.state import StepResult

# Properties of a run that some features need and others break, as worded in messages.
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
    "one_model": "a single model that trains",
}


class Axis(NamedTuple):
    """An axis of the device mesh other than the data axis.

    name: key in Mesh.places; flag: the flag that sets the size; order: above 0, the axis's ranks are adjacent; below 0,
    every rank of the axis has a whole data axis; divides_model: True if the axis's ranks process the same tokens with
    different parameters or shards; False if they share the tokens of every micro-batch; in_data: True if the axis
    consists of adjacent ranks of the data axis that hold different parameters and process different samples.
    """

    name: str
    flag: str
    size: int
    order: int
    divides_model: bool
    in_data: bool = False


class ObjectiveTraits(NamedTuple):
    """Requirements of an objective on records and model. The defaults describe supervised training.

    one_answer: trains only on the last answer of a record; pairs: records have two answers; labels: records may instead
    have one answer and a label, true for a good answer; draws: the model generates answers, to compare with the
    answers in the records; other_columns: judges answers by additional columns of the records; scores: the model has a
    value head and generates no text; second_model: a second model of the same size trains as a child module; metrics:
    names of eval metrics besides the loss; learning_rate: the objective's default, if the flag's is too high; needs:
    required keys of PROPERTIES, each with the reason; fields: record keys to store as Batch.extra["<objective>.<key>"].
    """

    one_answer: bool = False
    pairs: bool = False
    labels: bool = False
    draws: bool = False
    other_columns: bool = False
    scores: bool = False
    second_model: bool = False
    metrics: tuple[str, ...] = ()
    learning_rate: float | None = None
    needs: Mapping[str, str] = {}
    fields: "RecordFields | None" = None


class Drawing(NamedTuple):
    """The amount of sampling that each rank does in a step before it trains on the answers.

    prompts: number of prompts; at_once: prompts processed together; new_tokens: maximum per answer; max_length: maximum
    tokens of prompt plus answer; shares: the training pass computes a prompt once for all its answers; frozen_models:
    number of other models, each whole on every rank; updates: training passes; by_server: another process samples.
    """

    prompts: int
    max_length: int
    new_tokens: int
    at_once: int
    answers: int = 1
    shares: bool = False
    frozen_models: int = 0
    updates: int = 1
    by_server: bool = False

    @classmethod
    def of(cls, args: "Arguments", new_tokens: int, at_once: int, **more: object) -> "Drawing":
        """Create a Drawing from the core's flags. more: values of the fields that have defaults."""
        training = args.training
        prompts = training.per_device_train_batch_size * training.gradient_accumulation_steps
        return cls(prompts, args.data.model_max_length, new_tokens, min(prompts, at_once), **more)


class Number(NamedTuple):
    """A logged number. title: title of its chart in the report; bar: label in the progress bar, "" to leave it out."""

    title: str
    bar: str = ""


@dataclass(frozen=True)
class ExtensionFlags:
    """The base class of an extension's flags: a frozen dataclass with fields declared by config/flags.py.

    needs: required keys of PROPERTIES, each with the reason; breaks: keys of PROPERTIES that the extension makes false
    (both are properties if they depend on flag values); moments: additional optimizer values per trained weight; zeros:
    by flag, the effect of 0, or the flag to use if 0 is not allowed; numbers: logged numbers with a chart, by name;
    compiles: True if layers may be compiled; fuses: the flag that fuses layer kernels, for messages; needs_text: True
    if the model has to generate text; of_model: True if the flags define the model and are also stored in
    ModelArguments.own; differs: why the exported model computes other logits than in training, "" if it computes the
    same; data_path: path of the samples for takes_samples; judges: True if answers are rewarded by columns of records.
    keys: flags, by the dotted key of the DeepSpeed JSON that sets them; other_keys: other trainers' JSON keys for these
    settings, in the form of UNSUPPORTED in engine/ds_config/keys.py; other_names: other trainers' flag names, by flag;
    not_here: other trainers' flags without a counterpart, by reason.
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
    differs: ClassVar[str] = ""
    data_path: ClassVar[str | None] = None
    judges: ClassVar[bool] = False
    keys: ClassVar[Mapping[str, str]] = {}
    other_keys: ClassVar[Mapping[str, tuple[tuple, str]]] = {}
    other_names: ClassVar[Mapping[str, str]] = {}
    not_here: ClassVar[Mapping[str, str]] = {}

    @property
    def module_rate(self) -> float | None:
        """The learning rate of the extension's module; None for --learning_rate."""
        return None

    @property
    def evaluates(self) -> bool:
        """True if the extension adds metrics to evaluations."""
        return False

    @property
    def takes_samples(self) -> bool:
        """True if the extension reads samples: from data_path, else from the eval set, else from the training data."""
        return False

    @property
    def axis(self) -> Axis | None:
        """The mesh axis that the flags add."""
        return None

    @classmethod
    def in_json(cls, raw: Mapping[str, object], problems: list[str]) -> dict[str, tuple[object, str]]:
        """Return the values of flags that a DeepSpeed JSON sets, by flag, each with its key. May append to `problems`.

        Supports only flags for sizes: positive integers, or "auto".
        """
        return {flag: (raw[key], key) for key, flag in cls.keys.items() if raw.get(key) is not None}

    @property
    def mlp_tokens(self) -> int | None:
        """Number of tokens that an MLP of the language model processes at a time; None for all."""
        return None

    @property
    def adapted_parts(self) -> frozenset[str]:
        """The parts (vision_tower, projector, language_model) that train through adapter layers."""
        return frozenset()

    @property
    def packs(self) -> bool:
        """True if the model's weights are packed while they are read."""
        return False

    @property
    def frozen_folder(self) -> str | None:
        """Folder of a frozen model that stays in memory while another one trains, or None."""
        return None

    def features(self) -> Iterator[tuple[str, Mapping[str, str], tuple[str, ...]]]:
        """Yield each requested feature: its flag and value, its needs with reasons, and the properties it breaks."""
        if self.needs or self.breaks:
            yield self.requested_by(), self.needs, self.breaks

    def projector_files(self) -> dict[str, str]:
        """Return, by flag, an adapter's weight files that replace the model's projector, newline and tower."""
        return {}

    def identity(self) -> dict[str, object]:
        """Return values to compare on resume instead of flag values: for a path, the file's content."""
        return {}

    def converted(self) -> "tuple[ExtensionFlags, list[str]]":
        """Return the flags with parsed values, and a line for each value that can't be parsed."""
        return self, []

    def notes(self, args: "Arguments") -> Iterator[str]:
        """Yield a line for every given flag without an effect."""
        yield from ()

    @classmethod
    def saving_memory(cls, args: "Arguments", tokens: int, is_one_sample: bool) -> Iterator[str]:
        """Yield a line for each flag that would reduce memory use.

        tokens: number in a rank's largest micro-batch; is_one_sample: True if no micro-batch could be smaller.
        """
        yield from ()

    @property
    def rewinds(self) -> bool:
        """True if the extension may return the run to a checkpoint: then the data order is decided at run time."""
        return False

    def prepare(self, args: "Arguments") -> None:
        """Prepare before data are opened, in every script that opens data."""

    def traits(self, objective: str) -> ObjectiveTraits | None:
        """Return the traits of the named objective; None if the extension has no objectives."""
        return None

    def drawing(self, args: "Arguments") -> Drawing | None:
        """Return the amount of sampling in each step; None if the model samples no answers for training."""
        return None

    def problems(self, args: "Arguments") -> Iterator[str]:
        """Yield a line for every invalid flag, and for every conflict with other flags."""
        yield from ()

    @classmethod
    def inactive_problems(cls, args: "Arguments") -> Iterator[str]:
        """Yield a line for every problem with flags given at their defaults. These don't activate the extension."""
        yield from ()

    def json_problems(self, config: dict) -> Iterator[str]:
        """Yield a line for every conflict with the DeepSpeed JSON. config: the JSON with "auto" values filled in."""
        yield from ()

    def requested_by(self) -> str:
        """Return the first flag that differs from its default, with its value, for messages."""
        name = next(name for name, value in vars(self).items() if value != getattr(type(self), name))
        return f"--{name} {getattr(self, name)}"


class Phase(IntEnum):
    """The moments after an optimizer step, in the order in which hooks run.

    A request to stop is handled first: later hooks need to know that the step is the last. Numbers are logged before
    hooks judge them. A run that returns to a checkpoint must not evaluate or save the steps that it gave up.
    """

    STOP = 0
    AVERAGE = 1
    LOG = 2
    JUDGE = 3
    EVALUATE = 4
    SAVE = 5


@dataclass
class StepEnd:
    """The state after an optimizer step, passed from hook to hook.

    finished: this is the run's last step; stops: the run stops on request; read: the step results that were read from
    the device after this step; problems: reasons to end the run; at_checkpoint: the weights are those of the last
    checkpoint; keeps_all: don't delete older checkpoints; paused: don't count the time since the step as step time.
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
        """The number of the finished step."""
        return self.result.step

    @property
    def last(self) -> bool:
        """True if this is the last step of the run."""
        return self.finished or self.stops or bool(self.problems)

    def raise_problems(self) -> None:
        """Raise DataError, on every rank, if there are problems."""
        if self.problems:
            raise DataError("\n".join(map(str, self.problems)))

    def paused_s(self) -> float:
        """Return the seconds since the step that don't count towards the next step; 0 unless paused."""
        return time.perf_counter() - self.began if self.paused else 0.0


class Hook:
    """A hook between two steps, on every rank. Collectives are allowed: all ranks call hooks in the same order."""

    def __init__(self, session: "Session") -> None:
        self.session = session
        self.training = session.plan.args.training

    def begin(self) -> None:
        """Act before the first step."""

    def after_step(self, end: StepEnd) -> None:
        """Act after a step."""

    def flush(self) -> None:
        """Write buffered output before an error ends the run."""

    def close(self) -> None:
        """Act after the last step, unless training failed. Hooks are closed in reverse order."""

    def before_export(self) -> int | None:
        """Load the weights to export into the model. Returns their step; None for the last step."""

    def after_export(self) -> None:
        """Act after the export. If the run was asked to stop before its end, only the next start calls this."""


class Measure:
    """An extension's measurement during evaluations (Evaluation.measures). is_due and run are collective."""

    def is_due(self, step: int, last: bool) -> bool:
        """True if run() should be called at this step, after the eval loss. last: the run ends with this step."""
        return False

    def was_done(self, step: int) -> bool:
        """True if the run measured this step before it was resumed. Called on rank 0."""
        return False

    def run(self, step: int) -> None:
        """Measure, after the eval loss."""

    def scores(self, precision: "torch.autocast") -> dict[str, float]:
        """Return additional numbers for the evaluation, by name. precision: the engine's autocast. Collective."""
        return {}

    def why_over(self) -> str | None:
        """Return a reason to end the run, given the evaluations so far, or None. Called on rank 0."""


class EvalMeasure(NamedTuple):
    """An extension's measure at every evaluation, in Plan.own. create: builds the measure from the model before the
    engine starts and changes the model's modules (collective); numbers: names of the scores."""

    create: Callable[["LlavaModel"], Measure]
    numbers: tuple[str, ...]


class ReportPart:
    """An extension's part of report.html and the model card, from the files of a run that had its flags.

    extensions/<name>/report.py has a subclass named Report, if the extension reports anything.
    """

    is_over = False  # True if the extension ended the run before its last planned step

    def __init__(self, run: "RunFiles") -> None:
        """Read the run's files; they may be missing or damaged."""

    def sections(self) -> dict[str, list[dict[str, object]]]:
        """Return blocks by section title. Blocks for one of the core's sections are inserted at its beginning."""
        return {}

    def card(self) -> list[str]:
        """Return lines of the model card."""
        return []


class SessionPart:
    """The part of an extension that lives as long as a session. All methods are collective.

    updates: optimizer updates per step.
    """

    updates = 1

    def __init__(self, plan: "Plan", started: "Start") -> None:
        self.plan, self.ranks, self.mesh = plan, started.ranks, started.mesh

    def built(self, model: "LlavaModel") -> None:
        """Act on the model before the engine is created and changes its modules."""

    def started(self, runner: "Runner") -> None:
        """Act while the runner's engine has the initial weights, before a checkpoint is restored."""

    def windows(self, engine: "DeepSpeedEngine", done: int, plain: "Iterator[Window]") -> "Iterator[Window]":
        """Return the windows of the remaining steps after `done` steps. plain: the windows without the extension."""
        return plain

    def training_objective(self, plain: "Objective") -> "Objective":
        """Return the objective of training steps. plain: the objective of evaluations."""
        return plain


class Wrap:
    """An extension's changes to each model that trains, and to its engine.

    All methods are collective, called in the order of the table of extensions. Returned lines are printed.
    If the extension's flags are not of_model, only groups, kernels and started are called.
    """

    def check(self, args: "ModelArguments") -> None:
        """Raise ConfigError if a package is missing or a folder is wrong, before the model's folder is read."""

    def composed(
        self, text: "PreTrainedConfig", sources: "Sources", args: "ModelArguments"
    ) -> "tuple[PreTrainedConfig, Sources, list[str]]":
        """Return the language model's configuration and the sources of weights as changed by the extension, and lines
        to print. Raises ConfigError."""
        return text, sources, []

    def planned(self, plan: "ModelPlan", model: "LlavaModel", args: "ModelArguments") -> "ModelPlan":
        """Return the plan as changed by the extension. model: on the meta device."""
        return plan

    def weights_per_token(
        self, model: "LlavaModel", architecture: "Architecture | None", text: "PreTrainedConfig", args: "ModelArguments"
    ) -> dict[str, int]:
        """Return, by part, how many of the weights that filled() adds a token uses. model: on the meta device."""
        return {}

    def assembled(self, model: "LlavaModel", build: "Build") -> None:
        """Act on a model without weights."""

    def filled(self, model: "LlavaModel", build: "Build") -> None:
        """Act on a model after its weights are loaded."""

    def trains(self, model: "LlavaModel", args: "ModelArguments") -> None:
        """Choose the trained parameters, unless the flags select whole parts of the model."""

    def groups(self, groups: list[dict]) -> list[dict]:
        """Return the optimizer's parameter groups of a model as changed by the extension."""
        return groups

    def kernels(self, model: "LlavaModel", plan: "ModelPlan", resolved: "ResolvedConfig", ranks: "Ranks") -> list[str]:
        """Change the computation of a model that trains; it has its weights and no engine yet."""
        return []

    def started(self, new: "NewEngine") -> list[str]:
        """Act on the engine before its first step, and before the largest micro-batch is tried."""
        return []


class Adapter:
    """An export that is loaded on top of a complete model. write() and exact() are collective."""

    def write(self, export: "ExportPlan", model: "LlavaModel", folder: Path, ranks: "Ranks") -> "Written":
        """Write the adapter of a model in training; rank 0 returns the checksums of the tensors' bits."""
        raise NotImplementedError

    def exact(self, model: "LlavaModel") -> AbstractContextManager:
        """Return a context in which the model computes exactly like the model under the adapter."""
        return nullcontext()

    def compare(self, folder: Path, export: "ExportPlan", batch: "Batch", logits: "Tensor") -> float:
        """Open the folder, and compare its logits (T, V) with the trained model's, like compare_logits."""
        raise NotImplementedError

    def hold(self, export: "ExportPlan", base: "nn.Module", deadline: "Deadline") -> None:
        """Set the weights of a transformers model, opened from the base model's folder, to the base weights used while
        the adapter trained. Raises NotCompared if time or memory run out."""

    def merged(
        self, trained: "list[Entry]", base: "list[Entry]", export: "ExportPlan", checkpoint: Path
    ) -> "list[Entry]":
        """Return the complete model: a checkpoint's trained tensors merged into the initial weights."""
        raise NotImplementedError

    def write_restored(
        self, export: "ExportPlan", trained: "list[Entry]", base: "list[Entry]", checkpoint: Path, folder: Path
    ) -> "Written":
        """Write the adapter from a checkpoint, and return the checksums of the tensors' bits."""
        raise NotImplementedError


class StatePart(NamedTuple):
    """Tensors that a checkpoint stores in addition to the engine's files.

    file: file name in the checkpoint; of: returns a model's tensors by name. If it returns none, no file is written.
    """

    file: str
    of: "Callable[[LlavaModel], dict[str, Tensor]]"


class FolderForm:
    """A format of model folders that run/export.py writes: a value of its --format (Extension.choices).

    library: the library that opens it, for the model card.
    """

    library: ClassVar[str]

    def planned(self, export: "ExportPlan", dtype: str) -> "ExportPlan":
        """Return the plan of an export in this format.

        dtype: --dtype's value. Raises ConfigError for a model that can't be written.
        """
        raise NotImplementedError

    def write(self, export: "ExportPlan", entries: "list[Entry]", folder: Path) -> None:
        """Write the folder. entries: the model's tensors, under their names in this project."""
        raise NotImplementedError

    def usage(self, folder: str) -> str:
        """Return markdown on how to use the folder. folder: its name, quoted for a shell."""
        raise NotImplementedError


@dataclass(frozen=True)
class MeshPart:
    """An extension's functions for the mesh axis that its flags add. Every slot except `axis` is optional.

    cut: given the mesh, returns the function that cuts this rank's part out of a micro-batch (see
    data/shared_loader.py) and is sent to loader processes; adapt: changes a model with weights, trained or frozen, to
    accept such parts. owners: given a complete model, its FLOPs, its tower's plan and the axis size, returns the number
    of layers per rank, and the owning rank of each parameter by name; build: reduces a model without weights to this
    rank's part, and returns lines to print. divides: returns the parameters of a complete model that are split equally
    over the ranks after the engine has started; engine: returns additional arguments of deepspeed.initialize, in which
    "config" has entries to add to the resolved JSON; started: acts on the new engine; runner: builds the object that
    runs micro-batches, by default Direct in engine/runner.py.
    """

    axis: str
    cut: Callable[["Mesh"], "Cut"] | None = None
    adapt: Callable[["LlavaModel", "Mesh"], None] | None = None
    owners: Callable[["nn.Module", "ModelFlops", "TowerPlan", int], tuple[list[int], dict[str, int]]] | None = None
    build: Callable[["LlavaModel", "ModelPlan", "ModelArguments", "Mesh"], list[str]] | None = None
    divides: Callable[["nn.Module"], Collection["nn.Parameter"]] | None = None
    engine: Callable[["nn.Module", "Mesh"], dict[str, object]] | None = None
    started: Callable[["DeepSpeedEngine", "Mesh"], None] | None = None
    runner: Callable[["DeepSpeedEngine"], "Runner"] | None = None


@dataclass(frozen=True)
class Extension:
    """The slots of an extension besides its flags; every slot is optional."""

    check: Callable[["ResolvedConfig"], Iterator[str]] | None = None  # lines on conflicts with JSON or device
    # Lines on conflicts with a model's configuration.
    fits: Callable[["Arguments", "PreTrainedConfig"], Iterator[str]] | None = None
    plan: Callable[["PlanDraft"], object] | None = None  # reads, checks the run's inputs; returns Plan.own[name]
    choices: Mapping[str, Callable] = field(default_factory=dict)  # by core flag, the function for the added values
    store: Callable[[], ModuleType] | None = None  # loads the module that reads URLs of Trigger.schemes
    open_data: Callable[..., "EncodedDataset"] | None = None  # opens the training data, like open_together
    complete: Callable[["Plan", "Ranks"], object] | None = None  # like plan, but called after all other planning
    wrap: Wrap | None = None  # changes the model and its engine
    # Builds a module that trains as the model's child own_<name>. The extension's flags must be of_model.
    module: Callable[["PreTrainedConfig", "TowerPlan", "ModelArguments"], "nn.Module"] | None = None
    beside: Callable[["ModelArguments", "Path"], None] | None = None  # writes files next to an exported module
    adapter: Adapter | None = None  # exports an adapter instead of a complete model
    fields: "RecordFields | None" = None  # additional record keys that a plugin reads
    state: StatePart | None = None  # tensors that a checkpoint stores additionally
    objective: Callable[["Plan", "Mesh", "Objective"], "Objective"] | None = None  # replaces or wraps an objective
    part: type[SessionPart] | None = None  # lives as long as the session
    hooks: tuple[tuple[Phase, type[Hook]], ...] = ()  # run between steps
    folder: FolderPart | None = None  # reads folders of Trigger.model_types
    open_folder: Callable[[str, str | None], "ModelFolder"] | None = None  # (path, --model_base): see Trigger.opens
    text: TextPart | None = None  # for language models that need the extension even if no flag requests it
    mesh: MeshPart | None = None  # for the axis that its flags add
