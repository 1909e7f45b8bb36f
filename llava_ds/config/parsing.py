"""From a command line and a recipe to checked flags: every problem is found before anything is built."""

import argparse
import dataclasses
import difflib
import math
import os
import re
from collections.abc import Collection, Sequence
from importlib.util import find_spec
from pathlib import Path

import yaml
from transformers import HfArgumentParser
from transformers.hf_argparser import string_to_bool

from llava_ds.config.arguments import (
    TRACKERS,
    TUNABLE_PARTS,
    Arguments,
    DataArguments,
    ModelArguments,
    TrainingArguments,
    trained_parts,
)
from llava_ds.config.bounds import in_a_line, out_of_bounds
from llava_ds.config.durations import seconds_of
from llava_ds.config.flag_groups import GROUPS
from llava_ds.config.shipped import DS_CONFIGS, RECIPES, found
from llava_ds.constants import EXIT_BAD_INPUT, EXIT_NOT_RESUMABLE, EXIT_STOPPED, ConfigError, in_short
from llava_ds.files.atomic import can_be_made, path_problem

SECTIONS = (ModelArguments, DataArguments, TrainingArguments)
NO = ("False", "false", "0")

# Values of --gradient_checkpointing: LLaVA's scripts say whether, as Hugging Face's do.
CHECKPOINTING = {
    **{name: name for name in ("off", "all", "auto")},
    **dict.fromkeys(("true", "t", "yes", "y", "1"), "all"),
    **dict.fromkeys(("false", "f", "no", "n", "0"), "off"),
}

# Flags of LLaVA's and LLaVA-NeXT's scripts whose wish is met, or does not arise, here: the values that may be given
# (None: any), and why no code reads them. They are named once at the start of a run.
WITHOUT_EFFECT: dict[str, tuple[tuple[str, ...] | None, str]] = {
    "mm_resampler_type": (("None", "none", ""), "there is no resampler between tower and projector"),
    "image_crop_resolution": (None, "it goes with ways of cutting pictures that are not here"),
    "image_split_resolution": (None, "it goes with ways of cutting pictures that are not here"),
    "lazy_preprocess": (None, "pictures are always decoded as they are needed, text is encoded once"),
    "is_multimodal": (None, "text-only records are always allowed"),
    "early_mix_text": (NO, "--group_by_modality_length always gives text-only records steps of their own"),
    "add_time_instruction": (NO, "writing a video's times before its question is not here yet"),
    "dataloader_drop_last": (None, "no sample is left out, the last step of an epoch may be smaller"),
    "attn_implementation": (None, "the fastest attention that this machine has is chosen"),
    "per_device_eval_batch_size": (None, "held-out samples are laid out as those of training"),
}

# What is trained by data parallelism and ZeRO alone here: no flag is meant.
NO_PARALLELISM = re.compile(r"--\w*(tensor|pipeline|expert|context|sequence)\w*_parallel\w*|--[tpec]p(_size)?")

# What other trainers call a flag of ours, where the nearest name would lead astray.
ELSEWHERE = {
    "--cutoff_len": "--model_max_length",
    "--data_split": "--data_path with the files of that split",
    "--dataset": "--data_path",
    "--dataset_config": "--data_path",
    "--dataset_dir": "--data_path",
    "--dataset_name": "--data_path",
    "--dataset_split": "--data_path with the files of that split",
    "--dataset_train_split": "--data_path with the files of that split",
    "--ddp_timeout": "the variable DEEPSPEED_TIMEOUT (minutes)",
    "--finetuning_type": "--lora_enable",
    "--lora_rank": "--lora_r",
    "--max_length": "--model_max_length",
    "--max_seq_len": "--model_max_length",
    "--max_seq_length": "--model_max_length",
    "--media_dir": "--image_folder",
    "--optim": "an optimizer in the DeepSpeed JSON",
    "--overwrite_output_dir": "--resume never",
    "--quantization_bit": "--bits",
    "--resume_from_checkpoint": "--resume",
    "--template": "--version",
    "--use_peft": "--lora_enable",
    "--val_size": "--eval_fraction",
    "--zero_stage": '"stage" in the DeepSpeed JSON (--deepspeed_config ds_configs/zero2.json)',
}

MAX_RECIPE_BYTES = 1_000_000
NOT_IN_RECIPES = ("recipe", "help", "h", "local_rank")
FEW_CHOICES = 5  # that stand beside a flag in --help
NO_FILE = "there is no such file"
KINDS = {int: "not a whole number", float: "not a number", string_to_bool: "neither True nor False"}
FLAT = "a YAML mapping of flag names to single values"
CHOOSE_DS_CONFIG = "auto"  # for --deepspeed_config; a file of that name is ./auto
PATHS = (
    "model_name_or_path",
    "model_base",
    "vision_tower",
    "pretrain_mm_mlp_adapter",
    "lora_weight_path",
    "data_path",
    "image_folder",
    "video_folder",
    "cache_dir",
    "deepspeed_config",
    "output_dir",
    "eval_data_path",
    "sample_data_path",
    "resume",
)

MODELS = ("model_name_or_path", "model_base", "vision_tower")
_HUB_NAME = re.compile(r"[\w-]+/[\w.-]+")
_HUB_HINT = "; if it is a name on the hub, download it (hf download NAME --local-dir FOLDER) and give its folder"

# Flags that ask for an order of the samples, and what data/sample_order.py calls it.
GROUPINGS = {
    "group_by_modality_length": "modality",
    "group_by_modality_length_auto": "modality_auto",
    "group_by_length": "length",
    "group_by_varlen": "varlen",
    "group_by_length_bucket": "bucket",
}


class _Parser(HfArgumentParser):
    def error(self, message: str) -> None:
        raise ConfigError(in_a_line(message))

    def _get_value(self, action: argparse.Action, text: str) -> object:
        """Raises ConfigError for what argparse would call an "invalid int value"."""
        try:
            return super()._get_value(action, text)
        except argparse.ArgumentError:
            if action.type not in KINDS:
                raise
            raise ConfigError(f"--{action.dest} {in_short(text)} is {KINDS[action.type]}") from None

    def format_help(self) -> str:
        """The flags by purpose, each spelled once: all are known with hyphens too, and true ones as --no_<name>."""
        formatter = _HelpFormatter(self.prog)
        formatter.add_usage(f"{self.prog} [--recipe FILE] [--name value ...]", [], [])
        formatter.add_text(self.description)
        left = {a.dest: a for a in reversed(self._actions)}  # of --name and --no_name the first
        help_flag = left.pop("help")
        without_effect = [left.pop(name) for name in WITHOUT_EFFECT]
        groups = {title: [left.pop(name) for name in names] for title, names in GROUPS.items()}
        groups["more"] = list(left.values())[::-1]
        groups["accepted without effect, for LLaVA's scripts"] = without_effect
        groups["the run"].append(help_flag)
        for title, actions in groups.items():
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def parse_known_args(self, args=None, namespace=None):
        """Takes --deepspeed without a value for what deepspeed.add_config_arguments makes of it: a switch."""
        return super().parse_known_args(None if args is None else _without_switch(args), namespace)


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Spells a flag once and says what it takes in a word."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = [name for name in action.option_strings if "-" not in name.lstrip("-")]
        if action.nargs == 0:
            return ", ".join(names)
        words = {int: "N", float: "X", string_to_bool: "True|False"}
        kind = "PATH" if action.dest in (*PATHS, "recipe") else words.get(action.type, "TEXT")
        if action.choices is not None:
            kind = "{" + ",".join(map(str, action.choices)) + "}" if len(action.choices) <= FEW_CHOICES else "NAME"
        return f"{', '.join(names)} {f'[{kind}]' if action.nargs in ('?', '*') else kind}"

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help if action.default in (None, False) else super()._get_help_string(action)
        many = action.choices is not None and len(action.choices) > FEW_CHOICES
        return f"{text} One of {', '.join(map(str, action.choices))}." if many else text


def _without_switch(argv: Sequence[str]) -> list[str]:
    """A command line without --deepspeed where no file follows it, beside a --deepspeed_config."""
    if not any(token.split("=", 1)[0] == "--deepspeed_config" for token in argv):
        return list(argv)
    following = [*argv[1:], "--"]
    return [token for token, after in zip(argv, following) if token != "--deepspeed" or not after.startswith("--")]


def build_parser() -> HfArgumentParser:
    """The parser of run/train.py; its --help is the reference of all flags."""
    parser = _Parser(
        SECTIONS,
        description="Train a LLaVA.",
        epilog="SIGTERM, SIGINT, SIGUSR1 and a closed terminal (SIGHUP, without nohup) save at the next step and "
        "leave; a second of the first two leaves at once. "
        f"Exit codes: 0 finished, {EXIT_BAD_INPUT} the input can't be used, {EXIT_STOPPED} stopped as asked: the same "
        f"command goes on, {EXIT_NOT_RESUMABLE} stopped as asked, and no run can be resumed from what it saved "
        "(--save_only_model, --save_strategy no) (docs/checkpoints.md).",
        allow_abbrev=False,
    )
    parser.add_argument("--recipe", help="YAML file of flags; the command line wins over it.")
    parser.add_argument("--local_rank", type=int, help="Set by the deepspeed launcher; LOCAL_RANK is what counts.")
    for name, (allowed, reason) in WITHOUT_EFFECT.items():
        accepted = "Accepted without effect" if allowed is None else f"Accepted as {allowed[0]} only"
        parser.add_argument(f"--{name}", nargs="?", const="True", help=f"{accepted}: {reason}.")
    return parser


def read_recipe(path: str | Path) -> dict[str, object]:
    """The flags of a YAML recipe. Raises ConfigError when it is not a flat mapping of scalars."""
    if problem := path_problem(str(path)):
        raise ConfigError(f"--recipe {problem}")
    file = Path(os.path.expanduser(found(str(path), RECIPES, ".yaml")))
    if not os.path.isfile(file):  # opening a FIFO would wait for somebody to write
        raise ConfigError(
            f"--recipe {in_short(path)} can't be read: {'that is no file' if os.path.exists(file) else NO_FILE}"
        )
    try:
        if file.stat().st_size > MAX_RECIPE_BYTES:
            raise ConfigError(f"--recipe {path} has more than {MAX_RECIPE_BYTES:,} bytes: give a YAML file of flags")
        recipe = yaml.safe_load(file.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ConfigError(f"--recipe {path} is nested too deeply: it must be {FLAT}") from error
    except ConfigError:
        raise
    except (OSError, ValueError, yaml.YAMLError) as error:  # ValueError: no UTF-8, or a date that no calendar has
        raise ConfigError(f"--recipe {path} can't be read: {error}") from error
    if not isinstance(recipe, dict) or any(isinstance(v, (dict, list, set, bytes)) for v in recipe.values()):
        raise ConfigError(f"--recipe {path} must be {FLAT}")
    for name, value in recipe.items():
        if not isinstance(name, str) or not re.fullmatch(r"\w[\w-]*", name):
            raise ConfigError(f"--recipe {path}: {in_short(repr(name))} is no flag's name, like learning_rate")
        if name in NOT_IN_RECIPES:
            raise ConfigError(f"--recipe {path} names {name}, which goes on the command line: leave it out")
        if isinstance(value, int) and value.bit_length() > 64:
            raise ConfigError(f"--recipe {path}: {name} is {in_short(value)}, which no flag takes")
    return recipe


def parse_arguments(
    argv: list[str],
    defaults: dict[str, object] | None = None,
    to_train: bool = True,
    own_flags: Collection[str] = (),
) -> tuple[Arguments, list[str]]:
    """Parsed and checked flags, ~ in paths expanded, and one line for every flag that was given but has no effect.

    argv: the command line without the program's name; defaults: flags below the recipe in precedence, which do not
    count as given; to_train: whether what only training needs has to be there; own_flags: what else the script knows,
    for the hint at a misspelt one. Raises ConfigError, which lists every problem found.
    """
    parser = build_parser()
    recipe_path = _recipe_of(argv)
    recipe = {} if recipe_path is None else read_recipe(recipe_path)
    written = {token[2:].split("=", 1)[0].replace("-", "_") for token in argv if token.startswith("--")}
    if {"per_device_train_batch_size", "gradient_accumulation_steps"} <= written:
        # The command line fixes the samples of a step by these two: a recipe's total must not contradict it.
        recipe.pop("train_batch_size", None)
    if "eval_data_path" in written:
        recipe.pop("eval_fraction", None)
        defaults = {name: value for name, value in (defaults or {}).items() if name != "eval_fraction"}
    tokens = _as_tokens(defaults or {}) + _as_tokens(recipe) + list(argv)
    model, data, training, rest, unknown = parser.parse_args_into_dataclasses(
        tokens, return_remaining_strings=True, look_for_args_file=False
    )
    if unknown:
        raise ConfigError(_unknown_flags(unknown, parser, own_flags))

    if "eval_fraction" in written and not (data.eval_fraction or data.eval_data_path or "eval_steps" in written):
        training = dataclasses.replace(training, eval_steps=None)  # what a recipe measures on what is not held back
        recipe.pop("eval_steps", None)
    field_of = {option.lstrip("-"): action.dest for action in parser._actions for option in action.option_strings}
    given = {field_of[name] for name in {name.replace("-", "_") for name in recipe} | written}
    args = Arguments(model, data, training, frozenset(given))
    values = args.as_dict()
    args = args.replaced(**{name: os.path.expanduser(values[name]) for name in PATHS if values[name] is not None})
    if args.training.deepspeed_config not in (None, CHOOSE_DS_CONFIG):
        args = args.replaced(deepspeed_config=found(args.training.deepspeed_config, DS_CONFIGS, ".json"))
    if args.model.lora_weight_path == "":  # LLaVA's way to say none
        args = args.replaced(lora_weight_path=None)

    args, problems = _typed(args)
    notes = []
    for name, (allowed, reason) in WITHOUT_EFFECT.items():
        value = getattr(rest, name)
        if value is None:
            continue
        if allowed is not None and value not in allowed:
            problems.append(f"--{name} {value} is not supported ({reason}): leave it out or give {allowed[0]}")
        else:
            notes.append(f"--{name} {value} has no effect: {reason}")
    notes += unused_lora_flags(args)
    problems += out_of_bounds(args.as_dict(), SECTIONS) + _path_problems(args)
    problems += data_problems(args) + (training_problems(args) if to_train else []) + lora_problems(args)
    if problems:
        raise ConfigError("\n".join(problems))
    return args, notes


def tiny_defaults(argv: list[str], recipes: Path) -> dict[str, object]:
    """The tiny model's recipe of the stage that a command line asks for, unless the user brings a model or a recipe.

    Of the user's own data no part is held back that no flag asks for.
    """
    flags = {token[2:].split("=", 1)[0].replace("-", "_") for token in argv if token.startswith("--")}
    if flags & {"model_name_or_path", "recipe"}:
        return {}
    tokens = [token for token in argv if token not in ("-h", "--help")]  # help comes later, with all sections
    projector_only = build_parser().parse_known_args(tokens)[0].tune_mm_mlp_adapter
    defaults = read_recipe(recipes / f"tiny-{'pretrain' if projector_only else 'finetune'}.yaml")
    if "data_path" in flags and not flags & {"eval_fraction", "eval_data_path"}:
        flags |= {"eval_fraction", "eval_steps"}
    return {name: value for name, value in defaults.items() if name not in flags}


def _typed(args: Arguments) -> tuple[Arguments, list[str]]:
    """The flags that take words beside numbers or beside True and False, as code reads them, and a line for each value
    that is neither."""
    values, problems = {}, []
    asked = args.training.gradient_checkpointing
    if (known := CHECKPOINTING.get(asked.lower())) is None:
        problems.append(f"--gradient_checkpointing {asked} is unknown: give off, all or auto (or False or True)")
    values["gradient_checkpointing"] = known or "off"
    tokens = args.training.tokens_per_micro_batch
    if tokens == "none":  # over a recipe that says otherwise
        values["tokens_per_micro_batch"] = None
    elif tokens not in (None, "auto"):
        try:
            values["tokens_per_micro_batch"] = int(tokens)
        except ValueError:
            problems.append(f"--tokens_per_micro_batch {tokens} is no whole number: give one, auto or none")
            values["tokens_per_micro_batch"] = None
    values["report_to"], unknown = trackers_of(args.training.report_to)
    known = f"give some of {', '.join(TRACKERS)}, or all, or none"
    problems += [f"--report_to {name} is unknown: {known}" for name in unknown]
    return args.replaced(**values), problems


def trackers_of(asked: str | list[str] | None) -> tuple[str | None, list[str]]:
    """--report_to as code reads it, names with commas between or None where it was not given; and those unknown."""
    if asked is None:
        return None, []
    words = [asked] if isinstance(asked, str) else asked
    names = [name for word in words for name in word.replace(",", " ").split()]
    if names == ["none"]:
        names = []
    elif names == ["all"]:
        names = [name for name in TRACKERS if is_installed(name)]
    return ",".join(dict.fromkeys(names)), [name for name in names if name not in TRACKERS]


def is_installed(package: str) -> bool:
    """Whether it can be imported; a folder of its name, as W&B leaves them, is none."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def _path_problems(args: Arguments) -> list[str]:
    """A line for every path that no file can have. An empty one would be the current folder."""
    values = {name: value for name in PATHS if (value := args.as_dict()[name]) is not None}
    return [f"--{name} {problem}" for name, value in values.items() if (problem := path_problem(value))]


def data_problems(args: Arguments) -> list[str]:
    """Everything that is wrong with the flags that say what is read, and with the paths they name, a line each."""
    data = args.data
    problems = []

    def check(ok: bool, message: str) -> None:
        if not ok:
            problems.append(message)

    check(
        re.fullmatch(r"square|pad|original|anyres|anyres_max_[1-9]\d*", data.image_aspect_ratio) is not None,
        f"--image_aspect_ratio {data.image_aspect_ratio} is unknown: give square, pad, original, anyres or "
        "anyres_max_N with a number of tiles, like anyres_max_9",
    )
    check(
        data.frames_upbound != 0 or not data.force_sample,
        "--force_sample takes --frames_upbound frames of every video, which is 0: give a number of frames",
    )
    check(
        data.image_grid_pinpoints is None or data.image_aspect_ratio.startswith("anyres"),
        f"--image_grid_pinpoints {data.image_grid_pinpoints} needs --image_aspect_ratio anyres, which is "
        f"{data.image_aspect_ratio}",
    )
    groupings = [name for name in GROUPINGS if getattr(data, name)]
    check(len(groupings) < 2, f"--{' and --'.join(groupings)} are orders that exclude each other: choose one")
    check(
        data.shuffle or not groupings,
        f"--shuffle False keeps the files' order, --{groupings[0] if groupings else ''} makes another: choose one",
    )
    check(
        data.data_path is None or os.path.exists(data.data_path) or any(mark in data.data_path for mark in "*?[{"),
        f"--data_path {data.data_path}: there is no such file or folder",
    )
    for name in ("eval_data_path", "sample_data_path"):
        value = args.as_dict()[name]
        check(value is None or os.path.exists(value), f"--{name} {value}: there is no such file or folder")
    for name in ("model_name_or_path", "model_base", "vision_tower", "image_folder", "video_folder"):
        value = args.as_dict()[name]
        hint = _HUB_HINT if name in MODELS and value is not None and _HUB_NAME.fullmatch(value) else ""
        check(value is None or os.path.isdir(value), f"--{name} {value}: there is no such folder{hint}")
    check(can_be_made(data.cache_dir), f"--cache_dir {data.cache_dir} can't be written to: name another folder")
    return problems


def training_problems(args: Arguments) -> list[str]:
    """Everything else that is wrong with the flags by themselves and with the paths they name, a line each."""
    model, data, training = args.model, args.data, args.training
    problems = []

    def check(ok: bool, message: str) -> None:
        if not ok:
            problems.append(message)

    budget = training.activation_memory_gb
    check(
        budget is None or "auto" in (training.gradient_checkpointing, training.tokens_per_micro_batch),
        f"--activation_memory_gb {budget} is what --gradient_checkpointing auto and --tokens_per_micro_batch auto may "
        "use: give one of them, or leave it out",
    )
    steps = training.warmup_steps
    check(
        not math.isfinite(steps) or steps < 1 or steps == int(steps),
        f"--warmup_steps is {steps}: give a whole number, or their part of all steps from 0 to below 1",
    )
    for name in (training.report_to or "").split(","):
        check(
            name not in TRACKERS or is_installed(name),
            f"--report_to {name}: {name} is not installed: pip install 'llava_ds[{name}]', or --report_to none",
        )
    check(not (training.bf16 and training.fp16), "--bf16 and --fp16 are both set: choose one")
    if training.max_run_time is not None:
        try:
            seconds_of(training.max_run_time)
        except ConfigError as error:
            problems.append(f"--max_run_time: {error}")
    part, held_out = data.eval_fraction, data.eval_data_path
    check(not (part and held_out), "--eval_fraction and --eval_data_path are both given: choose one")
    for name in ("eval_steps", "sample_steps"):
        value = args.as_dict()[name]
        check(
            value is None or not math.isfinite(value) or value < 1 or value == int(value),
            f"--{name} is {value or 0:g}: give a whole number of steps, or a part of all steps below 1",
        )
    check(
        not training.eval_steps or part or held_out is not None or training.eval_strategy is not None,
        f"--eval_steps {training.eval_steps or 0:g} measures the loss on held-out samples: give --eval_data_path or "
        "--eval_fraction, too",
    )
    check(
        training.eval_strategy in (None, "no") or part or held_out is not None,
        f"--eval_strategy {training.eval_strategy} measures the loss on held-out samples: give --eval_data_path or "
        "--eval_fraction, too",
    )
    check(
        bool(training.sample_steps) or data.sample_data_path is None,
        f"--sample_data_path {data.sample_data_path} has questions for --sample_steps: give it, too",
    )
    check(
        training.on_loss_spike != "rewind" or training.save_strategy != "no",
        "--on_loss_spike rewind goes back to a checkpoint, and --save_strategy no saves none: give steps",
    )
    check(
        not training.save_only_model or training.save_strategy != "no",
        "--save_only_model True and --save_strategy no: the one says how checkpoints are saved, the other that none "
        "is, give one of them",
    )
    for flag, is_set in (
        ("--on_loss_spike rewind", training.on_loss_spike == "rewind"),
        ("--async_save True", training.async_save),
    ):
        check(
            not (training.save_only_model and is_set),
            f"--save_only_model True and {flag}: {flag.split()[0]} goes with checkpoints of the whole training state, "
            "leave one of them out",
        )
    check(training.output_dir is not None, "--output_dir is missing: name the folder for what the run leaves")

    check(
        training.loss_reduction == "token" or training.tokens_per_micro_batch is None,
        "--loss_reduction micro_batch depends on the layout, which --tokens_per_micro_batch changes: give one of them",
    )
    check(
        not training.steps_across_epochs or training.tokens_per_micro_batch is None,
        "--steps_across_epochs True counts in micro-batches of --per_device_train_batch_size samples, "
        "--tokens_per_micro_batch makes others: give one of them",
    )
    check(
        training.deepspeed_config is not None,
        "--deepspeed_config is missing: give zero3 or another of ds_configs/, the path of a DeepSpeed JSON, or auto",
    )
    for name in ("deepspeed_config", "pretrain_mm_mlp_adapter"):
        value = args.as_dict()[name]
        missing = "that is a folder: name a file in it" if os.path.isdir(value or "") else "there is no such file"
        chosen = name == "deepspeed_config" and value == CHOOSE_DS_CONFIG
        check(value is None or chosen or os.path.isfile(value), f"--{name} {value}: {missing}")
    check(
        training.output_dir is None or can_be_made(training.output_dir),
        f"--output_dir {training.output_dir} can't be written to: name another folder",
    )
    check(
        model.model_name_or_path is not None or model.vision_tower is None,
        "--vision_tower goes with --model_name_or_path: give both, or neither for the tiny model",
    )
    check(
        model.model_name_or_path is None or data.data_path is not None,
        "--data_path is missing: the generated scenes go with the tiny model only; name your records",
    )
    check(
        model.version != "plain" or "language_model" not in trained_parts(model),
        "--version plain is the template of stage 1: give --tune_mm_mlp_adapter True with it, or --version v1",
    )
    return problems + _what_trains_problems(args)


def _what_trains_problems(args: Arguments) -> list[str]:
    """Flags that say of the same part that it trains and that it does not, a line each."""
    model, parts = args.model, trained_parts(args.model)
    problems = []
    four = ("tune_mm_mlp_adapter", "freeze_mm_mlp_adapter", "freeze_backbone", "unfreeze_mm_vision_tower")
    if model.mm_tunable_parts is not None:
        named = [name.strip() for name in model.mm_tunable_parts.split(",")]
        problems += [
            f"--mm_tunable_parts names {name!r}, which is no part: give some of {', '.join(TUNABLE_PARTS)}"
            for name in named
            if name not in TUNABLE_PARTS
        ]
        problems += [
            f"--{name} True and --mm_tunable_parts both say what trains: give one of them"
            for name in four
            if getattr(model, name)
        ]
    elif model.tune_mm_mlp_adapter and model.freeze_mm_mlp_adapter:
        problems.append(
            "--tune_mm_mlp_adapter True trains the projector only, --freeze_mm_mlp_adapter True does not: choose one"
        )
    for name, part in (("mm_projector_lr", "projector"), ("mm_vision_tower_lr", "vision_tower")):
        if getattr(args.training, name) is not None and parts and part not in parts:
            problems.append(f"--{name} is a rate for the {part.replace('_', ' ')}, which does not train: leave it out")
    return problems


# Flags that say nothing without the one that they go with.
LORA_FLAGS = ("lora_r", "lora_alpha", "lora_dropout", "lora_bias", "lora_weight_path")
QUANTIZATION_FLAGS = ("quant_type", "double_quant")


def unused_lora_flags(args: Arguments) -> list[str]:
    """A line for every flag of LoRA and quantization that was given where it changes nothing.

    Without a word about --lora_enable it would be a misunderstanding, which lora_problems names.
    """
    model = args.model
    unused = []
    if not model.lora_enable and "lora_enable" in args.given:
        unused += [(name, "--lora_enable is False") for name in LORA_FLAGS]
    if model.bits != 4:
        unused += [(name, f"--bits is {model.bits}, not 4") for name in QUANTIZATION_FLAGS]
    return [
        f"--{name} {args.as_dict()[name]} has no effect: {why}"
        for name, why in unused
        if name in args.given and args.as_dict()[name] is not None
    ]


def lora_problems(args: Arguments) -> list[str]:
    """Everything that is wrong with the flags of LoRA and quantization, a line each."""
    model = args.model
    problems = []

    def check(ok: bool, message: str) -> None:
        if not ok:
            problems.append(message)

    check(
        not model.lora_enable or "language_model" in trained_parts(model),
        "--lora_enable trains adapters of the language model, which "
        + ("--tune_mm_mlp_adapter" if model.tune_mm_mlp_adapter else "--mm_tunable_parts")
        + " leaves alone: choose one",
    )
    check(
        model.lora_enable or model.bits == 16,
        f"--bits {model.bits} needs --lora_enable True: packed weights can't train themselves, LoRA beside them can",
    )
    path = model.lora_weight_path
    check(path is None or os.path.isdir(path), f"--lora_weight_path {path}: there is no such folder")
    if not model.lora_enable and "lora_enable" not in args.given:
        given = [f"--{name}" for name in LORA_FLAGS if name in args.given and args.as_dict()[name] is not None]
        check(
            not given,
            f"{', '.join(given)} without --lora_enable would train the whole language model: give --lora_enable True, "
            "or --lora_enable False if that is meant",
        )
    return problems


def _recipe_of(argv: list[str]) -> str | None:
    """The recipe that the command line names; of two the last counts, as for every flag."""
    path = None
    for i, token in enumerate(argv):
        if token.startswith("--recipe="):
            path = token.split("=", 1)[1]
        elif token == "--recipe":
            if i + 1 == len(argv):
                raise ConfigError("--recipe needs the path of a YAML file")
            path = argv[i + 1]
    return path


def _as_tokens(flags: dict[str, object]) -> list[str]:
    """Flags as a command line has them, in one token each, for a value may begin with a hyphen."""
    return [f"--{name}={value}" for name, value in flags.items() if value is not None]


def _unknown_flags(unknown: list[str], parser: HfArgumentParser, own_flags: Collection[str]) -> str:
    known = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    known += own_flags
    lines = []
    after_flag = False
    for token in unknown:
        flag = token.split("=", 1)[0]
        if not flag.startswith("-"):
            if not after_flag:
                lines.append(f"unexpected argument {flag!r}: every value belongs behind a --flag")
            continue
        after_flag = "=" not in token
        if NO_PARALLELISM.fullmatch(flag.replace("-", "_").replace("__", "--", 1)):
            lines.append(f"unknown flag {flag}: leave it out, for ZeRO over all ranks is the only parallelism here")
            continue
        nearest = [ELSEWHERE[flag]] if flag in ELSEWHERE else difflib.get_close_matches(flag, known, n=1, cutoff=0.7)
        hint = f": did you mean {nearest[0]}?" if nearest else ": run/train.py --help lists all flags"
        lines.append(f"unknown flag {flag}{hint}")
    return "\n".join(lines)
