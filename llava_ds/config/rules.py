"""Check paths, and combinations of flags: each rule is a function that yields a line per problem."""

import math
import os
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec

from llava_ds.config.arguments import Arguments, declared_by
from llava_ds.config.bounds import out_of_bounds, range_of_values, seconds_of, step_share_problem
from llava_ds.config.data_flags import GROUPINGS
from llava_ds.config.model_flags import (
    TUNABLE_PARTS,
    TUNING_FLAGS,
    adapted_parts,
    chosen_parts,
    tower_folders,
    trained_parts,
)
from llava_ds.config.properties import clashes, features
from llava_ds.config.training_flags import TRACKERS
from llava_ds.constants import ConfigError, in_short
from llava_ds.extensions.active import flags_class, owners, store_of
from llava_ds.extensions.table import EXTENSIONS
from llava_ds.files.urls import is_remote, local_path
from llava_ds.files.writing import can_be_made, path_problem, utf8_problem

CHOOSE_DS_CONFIG = "auto"  # value of --deepspeed_config (./auto names a file)

# Flags that control how the records of --data_path are read.
OF_RECORDS = (
    "data_format",
    "data_columns",
    "data_split",
    "image_folder",
    "video_folder",
)


# LLaVA's and LLaVA-NeXT's flags that choose the trained parts.
PART_FLAGS = (
    "mm_tunable_parts",
    "tune_mm_mlp_adapter",
    "freeze_mm_mlp_adapter",
    "freeze_backbone",
    "unfreeze_mm_vision_tower",
)

# What a user who gives 0 probably wants, for flags that refuse 0.
INSTEAD_OF_ZERO = {
    "save_steps": "--save_strategy no saves no checkpoints",
    "save_total_limit": "leave it out to keep all checkpoints",
}
# Effect of the value 0, for flags that accept it.
SWITCHED_OFF = {
    "eval_steps": "the eval loss is computed at the end only",
    "max_steps": "--num_train_epochs says how long to train",
    "watchdog_start_s": "nothing ends a start that hangs",
    "watchdog_step_s": "nothing ends a step that hangs",
    "watchdog_save_s": "nothing ends a save that hangs",
}

Rule = Callable[[Arguments], Iterator[str]]


def problems_of(args: Arguments, to_train: bool) -> list[str]:
    """Return a line for every problem with the flags. to_train: also check requirements of training."""
    zeros = {**INSTEAD_OF_ZERO, **args.zeros}
    problems = [_with_remedy(line, zeros) for line in out_of_bounds(args.as_dict(), map(type, args.sections))]
    problems += [f"--{name} {problem}" for name, value in _paths(args) if (problem := path_problem(value))]
    flags = args.flags
    named = [(name, value) for name, value in _paths(args) if flags[name].path in ("model", "output")]
    problems += [f"--{name} {problem}" for name, value in named if (problem := utf8_problem(value))]
    problems += data_problems(args)
    if to_train:
        problems += [*_missing_paths(args, only_to_train=True), *_lines(TRAINING_RULES, args)]
        problems += clashes(features(args))
    problems += template_variables(args)
    # Check flags that change the model even if the script does not train, because it reads the model.
    problems += [line for flags in args.own.values() if to_train or flags.of_model for line in flags.problems(args)]
    if to_train:
        inactive = [flags_class(name) for name in owners(args.given) if name not in args.own]
        problems += [line for flags in inactive for line in flags.inactive_problems(args)]
    return [*problems, *last_layers(args), *rows_of_tokens(args)]


def data_problems(args: Arguments) -> list[str]:
    """Return a line for every problem with paths, and with data flags that a model folder may set."""
    return [*_missing_paths(args, only_to_train=False), *_lines(DATA_RULES, args)]


def _with_remedy(line: str, zeros: dict[str, str]) -> str:
    name = line.removeprefix("--").partition(" is 0: ")[0]
    return f"{line}; {zeros[name]}" if name in zeros else line


def switched_off(args: Arguments) -> list[str]:
    """Return a line for each flag given as 0 that switches something off."""
    values = args.as_dict()
    zeros = {**SWITCHED_OFF, **args.zeros}
    return [f"--{name} 0: {what}" for name, what in zeros.items() if name in args.given and values[name] == 0]


def _lines(rules: tuple[Rule, ...], args: Arguments) -> list[str]:
    return [line for rule in rules for line in rule(args)]


def _paths(args: Arguments) -> list[tuple[str, str]]:
    flags = args.flags
    return [(name, value) for name, value in args.as_dict().items() if flags[name].path and value is not None]


def _missing_paths(args: Arguments, only_to_train: bool) -> Iterator[str]:
    flags = args.flags
    for name, value in _paths(args):
        flag = flags[name]
        if flag.only_to_train == only_to_train and (problem := missing_path(name, value, flag.path, flag.remote)):
            yield f"--{name} {value}{problem}"


def missing_path(name: str, value: str, kind: str, remote: bool = False) -> str | None:
    """Return the end of a message about a path that is missing or unsuitable for its flag; None if the path is fine.

    kind: Flag.path of the flag; remote: Flag.remote of the flag.
    """
    if remote:
        if is_remote(value):
            return None
        value = local_path(value)
    folders = tower_folders(value) if name == "vision_tower" else (value,)
    if kind in ("folder", "model") and (missing := [folder for folder in folders if not os.path.isdir(folder)]):
        from llava_ds.config.other_names import hub_hint

        which = f": {' and '.join(missing)}" if len(folders) > 1 else ""
        return f"{which}: no such folder{hub_hint(*missing) if kind == 'model' else ''}"
    if kind == "pattern" and not os.path.exists(value):
        is_pattern = any(mark in value for mark in "*?[{")
        return None if is_pattern else ": no such file or folder"
    chosen = name == "deepspeed_config" and value == CHOOSE_DS_CONFIG
    if kind == "file" and not chosen and not os.path.isfile(value):
        return ": that is a folder: name a file in it" if os.path.isdir(value) else ": no such file"
    if kind == "output" and not can_be_made(value):
        return " can't be written to: name another folder"
    return None


def urls(args: Arguments) -> Iterator[str]:
    flags = args.flags
    for name, value in _paths(args):
        if flags[name].remote and is_remote(value) and (problem := store_of(value).problem_with(value, args)):
            yield f"--{name} {value}{problem}"


def data_splits(args: Arguments) -> Iterator[str]:
    data = args.data
    if data.data_split is not None and data.data_path is None:
        yield f"--data_split {data.data_split} needs --data_path: give that as well"


def image_shape(args: Arguments) -> Iterator[str]:
    data = args.data
    if not re.fullmatch(r"square|pad|original|anyres|anyres_max_[1-9]\d*", data.image_aspect_ratio):
        yield (
            f"--image_aspect_ratio {data.image_aspect_ratio} is unknown: give square, pad, original, anyres or "
            "anyres_max_N with a number of tiles, like anyres_max_9"
        )
    if data.image_grid_pinpoints is not None and not data.image_aspect_ratio.startswith("anyres"):
        yield (
            f"--image_grid_pinpoints {data.image_grid_pinpoints} needs --image_aspect_ratio anyres, not "
            f"{data.image_aspect_ratio}"
        )
    if data.image_value_range is not None:
        try:
            range_of_values(data.image_value_range)
        except ConfigError as error:
            yield f"--image_value_range {error}"
    if data.force_sample and data.frames_upbound == 0:
        yield "--force_sample takes --frames_upbound frames of every video, not 0: give a number of frames"


def sample_order(args: Arguments) -> Iterator[str]:
    groupings = [name for name in GROUPINGS if getattr(args.data, name)]
    if len(groupings) > 1:
        yield f"--{' and --'.join(groupings)} set different orders of the records: choose one"
    if groupings and not args.data.shuffle:
        yield f"--shuffle False keeps the files' order, --{groupings[0]} changes it: choose one"


def needed_flags(args: Arguments) -> Iterator[str]:
    model = args.model
    if args.training.output_dir is None:
        yield "--output_dir is missing: name the folder for the run's files"
    if args.training.deepspeed_config is None:
        yield (
            "--deepspeed_config is missing: give zero3 or another of ds_configs/, the path of a DeepSpeed JSON, or auto"
        )
    if model.model_name_or_path is None and model.vision_tower is not None:
        yield "--vision_tower goes with --model_name_or_path: give both, or none for the tiny model"
    if args.data.data_path is None:
        for name in (name for name in OF_RECORDS if name in args.given):
            yield (
                f"--{name} {in_short(getattr(args.data, name))} goes with --data_path: the generated scenes need none, "
                "give that, or leave it out"
            )
    if model.model_name_or_path is not None and args.data.data_path is None:
        yield "--data_path is missing: name your records (the generated scenes are for the tiny model only)"


def precision_and_memory(args: Arguments) -> Iterator[str]:
    training = args.training
    if training.bf16 and training.fp16:
        yield "--bf16 and --fp16 are both set: choose one"
    budget = training.activation_memory_gb
    if budget is not None and "auto" not in (training.gradient_checkpointing, training.tokens_per_micro_batch):
        yield (
            f"--activation_memory_gb {budget} limits --gradient_checkpointing auto and --tokens_per_micro_batch auto: "
            "give one of these, or leave it out"
        )


def steps_and_layout(args: Arguments) -> Iterator[str]:
    training, steps = args.training, args.training.warmup_steps
    if math.isfinite(steps) and steps >= 1 and steps != int(steps):
        yield f"--warmup_steps is {steps}: give a whole number, or their part of all steps from 0 to below 1"
    if training.tokens_per_micro_batch is not None and training.loss_reduction != "token":
        yield (
            "--loss_reduction micro_batch depends on the layout, but --tokens_per_micro_batch changes it: give only one"
        )
    if training.tokens_per_micro_batch is not None and training.steps_across_epochs:
        yield (
            "--steps_across_epochs True counts in micro-batches of --per_device_train_batch_size samples, "
            "--tokens_per_micro_batch makes others: give one of them"
        )
    if training.max_run_time is not None:
        try:
            seconds_of(training.max_run_time)
        except ConfigError as error:
            yield f"--max_run_time: {error}"


def installed_trackers(args: Arguments) -> Iterator[str]:
    for name in (args.training.report_to or "").split(","):
        if name in TRACKERS and not is_installed(name):
            yield f"--report_to {name}: {name} is not installed: pip install {name}, or --report_to none"


def evaluations(args: Arguments) -> Iterator[str]:
    data, training = args.data, args.training
    if data.eval_fraction and data.eval_data_path:
        yield "--eval_fraction and --eval_data_path are both given: choose one"
    yield from step_share_problem("eval_steps", training.eval_steps)
    if training.eval_strategy in ("steps", "epoch") and training.eval_steps == 0 and "eval_steps" in args.given:
        yield (
            f"--eval_steps 0 and --eval_strategy {training.eval_strategy}: the first computes the eval loss only at "
            "the end, the second also before: give only one"
        )
    remedy = "computes the loss on eval samples: also give --eval_data_path or --eval_fraction"
    if training.eval_steps and not args.evaluates and training.eval_strategy is None:
        yield f"--eval_steps {training.eval_steps:g} {remedy}"
    if training.eval_strategy not in (None, "no") and not args.evaluates:
        yield f"--eval_strategy {training.eval_strategy} {remedy}"
    if data.eval_data_split is not None and data.eval_data_path is None:
        yield f"--eval_data_split {data.eval_data_split} needs --eval_data_path: give that as well"


def checkpoints(args: Arguments) -> Iterator[str]:
    training = args.training
    if training.save_only_model and training.save_strategy == "no":
        yield ("--save_only_model True and --save_strategy no: the second saves no checkpoints: give only one")
    if training.save_only_model and training.async_save:
        yield (
            "--save_only_model True and --async_save True: --async_save goes with checkpoints of the whole training "
            "state, leave one of them out"
        )


def trainable_parts(args: Arguments) -> Iterator[str]:
    """Yield contradictions between flags that choose the trained parts or set rates for them."""
    model, parts = args.model, trained_parts(args.model)
    if model.version == "plain" and "language_model" in parts:
        yield "--version plain is stage 1's template: also give --tune_mm_mlp_adapter True, or give --version v1"
    four = ("tune_mm_mlp_adapter", "freeze_mm_mlp_adapter", "freeze_backbone", "unfreeze_mm_vision_tower")
    if model.mm_tunable_parts is not None:
        for name in (name.strip() for name in model.mm_tunable_parts.split(",")):
            if name not in TUNABLE_PARTS:
                yield f"--mm_tunable_parts names {name!r}, not a part: give some of {', '.join(TUNABLE_PARTS)}"
        for name in four:
            if getattr(model, name):
                yield f"--{name} True and --mm_tunable_parts both choose the trained parts: give only one"
    elif model.tune_mm_mlp_adapter and model.freeze_mm_mlp_adapter:
        yield "--tune_mm_mlp_adapter True trains the projector only, --freeze_mm_mlp_adapter True does not: choose one"
    for name, part in (("mm_projector_lr", "projector"), ("mm_vision_tower_lr", "vision_tower")):
        if getattr(args.training, name) is not None and parts and part not in parts | adapted_parts(model):
            yield f"--{name} is a rate for the {part.replace('_', ' ')}, but that does not train: leave it out"


def tuning_flags(args: Arguments) -> Iterator[str]:
    """Yield contradictions between the vendor's flags and LLaVA's flags that choose the trained parts."""
    model = args.model
    tuned = [name for name in TUNING_FLAGS if getattr(model, name) is not None]
    others = [name for name in PART_FLAGS if getattr(model, name)]
    if tuned and others:
        yield f"--{tuned[0]} and --{others[0]} both choose the trained parts: give only one"
    if tuned and not trained_parts(model) | adapted_parts(model):
        yield f"--{tuned[0]} False leaves nothing to train: give one of {', '.join(TUNING_FLAGS)} as True"


def template_variables(args: Arguments) -> Iterator[str]:
    """Check that --chat_template_kwargs can be parsed. The template is read later."""
    if args.model.chat_template_kwargs is None:
        return
    from llava_ds.template_variables import parse_variables

    try:
        parse_variables(args.model.chat_template_kwargs)
    except ConfigError as error:
        yield str(error)


def rows_of_tokens(args: Arguments) -> Iterator[str]:
    """Yield a line for a flag that has no effect without --resize_token_embeddings."""
    model = args.model
    multiple = model.pad_embeddings_to_multiple_of
    if not model.resize_token_embeddings and "pad_embeddings_to_multiple_of" in args.given and multiple is not None:
        yield (
            f"--pad_embeddings_to_multiple_of {multiple} has no effect without --resize_token_embeddings True: give "
            "that, or leave it out"
        )


def last_layers(args: Arguments) -> Iterator[str]:
    """Yield a line for each flag that unfreezes the last layers of a part which trains completely."""
    model, chosen = args.model, chosen_parts(args.model)
    by_parts, by_tuning = model.mm_tunable_parts is not None, any(getattr(model, name) for name in TUNING_FLAGS)
    freezing = {
        "unfreeze_topk_llm": ("language_model", "--freeze_backbone True", "--tune_mm_llm False"),
        "unfreeze_topk_vision": ("vision_tower", "no --unfreeze_mm_vision_tower", "no --tune_mm_vision"),
    }
    for flag, (part, plain, tuning) in freezing.items():
        remedy = "--mm_tunable_parts without it" if by_parts else tuning if by_tuning else plain
        if getattr(model, flag) and part in chosen and not adapted_parts(model):
            yield f"--{flag} unfreezes layers of the {part.replace('_', ' ')}, but all of it trains: give {remedy}"


def objectives(args: Arguments) -> Iterator[str]:
    """Yield a line for each core flag that does not apply to the run's objective."""
    training, objective = args.training, args.training.objective
    if args.traits.one_answer and training.loss_reduction != "token":
        yield f"--loss_reduction micro_batch is for --objective sft, not {objective}: leave it out"
    if args.traits.one_answer and args.model.version == "plain":
        yield "--version plain is for captions, with one answer each: name the template of the model's conversations"


def misplaced(args: Arguments) -> Iterator[str]:
    """Yield a line for each flag of an extension that applies only to other values of a core flag."""
    values = args.as_dict()
    for name in sorted(args.given):
        known: dict[str, list[str]] = {}
        for owner in owners([name]):
            goes_with = declared_by(flags_class(owner))[name].goes_with.split()
            for flag, own in EXTENSIONS[owner].adds.items():
                known.setdefault(flag, []).extend(value for value in own if value in goes_with)
        for flag, wanted in known.items():
            if values[flag] not in wanted:
                yield (
                    f"--{name} belongs to --{flag} {' and '.join(wanted)}, not {values[flag]}: leave one of them out"
                )


DATA_RULES: tuple[Rule, ...] = (urls, data_splits, image_shape, sample_order)
TRAINING_RULES: tuple[Rule, ...] = (
    needed_flags,
    precision_and_memory,
    steps_and_layout,
    installed_trackers,
    evaluations,
    checkpoints,
    trainable_parts,
    tuning_flags,
    misplaced,
    objectives,
)


def is_installed(package: str) -> bool:
    """True if a package can be imported. A mere folder of its name, such as W&B's wandb/, does not count."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None
