"""Plan a model from its folders: read configurations and tokenizer, and check names and shapes of all weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.initialization import no_init_weights

from llava_ds.config.arguments import ModelArguments
from llava_ds.config.model_flags import tower_folders
from llava_ds.constants import IMAGE_TOKEN, ConfigError
from llava_ds.extensions.active import active
from llava_ds.extensions.architecture import Architecture
from llava_ds.files.model_files import is_there, library_errors
from llava_ds.geometry import ImageSpec
from llava_ds.model.families.language import has_layer_embeddings, length_problem
from llava_ds.model.llava import assemble
from llava_ds.model.open import names as formats
from llava_ds.model.open.folder import PRETRAINED, projector_files, read_folder
from llava_ds.model.open.loading import check_depth, check_fit
from llava_ds.model.open.model_folder import FLAG, ModelFolder, without_prefix
from llava_ds.model.open.names import value_head_file
from llava_ds.model.open.probe import check_language_model
from llava_ds.model.open.tower import plan_tower, read_processor, read_tower
from llava_ds.model.open.weights import Source, Sources, TensorSource, WeightFiles, Weights
from llava_ds.model.projector import Newline, build_projector
from llava_ds.model.vision import TowerPlan
from llava_ds.tokenizer import note_rows, open_tokenizer, read_template, tokens_without_rows

# Settings that must be equal for --vision_tower to count as the tower in the model's folder.
_TOWER_SHAPE = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "image_size", "patch_size")


@dataclass(frozen=True)
class Parts:
    """The configurations of a model's parts, and the sources of their weights."""

    folder: ModelFolder
    text_config: PreTrainedConfig
    tower: TowerPlan
    sources: Sources

    def open_tokenizer(self) -> PreTrainedTokenizerBase:
        """Open the tokenizer, as LLaVA does or as the architecture requires."""
        return _open_tokenizer(self.folder)


def _open_tokenizer(folder: ModelFolder) -> PreTrainedTokenizerBase:
    where = f"{FLAG} {folder.path}"
    if folder.architecture is None:
        tokenizer = open_tokenizer(folder.tokenizer)
    else:
        tokenizer = folder.architecture.open_tokenizer(folder.tokenizer, where)
    if folder.base is not None:  # an adapter's folder has a template only if its variables differ
        tokenizer.chat_template = read_template(Path(folder.path), where) or tokenizer.chat_template
    return tokenizer


def read_parts(args: ModelArguments) -> Parts:
    """Read the parts that the flags select, without reading tensors. Raises ConfigError and DataError."""
    folder = read_folder(args.model_name_or_path, args.model_base)
    tower, own, rest = _tower_of(folder, args)
    projector, newline = folder.projector, folder.newline
    for flag, given in projector_files(args).items():
        projector = Source(flag, given, formats.projector_from_llava)
        brought = Source(flag, given, formats.newline_from_llava)
        if newline is None or brought.open().shapes:
            newline = brought
        trained = Source(flag, given, without_prefix(formats.tower_from_llava))
        if flag != PRETRAINED and trained.open().shapes:
            own, rest = trained, rest or own
    head = value_head_file(folder.path)
    value_head = None if head is None else Source(FLAG, str(head), lambda name: name)
    sources = Sources(
        folder.language_model, own, projector, newline, rest, value_head=value_head, own=own_sources(args)
    )
    return Parts(folder, folder.text_config, tower, sources)


def own_sources(args: ModelArguments) -> dict[str, Source]:
    """Return the sources of extensions' modules: the folder of the last projector file, else the model's folder."""
    folders = {FLAG: args.model_name_or_path}
    folders |= {flag: str(Path(file).parent) for flag, file in projector_files(args).items()}
    parts = [formats.OWN + name for name in active(args.own).modules]
    found = {part: (flag, formats.own_file(path, part)) for flag, path in folders.items() for part in parts}
    return {part: Source(flag, str(file), lambda name: name) for part, (flag, file) in found.items() if file}


def _tower_of(folder: ModelFolder, args: ModelArguments) -> tuple[TowerPlan, Source, Source | None]:
    """Return the tower's plan, the source of its weights, and the source of layers that the first lacks, or None."""
    if folder.architecture is not None:
        where, own = f"{FLAG} {folder.path}", Path(folder.path)
        files = (own / name for name in ("preprocessor_config.json", "processor_config.json"))
        if not any(map(is_there, files)):  # an adapter's folder has one only if its image sizes differ
            own = Path(folder.base or folder.path)
        return folder.architecture.plan_tower(own, _open_tokenizer(folder), where), folder.vision_tower, None
    given = args.vision_tower
    elsewhere = given and _tower_source(given, folder)
    if folder.vision_config is not None:
        if given is not None:
            _refuse_other_tower(folder, read_tower(given, args))
        where = f"{FLAG} {folder.path}"
        processor = read_processor(folder.base or folder.path, where)
        return plan_tower(folder.vision_config, processor, where, args), folder.vision_tower, None
    trained_with, width = folder.trained_with
    if given is None:
        was = f"; it was trained with {trained_with}" if trained_with else ""
        raise ConfigError(
            f"--vision_tower is missing: {FLAG} {folder.path} is {folder.kind}, and its tower is not on this "
            f"machine{was}: name the tower's folder"
        )
    tower = read_tower(given, args)
    if width is not None and width != tower.width:
        raise ConfigError(
            f"--vision_tower {given} has features {tower.width} wide, but {FLAG} {folder.path} was trained on "
            f"{trained_with}, {width} wide: give that one"
        )
    if folder.vision_tower is not None:
        return tower, folder.vision_tower, elsewhere
    return tower, elsewhere, None


def _tower_source(vision_tower: str, folder: ModelFolder) -> Source:
    """Return the source of the one or two towers that --vision_tower names."""
    flag, (first, *others) = "--vision_tower", tower_folders(vision_tower)
    beside = [Source(flag, other, formats.second_tower_from_disk) for other in others]
    return Source(flag, first, formats.tower_from_disk, folder.tower_changes, *beside)


def _refuse_other_tower(folder: ModelFolder, given: TowerPlan) -> None:
    own = folder.vision_config
    other = [name for name in _TOWER_SHAPE if getattr(own, name, None) != getattr(given.config, name, None)]
    if other:
        raise ConfigError(
            f"--vision_tower is not the tower in {FLAG} {folder.path}: "
            + ", ".join(f"{name} {getattr(given.config, name, None)} for {getattr(own, name, None)}" for name in other)
            + ": leave it out, because the model brings its own"
        )


@dataclass(frozen=True)
class ModelPlan:
    """Everything known about a model before it is built."""

    text_config: PreTrainedConfig
    tower: TowerPlan
    tokenizer: PreTrainedTokenizerBase
    sources: Sources
    whole_last_layer: str | None  # why it computes all positions; None: supervised positions only
    has_value_head: bool = False
    notes: tuple[str, ...] = ()  # lines to print about changes by flags
    checkpoint: Path | None = None  # the checkpoint to resume from
    only_products: str | None = None  # the only usable method for stacked matrices, if only one is
    own: Mapping[str, object] = field(default_factory=dict)  # the extensions' plans, by extension name

    @property
    def architecture(self) -> Architecture | None:
        """The architecture, if an extension reads the model; None for tower, projector and language model."""
        return self.tower.architecture

    def last_layer_note(self) -> str:
        """Return a line that says at which positions the last layer is computed."""
        if self.whole_last_layer is None:
            return "last layer of the language model: queries and MLP at supervised positions only"
        return f"last layer of the language model: at all positions ({self.whole_last_layer})"

    def fresh_note(self, part: str) -> str:
        """Return a line about a part whose weights are initialised instead of loaded."""
        if part == "value_head":
            return "the value head starts from zeros"
        source = self.sources.of(part)
        lacks = "" if source is None else f"{source.path} has no {formats.LLAVA_NEWLINE}: "
        return f"{lacks}the {part} starts from random numbers"

    @property
    def images(self) -> ImageSpec:
        """The tower's image specification: input size and features per image."""
        return self.tower.images

    @property
    def hidden_size(self) -> int:
        """Width of the language model."""
        return self.text_config.hidden_size


def fit_vocabulary(
    config: PreTrainedConfig, sources: Sources, tokenizer: PreTrainedTokenizerBase, args: ModelArguments
) -> tuple[PreTrainedConfig, Sources, list[str]]:
    """Add the tokens and vocabulary rows that the flags request, and store the number of rows in the tokenizer.

    Returns the language model's configuration, the sources, and lines to print. Raises ConfigError if two flags resize
    the vocabulary.
    """
    lines: list[str] = []
    if args.mm_use_im_start_end or args.mm_use_im_patch_token or args.resize_token_embeddings:
        from llava_ds.model.open.rows import add_rows

        config, sources, lines = add_rows(config, sources, tokenizer, args)
    note_rows(tokenizer, config.vocab_size, (IMAGE_TOKEN,))
    return config, sources, [*lines, *tokens_without_rows(tokenizer)]


def plan_model(args: ModelArguments, max_length: int, value_head: bool = False) -> ModelPlan:
    """Read configurations and tokenizer, and check that names and shapes of all weights fit the model.

    value_head: True to add a value head, from the model's folder if that has one, else of zeros. Raises ConfigError for
    unusable folders and missing packages, and DataError for weights that don't fit.
    """
    for wrap in active(args.own).wraps:
        wrap.check(args)
    parts = read_parts(args)
    wraps = active(args.own, parts.text_config).wraps
    _check_last_layers(args, parts)
    _check_layer_embeddings(args, parts)
    text_config, sources = parts.text_config, parts.sources
    findings = check_language_model(args.model_name_or_path, text_config)
    if problem := length_problem(text_config, max_length):
        raise ConfigError(problem)
    tokenizer = parts.open_tokenizer()
    version = "processor" if parts.folder.architecture is not None else args.version
    notes = []
    if args.chat_template_kwargs is not None or version in ("chat_template", "processor"):
        from llava_ds.template_variables import set_variables

        notes = set_variables(tokenizer, args.chat_template_kwargs, version)
    text_config, sources, grown = fit_vocabulary(text_config, sources, tokenizer, args)
    notes += grown
    for wrap in wraps:
        text_config, sources, lines = wrap.composed(text_config, sources, args)
        notes += lines
    with torch.device("meta"):
        parts.tower.build_projector(args, text_config.hidden_size)  # raises if impossible
    plan = ModelPlan(text_config, parts.tower, tokenizer, sources, findings.whole_last_layer, value_head, tuple(notes))
    check_depth(text_config, sources.language_model.open(), sources.language_model.flag)
    with no_init_weights(), torch.device("meta"), library_errors(f"--model_name_or_path {args.model_name_or_path}"):
        model = assemble(text_config, plan.tower, args, torch.zeros(3), torch.zeros(3), value_head)
    for name, part in model.named_children():
        opened = open_part(name, plan)
        if opened is not None:
            check_fit(part, opened.weights, opened.what)
    if text_config.vocab_size != parts.text_config.vocab_size:
        from llava_ds.model.open.rows import frozen_rows

        plan = replace(plan, notes=(*plan.notes, *frozen_rows(model, args)))
    for wrap in wraps:
        plan = wrap.planned(plan, model, args)
    return plan


def _check_last_layers(args: ModelArguments, parts: Parts) -> None:
    """Raise ConfigError if --unfreeze_topk_llm or --unfreeze_topk_vision exceeds the number of layers."""
    counts = {"unfreeze_topk_llm": parts.text_config.num_hidden_layers, "unfreeze_topk_vision": parts.tower.num_layers}
    problems = [
        f"--{flag} is {given}, but the model has {count} layers there: give at most that"
        for flag, count in counts.items()
        if (given := getattr(args, flag)) > count
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def _check_layer_embeddings(args: ModelArguments, parts: Parts) -> None:
    if parts.folder.architecture is None and has_layer_embeddings(parts.text_config):
        raise ConfigError(
            f"--model_name_or_path {args.model_name_or_path} is a {parts.text_config.model_type}: its layers have "
            "their own token embeddings, but transformers' Llava does not pass these on: choose another language "
            "model, or the whole model that it is a part of"
        )


@dataclass(frozen=True)
class OpenedPart:
    """A part's weights. what: the flag that names them; files: their files, without the changes in `weights`."""

    name: str
    weights: Weights
    what: str
    files: WeightFiles
    never_run: int  # number of the tower's tensors that never run

    def report(self) -> list[str]:
        """Return lines about the loaded tensors."""
        rest = f"; {self.never_run} more belong to layers that never run" if self.never_run else ""
        part, count = self.name.replace("_", " "), len(self.weights.shapes)
        notes = "".join(f"; {note}" for note in self.weights.notes)
        return [f"{part}: {count} tensors from {self.files.path}{notes}{rest}"]


def open_part(name: str, plan: ModelPlan) -> OpenedPart | None:
    """Open the weights of a part. Returns None for a part that is initialised instead of loaded.

    A newline may be missing in its source, because LLaVA-1.5's stage-1 files contain none.
    """
    source = plan.sources.of(name)
    if source is None:
        return None
    files = source.files(plan.tower.runs if name == "vision_tower" else lambda _: True)
    weights = source.changed(files)
    if name == "newline" and not weights.shapes:
        return None
    never_run = sum(source.rename(on_disk) is not None for on_disk in files.unused)
    return OpenedPart(name, weights, source.flag, files, never_run)


def part_weights(name: str, plan: ModelPlan, args: ModelArguments, seed: int) -> Weights:
    """Return the weights of a part, opened from its source or newly initialised."""
    opened = open_part(name, plan)
    return TensorSource(_fresh(name, plan, args, seed).state_dict(), "(fresh)") if opened is None else opened.weights


def _fresh(name: str, plan: ModelPlan, args: ModelArguments, seed: int) -> torch.nn.Module:
    """Make a newly initialised projector, newline, value head or extension's module. Its weights don't depend on ZeRO
    stage, precision or number of ranks."""
    if name == "value_head":
        from llava_ds.model.open.value_head import ValueHead

        return ValueHead(plan.hidden_size)
    if name.startswith(formats.OWN):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return active(args.own).modules[name.removeprefix(formats.OWN)](plan.text_config, plan.tower, args)
    with torch.random.fork_rng(devices=[]):  # on the CPU, so that all devices give the same numbers
        torch.manual_seed(seed)
        projector = build_projector(args.mm_projector_type, plan.tower.width, plan.hidden_size)
        return projector if name == "projector" else Newline(plan.hidden_size)
