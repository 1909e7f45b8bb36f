"""Parse a command line and a recipe, and check the flags. All problems are reported before anything is built."""

import argparse
import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from llava_ds.config.arguments import SECTIONS, Arguments, declared_by, loaded, traits_of
from llava_ds.config.bounds import bounds_of, in_a_line
from llava_ds.config.flags import Flag, HfArgumentParser, string_to_bool
from llava_ds.config.model_flags import tower_folders
from llava_ds.config.other_trainers import CHECKPOINTING, WITHOUT_EFFECT, without_effect
from llava_ds.config.recipes import DS_CONFIGS, RECIPES, found, read_recipe, recipe_of
from llava_ds.config.rules import CHOOSE_DS_CONFIG, is_installed, problems_of, switched_off
from llava_ds.config.training_flags import OPTIMS, TRACKERS
from llava_ds.constants import (
    EXIT_BAD_INPUT,
    EXIT_NOT_RESUMABLE,
    EXIT_STOPPED,
    ConfigError,
    FlagProblems,
    in_short,
)
from llava_ds.extensions.active import flags_class, owners, plugins, requested
from llava_ds.extensions.table import EXTENSIONS, Trigger

KINDS = {int: "not a whole number", float: "not a number", string_to_bool: "neither True nor False"}


class _Parser(HfArgumentParser):
    """Parser that raises ConfigError. wrong: a list that collects a line for each invalid value, in which case the flag
    gets its default; None to raise ConfigError for the first invalid value."""

    wrong: list[str] | None = None

    def add_argument(self, *names: str, flag: Flag | None = None, **options: object) -> argparse.Action:
        """Add an option. flag: its declaration, for its group and kind in --help.

        An option may be added again: extensions that no run combines may have options of the same name.
        """
        for name in names:
            self._option_string_actions.pop(name, None)
        action = super().add_argument(*names, **options)
        action.flag = flag
        return action

    def error(self, message: str) -> None:
        raise ConfigError("\n".join([*(self.wrong or ()), in_a_line(message)]))

    def _get_value(self, action: argparse.Action, text: str) -> object:
        """Convert an argument to the flag's type, and check it against the flag's choices."""
        try:
            value = super()._get_value(action, text)
            super()._check_value(action, value)
            return value
        except argparse.ArgumentError as error:
            # Replace argparse's message, "invalid int value".
            is_plain = action.type in KINDS and action.choices is None
            why = f"--{action.dest} {in_short(text)} is {KINDS[action.type]}" if is_plain else in_a_line(str(error))
            if self.wrong is None:
                raise ConfigError(why) from None
            self.wrong.append(why)
            return action.default

    def _check_value(self, action: argparse.Action, value: object) -> None:
        """Do nothing, because _get_value has checked the value."""

    def format_help(self, topic: str | None = None) -> str:
        """Format the flags by group. topic: see help_text."""
        from llava_ds.config.help_text import help_text

        return help_text(self, topic)

    def add_values(self, trigger: Trigger) -> None:
        """Add an extension's values to the choices of core flags."""
        for name, values in trigger.adds.items():
            action = self._option_string_actions[f"--{name}"]
            action.choices = [*action.choices, *values]
            action.help = "; ".join([action.help[:-1], *(f"{value}: {text}" for value, text in values.items())]) + "."

    def parse_known_args(self, args=None, namespace=None):
        """Parse as argparse does. In addition, accept the switch --deepspeed of DeepSpeed's add_config_arguments if
        --deepspeed_config is given, and values of --image_value_range that begin with a minus."""
        if args is not None and any(token.split("=", 1)[0] == "--deepspeed_config" for token in args):
            pairs = zip(args, [*args[1:], "--"])
            args = [token for token, after in pairs if token != "--deepspeed" or not after.startswith("--")]
        return super().parse_known_args(args and _joined_ranges(args), namespace)


def _joined_ranges(args: list[str]) -> list[str]:
    """Join --image_value_range and its value to one argument, because a value like -1000,3000 looks like an option."""
    names, joined = ("--image_value_range", "--image-value-range"), []
    for token in args:
        if joined and joined[-1] in names:
            joined[-1] += f"={token}"
        else:
            joined.append(token)
    return joined


class _Help(argparse.Action):
    """Prints the flags and ends the process."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: object, topic: str | None, *_: object) -> None:
        parser._print_message(build_parser().format_help(topic), sys.stdout)
        parser.exit()


def build_parser(extensions: Iterable[str] = EXTENSIONS) -> HfArgumentParser:
    """Build the parser of run/train.py with the flags of the core and these extensions (default: all extensions)."""
    sections = [*SECTIONS, *map(flags_class, extensions)]
    parser = _Parser(
        sections,
        description="Train a LLaVA.",
        epilog="SIGTERM, SIGINT, SIGUSR1 and a closed terminal (SIGHUP, without nohup) save at the next step and exit; "
        f"a second SIGTERM or SIGINT exits at once. Exit codes: 0 finished, {EXIT_BAD_INPUT} the input can't be used, "
        f"{EXIT_STOPPED} stopped on request: the same command resumes, {EXIT_NOT_RESUMABLE} stopped on request, and "
        "the saved files can't be resumed from (--save_only_model, --save_strategy no) (docs/checkpoints.md).",
        allow_abbrev=False,
        add_help=False,
    )
    topic = (
        "Show the core's flags and the names of extensions. With an extension's name: its flags; with all: every flag."
    )
    parser.add_argument("-h", "--help", action=_Help, nargs="?", metavar="NAME|all", help=topic)
    for trigger in EXTENSIONS.values():
        parser.add_values(trigger)
    ranges = {name: bounds.range for section in sections for name, bounds in bounds_of(section).items()}
    for action in parser._actions:
        if text := ranges.get(action.dest):
            action.help = f"{action.help} {text}"
    recipe, rank = Flag("run", path="file"), Flag("run", per_machine=True)
    parser.add_argument("--recipe", flag=recipe, help="YAML file of flags; the command line overrides it.")
    parser.add_argument("--local_rank", flag=rank, type=int, help="Set by the deepspeed launcher; LOCAL_RANK is used.")
    for name, (allowed, reason) in WITHOUT_EFFECT.items():
        accepted = "Accepted without effect" if allowed is None else f"Accepted as {allowed[0]} only"
        parser.add_argument(f"--{name}", nargs="?", const="True", help=f"{accepted}: {reason}.")
    return parser


def parse_arguments(
    argv: list[str], defaults: dict[str, object] | None = None, to_train: bool = True, own_flags: Collection[str] = ()
) -> tuple[Arguments, list[str]]:
    """Parse and check the flags. Returns them with ~ in paths expanded, and notes to print.

    argv: the command line without the program's name; defaults: values of flags that neither argv nor the recipe gives,
    which do not count as given; to_train: also check requirements of training; own_flags: other flags of the script,
    to suggest them. Raises ConfigError that lists all problems, and which of the flags come from a recipe.
    """
    try:
        return _parsed(argv, defaults, to_train, own_flags)
    except ConfigError as error:
        message = str(error)
        with contextlib.suppress(ConfigError):  # the message may be about the recipe itself
            message = explained(message, recipe_values(argv, defaults))
        if isinstance(error, FlagProblems):
            raise FlagProblems(message, error.arguments) from None
        raise ConfigError(message) from None


def recipe_values(argv: list[str], defaults: dict[str, object] | None = None) -> dict[str, str]:
    """Return, for each flag that a recipe but not the command line sets, a sentence with its value and the recipe.

    defaults: flags of the tiny model's recipe. Raises ConfigError if the recipe of argv can't be read.
    """
    path, written = recipe_of(argv), _written(argv)
    recipe, defaults = _without_contradictions({} if path is None else read_recipe(path), defaults or {}, written)
    found = {name: f"--{name} {value} is from the tiny model's recipe" for name, value in defaults.items()}
    found |= {name.replace("-", "_"): f"--{name} {value} is from --recipe {path}" for name, value in recipe.items()}
    return {name: sentence for name, sentence in found.items() if name not in written}


def explained(message: str, sources: Mapping[str, str]) -> str:
    """Append to a message the sentence about each flag that it names. sources: sentences by flag (recipe_values)."""
    named = dict.fromkeys(_flags_in(message))
    lines = [sources[name] for name in named if name in sources and sources[name] not in message]
    return "\n".join([message, *lines])


def _flags_in(text: str) -> list[str]:
    """Return the names of the flags in a text."""
    return re.findall(r"(?<![\w-])--(\w+)", text)


def _parsed(
    argv: list[str], defaults: dict[str, object] | None, to_train: bool, own_flags: Collection[str]
) -> tuple[Arguments, list[str]]:
    recipe_path = recipe_of(argv)
    recipe = {} if recipe_path is None else read_recipe(recipe_path)
    written = _written(argv)
    _load_plugins(argv, recipe.get("plugin"))
    recipe, defaults = _without_contradictions(recipe, defaults or {}, written)
    words = [f"--{k}={v}" for flags in (defaults, recipe) for k, v in flags.items() if v is not None] + argv
    names = {name.replace("-", "_") for name in (*defaults, *recipe)} | written
    extensions = requested(dict.fromkeys(names) | _chosen_values(words))
    parser = build_parser(extensions)
    for name in sorted(names):
        if (owned := owners([name])) and not set(owned) & set(extensions):  # a rule refuses it for this value
            parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", nargs="*", default=argparse.SUPPRESS)
    wrong = parser.wrong = []
    model, data, training, *own, rest, unknown = parser.parse_args_into_dataclasses(
        words, return_remaining_strings=True, look_for_args_file=False
    )
    options = {option: action for action in parser._actions for option in action.option_strings}
    if unknown:
        from llava_ds.config.other_names import unknown_flags

        every = {option: action for action in build_parser()._actions for option in action.option_strings}
        known = {option: action for option, action in every.items() if option.startswith("--")}
        wrong += unknown_flags(unknown, known | dict.fromkeys(own_flags))

    if "eval_fraction" in written and not (data.eval_fraction or data.eval_data_path or "eval_steps" in written):
        training = dataclasses.replace(training, eval_steps=None)  # from a recipe, but eval is turned off
        recipe.pop("eval_steps", None)
    names = {name.replace("-", "_") for name in recipe} | written
    given = {options[f"--{name}"].dest for name in names if f"--{name}" in options}
    own = loaded(dict(zip(extensions, own)), (model, data, training))
    args = Arguments(model, data, training, frozenset(given), own)
    args, problems = _converted(_with_full_paths(args))
    not_supported, notes = without_effect(rest)
    problems += [*not_supported, *problems_of(args, to_train)]
    if wrong:
        # Leave out other problems with the flags that these messages name: they may go away with correct values.
        unsure = set(_flags_in("\n".join(wrong)))
        raise ConfigError("\n".join([*wrong, *(each for each in problems if unsure.isdisjoint(_flags_in(each)))]))
    if problems:
        raise FlagProblems("\n".join(problems), args)
    notes += [line for flags in args.own.values() for line in flags.notes(args)]
    return args, notes + switched_off(args)


def _load_plugins(argv: list[str], recipe: object = None) -> None:
    """Load the files of --plugin, or of the recipe if the command line has none, and unload other plugins."""
    if recipe is not None or "plugin" in _written(argv) or plugins():
        from llava_ds.config.plugins import load_named

        load_named(argv, recipe)


def _chosen_values(words: list[str]) -> dict[str, str]:
    """Return the values on a command line of core flags to which extensions add values, by flag."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in dict.fromkeys(name for trigger in EXTENSIONS.values() for name in trigger.adds):
        parser.add_argument(f"--{name}", nargs="?")
    return vars(parser.parse_known_args(words)[0])


def _written(argv: Sequence[str]) -> set[str]:
    """Return the names of the flags on a command line, with underscores instead of hyphens."""
    return {token[2:].split("=", 1)[0].replace("-", "_") for token in argv if token.startswith("--")}


def _without_contradictions(recipe: dict, defaults: dict, written: set[str]) -> tuple[dict, dict]:
    """Return the recipe and the defaults without flags that other flags on the command line contradict."""
    if {"per_device_train_batch_size", "gradient_accumulation_steps"} <= written:
        recipe = {name: value for name, value in recipe.items() if name != "train_batch_size"}
    if "eval_data_path" in written:
        recipe, defaults = ({k: v for k, v in flags.items() if k != "eval_fraction"} for flags in (recipe, defaults))
    return recipe, defaults


def _with_full_paths(args: Arguments) -> Arguments:
    """Expand ~ in paths, and replace the name of a file in ds_configs/ by its path."""
    flags = args.flags
    paths = {name: value for name, value in args.as_dict().items() if flags[name].path and isinstance(value, str)}
    args = args.replaced(**{name: os.path.expanduser(value) for name, value in paths.items()})
    if len(folders := tower_folders(args.model.vision_tower)) > 1:
        args = args.replaced(vision_tower=",".join(map(os.path.expanduser, folders)))
    if args.training.deepspeed_config not in (None, CHOOSE_DS_CONFIG):
        return args.replaced(deepspeed_config=found(args.training.deepspeed_config, DS_CONFIGS, ".json"))
    return args


def _converted(args: Arguments) -> tuple[Arguments, list[str]]:
    """Convert flags whose values may be words or numbers, or have synonyms. Also returns a line for each invalid
    value."""
    values, problems = {}, []
    word = args.training.gradient_checkpointing
    if (known := CHECKPOINTING.get(word.lower())) is None:
        problems.append(f"--gradient_checkpointing {word} is unknown: give off, all or auto (or False or True)")
    values["gradient_checkpointing"] = known or "off"
    tokens = args.training.tokens_per_micro_batch
    if tokens == "none":  # overrides a recipe
        values["tokens_per_micro_batch"] = None
    elif tokens not in (None, "auto"):
        try:
            values["tokens_per_micro_batch"] = int(tokens)
        except ValueError:
            problems.append(f"--tokens_per_micro_batch {tokens} is not a whole number: give one, auto or none")
            values["tokens_per_micro_batch"] = None
    if (optim := OPTIMS.get(args.training.optim)) is None:
        problems.append(
            f"--optim {in_short(args.training.optim)} is unknown: give one of {', '.join(OPTIMS)}, or name another "
            'optimizer in the DeepSpeed JSON, like "optimizer": {"type": "Lion"}'
        )
    if isinstance(args.training.plugin, list):
        values["plugin"] = ",".join(args.training.plugin)
    values["optim"] = optim or args.training.optim
    values["report_to"], unknown = _trackers(args.training.report_to)
    known = f"give some of {', '.join(TRACKERS)}, or all, or none"
    problems += [f"--report_to {name} is unknown: {known}" for name in unknown]
    args, own = args.replaced(**values), {name: flags.converted() for name, flags in args.own.items()}
    problems += [line for _, lines in own.values() for line in lines]
    core = (args.model, args.data, args.training)
    return dataclasses.replace(args, own=loaded({name: flags for name, (flags, _) in own.items()}, core)), problems


def _trackers(value: str | list[str] | None) -> tuple[str | None, list[str]]:
    """Return the trackers of --report_to, separated by commas (None if it was not given), and the unknown names."""
    if value is None:
        return None, []
    words = [value] if isinstance(value, str) else value
    names = [name for word in words for name in word.replace(",", " ").split()]
    if names == ["none"]:
        names = []
    elif names == ["all"]:
        names = [name for name in TRACKERS if is_installed(name)]
    return ",".join(dict.fromkeys(names)), [name for name in names if name not in TRACKERS]


def tiny_defaults(argv: list[str], recipes: Path) -> dict[str, object]:
    """Return the flags of the tiny model's recipe for this stage; {} if the user names a model or a recipe.

    With the user's own data, or if training samples answers, the recipe's eval flags are left out unless a flag on the
    command line requests an eval.
    """
    flags = _written(argv)
    if flags & {"model_name_or_path", "recipe"}:
        return {}
    _load_plugins(argv)
    tokens = [token for token in argv if token not in ("-h", "--help")]  # --help is handled later, with all sections
    parser = build_parser(())
    parser.wrong = []  # ignore invalid values here; parse_arguments reports them
    written = parser.parse_known_args(tokens)[0]
    defaults = read_recipe(recipes / f"tiny-{'pretrain' if written.tune_mm_mlp_adapter else 'finetune'}.yaml")
    traits = traits_of(written.objective, loaded({}, [written]))
    if ("data_path" in flags or traits.draws) and not flags & {"eval_fraction", "eval_data_path"}:
        flags |= {"eval_fraction", "eval_steps"}
    if traits.scores:  # gives no answers
        requested = map(flags_class, owners(defaults))
        flags |= {flag for section in requested if section.needs_text for flag in declared_by(section)}
    return {name: value for name, value in defaults.items() if name not in flags}


def read_training_flags(argv: list[str]) -> tuple[Arguments, list[str]]:
    """Parse run/train.py's flags, with the tiny model's defaults if no model is named: see parse_arguments."""
    return parse_arguments(argv, defaults=tiny_defaults(argv, RECIPES))
