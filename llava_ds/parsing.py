"""From a command line and a recipe to checked flags: every problem is found before anything is built."""

import difflib
import math
import os
import re
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path

import yaml
from transformers import HfArgumentParser

from llava_ds.arguments import (
    TRACKERS,
    TUNABLE_PARTS,
    Arguments,
    DataArguments,
    ModelArguments,
    TrainingArguments,
    trained_parts,
)
from llava_ds.constants import EXIT_BAD_INPUT, EXIT_STOPPED, PILLOW_MAX_PIXELS, ConfigError
from llava_ds.durations import seconds_of

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
    "evaluation_strategy": (("no", "steps"), "--eval_steps says when the held-out loss is measured"),
    "eval_strategy": (("no", "steps"), "--eval_steps says when the held-out loss is measured"),
    "per_device_eval_batch_size": (None, "held-out samples are laid out as those of training"),
}

# What other trainers call a flag of ours, where the nearest name would lead astray.
ELSEWHERE = {
    "--cutoff_len": "--model_max_length",
    "--dataset": "--data_path",
    "--ddp_timeout": "the variable DEEPSPEED_TIMEOUT (minutes)",
    "--finetuning_type": "--lora_enable",
    "--lora_rank": "--lora_r",
    "--max_length": "--model_max_length",
    "--max_seq_length": "--model_max_length",
    "--media_dir": "--image_folder",
    "--optim": "an optimizer in the DeepSpeed JSON",
    "--overwrite_output_dir": "--resume never",
    "--quantization_bit": "--bits",
    "--resume_from_checkpoint": "--resume",
    "--template": "--version",
    "--use_peft": "--lora_enable",
    "--val_size": "--eval_fraction",
}

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

# Flags that ask for an order of the samples, and what data/sampler.py calls it.
GROUPINGS = {"group_by_modality_length": "modality", "group_by_length": "length", "group_by_length_bucket": "bucket"}


class _Parser(HfArgumentParser):
    def error(self, message: str) -> None:
        raise ConfigError(message)


def build_parser() -> HfArgumentParser:
    """The parser of run/train.py; its --help is the reference of all flags."""
    parser = _Parser(
        (ModelArguments, DataArguments, TrainingArguments),
        description="Train a LLaVA.",
        epilog="SIGTERM, SIGINT and SIGUSR1 save at the next step and leave; a second of the first two leaves at once. "
        f"Exit codes: 0 finished, {EXIT_BAD_INPUT} the input can't be used, {EXIT_STOPPED} stopped as asked: the same "
        "command goes on (docs/checkpoints.md).",
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
    try:
        recipe = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--recipe {path} can't be read: {error}") from error
    if not isinstance(recipe, dict) or any(isinstance(v, (dict, list)) for v in recipe.values()):
        raise ConfigError(f"--recipe {path} must be a YAML mapping of flag names to single values")
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
    recipe = read_recipe(recipe_path) if recipe_path else {}
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

    given = {name.replace("-", "_") for name in recipe} | {name.removeprefix("no_") for name in written}
    aliases = {"deepspeed": "deepspeed_config", "verbose_logging": "verbose"}
    given = {aliases.get(name, name) for name in given}
    args = Arguments(model, data, training, frozenset(given))
    values = args.as_dict()
    args = args.replaced(**{name: os.path.expanduser(values[name]) for name in PATHS if values[name] is not None})
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
    problems += data_problems(args) + (training_problems(args) if to_train else []) + lora_problems(args)
    if problems:
        raise ConfigError("\n".join(problems))
    return args, notes


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


def data_problems(args: Arguments) -> list[str]:
    """Everything that is wrong with the flags that say what is read, and with the paths they name, a line each."""
    data = args.data
    problems = _below(
        args,
        max_image_pixels=1,
        model_max_length=2,
        dataloader_num_workers=0,
        preprocessing_num_workers=1,
        video_fps=1,
        frames_upbound=0,
        mm_spatial_pool_stride=1,
    )

    def check(ok: bool, message: str) -> None:
        if not ok:
            problems.append(message)

    check(0 <= data.max_bad_fraction <= 1, f"--max_bad_fraction is {data.max_bad_fraction}: give a value from 0 to 1")
    check(
        re.fullmatch(r"square|pad|original|anyres|anyres_max_[1-9]\d*", data.image_aspect_ratio) is not None,
        f"--image_aspect_ratio {data.image_aspect_ratio} is unknown: give square, pad, original, anyres or "
        "anyres_max_N with a number of tiles, like anyres_max_9",
    )
    check(
        data.max_image_pixels <= PILLOW_MAX_PIXELS,
        f"--max_image_pixels is {data.max_image_pixels}: give {PILLOW_MAX_PIXELS} or less, for Pillow opens no picture "
        "with more",
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
    problems = _below(
        args,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        train_batch_size=1,
        tokens_per_micro_batch=1,
        gradient_checkpointing_every_n_layers=1,
        logging_steps=1,
        save_steps=1,
        save_total_limit=1,
        max_skipped_steps=1,
        num_sample_questions=1,
        sample_max_new_tokens=1,
        loss_spike_window=4,
        check_divergence_steps=0,
        watchdog_start_s=0,
        watchdog_step_s=0,
        watchdog_save_s=0,
    )

    def check(ok: bool, message: str) -> None:
        if not ok:
            problems.append(message)

    for name in (
        "learning_rate",
        "mm_projector_lr",
        "mm_vision_tower_lr",
        "weight_decay",
        "max_grad_norm",
        "adam_epsilon",
    ):
        value = args.as_dict()[name]
        check(value is None or (math.isfinite(value) and value >= 0), f"--{name} is {value}: give 0 or more")
    budget = training.activation_memory_gb
    check(
        budget is None or (math.isfinite(budget) and budget > 0),
        f"--activation_memory_gb is {budget}: give GB above 0, like 40",
    )
    check(
        budget is None or "auto" in (training.gradient_checkpointing, training.tokens_per_micro_batch),
        f"--activation_memory_gb {budget} is what --gradient_checkpointing auto and --tokens_per_micro_batch auto may "
        "use: give one of them, or leave it out",
    )
    for name in ("adam_beta1", "adam_beta2"):
        check(0 <= args.as_dict()[name] < 1, f"--{name} is {args.as_dict()[name]}: give a value from 0 to below 1")
    check(0 <= training.warmup_ratio <= 1, f"--warmup_ratio is {training.warmup_ratio}: give a value from 0 to 1")
    steps = training.warmup_steps
    check(
        0 <= steps < 1 or (math.isfinite(steps) and steps == int(steps) > 0),
        f"--warmup_steps is {steps}: give a whole number, or their part of all steps from 0 to below 1",
    )
    check(
        training.max_steps > 0 or 0 < training.num_train_epochs < math.inf,
        f"--num_train_epochs is {training.num_train_epochs}: give a value above 0, or --max_steps",
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
    check(0 <= part < 1, f"--eval_fraction is {part}: give a value from 0 to below 1")
    check(not (part and held_out), "--eval_fraction and --eval_data_path are both given: choose one")
    for name in ("eval_steps", "sample_steps"):
        value = args.as_dict()[name]
        check(
            value is None or 0 <= value < 1 or (math.isfinite(value) and value == int(value) > 0),
            f"--{name} is {value or 0:g}: give a whole number of steps, or a part of all steps below 1",
        )
    check(
        not training.eval_steps or part or held_out is not None,
        f"--eval_steps {training.eval_steps or 0:g} measures the loss on held-out samples: give --eval_data_path or "
        "--eval_fraction, too",
    )
    check(
        bool(training.sample_steps) or data.sample_data_path is None,
        f"--sample_data_path {data.sample_data_path} has questions for --sample_steps: give it, too",
    )
    sigma = training.loss_spike_sigma
    check(math.isfinite(sigma) and sigma > 0, f"--loss_spike_sigma is {sigma}: give a value above 0, like 6")
    check(
        training.on_loss_spike != "rewind" or training.save_strategy == "steps",
        "--on_loss_spike rewind goes back to a checkpoint, and --save_strategy no saves none: give steps",
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
        "--deepspeed_config is missing: name a DeepSpeed JSON, for example ds_configs/zero3.json, or give auto",
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
    problems = _below(args, lora_r=1, lora_alpha=1)

    def check(ok: bool, message: str) -> None:
        if not ok:
            problems.append(message)

    check(0 <= model.lora_dropout < 1, f"--lora_dropout is {model.lora_dropout}: give a value from 0 to below 1")
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


def _below(args: Arguments, **least: int) -> list[str]:
    """A line for every flag below the least that it may be."""
    values = args.as_dict()
    wrong = [name for name in least if values[name] not in (None, "auto") and values[name] < least[name]]
    return [f"--{name} is {values[name]}: give {least[name]} or more" for name in wrong]


def can_be_made(folder: str) -> bool:
    """Whether the folder, or the nearest one above it that exists, is a folder that may be written to."""
    path = Path(folder).expanduser().absolute()
    while not path.exists():
        path = path.parent
    return path.is_dir() and os.access(path, os.W_OK)


def _recipe_of(argv: list[str]) -> str | None:
    for i, token in enumerate(argv):
        if token.startswith("--recipe="):
            return token.split("=", 1)[1]
        if token == "--recipe":
            if i + 1 == len(argv):
                raise ConfigError("--recipe needs the path of a YAML file")
            return argv[i + 1]
    return None


def _as_tokens(flags: dict[str, object]) -> list[str]:
    return [token for name, value in flags.items() if value is not None for token in (f"--{name}", str(value))]


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
        nearest = [ELSEWHERE[flag]] if flag in ELSEWHERE else difflib.get_close_matches(flag, known, n=1, cutoff=0.7)
        hint = f": did you mean {nearest[0]}?" if nearest else ": run/train.py --help lists all flags"
        lines.append(f"unknown flag {flag}{hint}")
    return "\n".join(lines)
