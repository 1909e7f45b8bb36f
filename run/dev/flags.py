"""Write the page of all flags, from the code that reads them: python run/dev/flags.py > docs/flags.md"""

import argparse
import contextlib
import importlib.util
import inspect
import re
import sys
import typing
from dataclasses import fields
from pathlib import Path

from llava_ds.config.arguments import (
    DataArguments,
    ModelArguments,
    TrainingArguments,
    every_flag,
    every_objective,
)
from llava_ds.config.other_trainers import CHECKPOINTING, WITHOUT_EFFECT
from llava_ds.config.parsing import build_parser
from llava_ds.config.recipes import read_recipe
from llava_ds.data.templates import ALIASES
from llava_ds.extensions.active import flags_class
from llava_ds.extensions.table import EXTENSIONS
from llava_ds.runtime.command import given_path, new_folder

RUN = Path(__file__).parents[1]
DEV = RUN / "dev"
HEAD = ("| flag | value | default | |", "| --- | --- | --- | --- |")
SECTIONS = {"The model": ModelArguments, "The data": DataArguments, "The training": TrainingArguments}
INTRODUCTION = """# Every flag

For everybody who looks up a flag: its values, its default and its effect. `make docs` writes this page from the code
that reads the flags; `--help` of each script prints the same. `run/train.py --help` shows the core's flags and a line
for each extension, `--help NAME` those of an extension, `--help all` everything.

- A flag is `--name value` or `--name=value`, with hyphens or underscores, and never abbreviated. If a flag is given
  twice, the last one counts. An unknown flag is an error that names the nearest one.
- True or False: also `true`, `t`, `yes`, `y`, `1` and `false`, `f`, `no`, `n`, `0`, in any case. The bare flag means
  True.
- A number that is nan, infinite or beyond the range beside it is refused; so is an empty path.
- The shipped recipes and DeepSpeed JSON files are found by name in every folder: `--recipe tiny-finetune`,
  `--deepspeed_config zero3`.
- `--recipe FILE.yaml` has the same flags as `name: value`. The command line wins over the recipe, the recipe over the
  defaults. Without `--model_name_or_path` and `--recipe`, `run/train.py` uses the tiny model's recipe.
- A LLaVA in `--model_name_or_path` gives the defaults of some flags
  ([models.md](models.md#defaults-from-the-models-folder)), and so does the DeepSpeed JSON
  ([deepspeed.md](deepspeed.md#how-a-value-is-found)).
- `~` stands for the home folder in every path. Models and data are folders and files on this machine: nothing is
  downloaded.
"""


class _Parser(Exception):
    """Carries a script's parser out of its main()."""


def page(parsers: dict[str, argparse.ArgumentParser]) -> str:
    """Return the content of docs/flags.md."""
    lines = [INTRODUCTION, "## run/train.py\n", *train_flags(), *spellings(), *recipes()]
    for name, parser in parsers.items():
        if name != "train.py":
            lines += script_flags(name, parser)
    return "\n".join(lines).rstrip() + "\n"


def all_parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of every script in run/, bench.py and build_tiny.py; run/train.py's without DeepSpeed."""
    others = [path for path in sorted(RUN.glob("*.py")) if path.name not in ("train.py", "rl.py")]
    others += [DEV / "bench.py", DEV / "build_tiny.py"]
    return {"train.py": build_parser(), **{path.name: parser_of(path) for path in others}}


def train_flags() -> list[str]:
    """Return a table per section of the dataclasses, then per extension."""
    options = {action.dest: action for action in build_parser()._actions}
    lines = []
    extensions = {
        f"{name}: {trigger.title}": flags_class(name) for name, trigger in EXTENSIONS.items() if trigger.flags
    }
    for title, section in {**SECTIONS, **extensions}.items():
        if not fields(section):  # derived from other flags
            continue
        kinds = typing.get_type_hints(section)
        name = title.partition(":")[0]
        page = [f"[{name}.md]({name}.md)\n"] * (RUN.parent / "docs" / f"{name}.md").exists()
        lines += [f"### {title}\n", *page, *HEAD]
        for field in (each for each in fields(section) if each.init):
            option = options[field.name]
            names = [f"--{field.name}", *field.metadata.get("aliases", [])]
            names += [f"--no_{field.name}"] if field.default is True else []  # HfArgumentParser's
            value = value_of(field.name, kinds[field.name], option)
            lines.append(
                row(", ".join(f"`{name}`" for name in names), value, shown(field.default), in_markdown(option.help))
            )
        lines.append("")
    lines += ["### Other flags\n", *HEAD]
    for name, kind in (("recipe", "path"), ("local_rank", "whole number")):
        lines.append(row(f"`--{name}`", kind, "", in_markdown(options[name].help)))
    return [*lines, ""]


def value_of(name: str, kind: object, action: argparse.Action) -> str:
    """Describe a flag's value in a word, or list its choices."""
    if every_flag()[name].path:
        return "path"
    if name == "gradient_checkpointing":
        return ", ".join(f"`{word}`" for word in dict.fromkeys(CHECKPOINTING.values()))
    if action.choices is not None:
        return ", ".join(f"`{choice}`" for choice in action.choices)
    kinds = typing.get_args(kind) or (kind,)
    words = {bool: "True or False", int: "whole number", float: "number", str: "text"}
    return " or ".join(words[each] for each in kinds if each is not type(None)).replace(
        "number or text", "number, word"
    )


def spellings() -> list[str]:
    """List words of LLaVA's and Hugging Face's scripts with a different meaning or no meaning here."""
    meant: dict[str, list[str]] = {}
    for word, meaning in CHECKPOINTING.items():
        if word != meaning:
            meant.setdefault(meaning, []).append(f"`{word}`")
    lines = ["### LLaVA's and Hugging Face's words\n"]
    lines += [f"- `--gradient_checkpointing`: {', '.join(words)} mean `{name}`." for name, words in meant.items()]
    names = ", ".join(f"`{alias}` ({template})" for alias, template in ALIASES.items())
    lines += [f"- `--version`: {names}.", ""]
    lines += ["Flags of their scripts that are accepted and change nothing; a line at the start of a run says so:\n"]
    lines += ["| flag | accepted | why nothing reads it |", "| --- | --- | --- |"]
    for name, (allowed, reason) in WITHOUT_EFFECT.items():
        accepted = "anything" if allowed is None else ", ".join(f"`{word}`" if word else '`""`' for word in allowed)
        lines.append(row(f"`--{name}`", accepted, in_markdown(reason)))
    return [*lines, ""]


def recipes() -> list[str]:
    """Return a table of the recipes' values, a column per recipe."""
    found = {path.stem: read_recipe(path) for path in sorted((RUN / "recipes").glob("*.yaml"))}
    objectives = {"sft", *every_objective()}  # without deleted extensions
    found = {name: recipe for name, recipe in found.items() if recipe.get("objective", "sft") in objectives}
    names = list(dict.fromkeys(name for recipe in found.values() for name in recipe))
    lines = ["### The recipes\n", row("flag", *found), "| --- |" + " --- |" * len(found)]
    for name in names:
        lines.append(row(f"`--{name}`", *(shown(recipe.get(name)) for recipe in found.values())))
    return [*lines, ""]


def parser_of(script: Path) -> argparse.ArgumentParser:
    """Return the parser that a script of run/ builds in main()."""
    spec = importlib.util.spec_from_file_location(f"run_{script.stem}", script)
    module = importlib.util.module_from_spec(spec)

    def caught(parser: argparse.ArgumentParser, *_: object) -> None:
        raise _Parser(parser)

    reads, argparse.ArgumentParser.parse_known_args = argparse.ArgumentParser.parse_known_args, caught
    try:
        if str(script.parent) not in sys.path:
            sys.path.append(str(script.parent))  # bench.py imports modules in its folder
        with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed prints when it is imported
            spec.loader.exec_module(module)
            module.main(*[[] for _ in inspect.signature(module.main).parameters])
    except _Parser as found:
        return found.args[0]
    finally:
        argparse.ArgumentParser.parse_known_args = reads
    raise AssertionError(f"{script}: main() reads no flags")


def script_flags(name: str, parser: argparse.ArgumentParser) -> list[str]:
    """Return the section of another script."""
    folder = "run/dev" if (DEV / name).exists() else "run"
    lines = [f"## {folder}/{name}\n", f"{described(parser.description)}\n", *HEAD]
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction) or action.help is argparse.SUPPRESS:
            continue
        names = ", ".join(f"`{option}`" for option in action.option_strings) or f"`{action.metavar or action.dest}`"
        help_text = re.sub(r"\(?default: %\(default\)s\)?", "", action.help or "") % vars(action)
        default = "" if action.nargs == 0 else shown(action.default)
        lines.append(row(names, kind_of(action), default, in_markdown(help_text)))
    return [*lines, ""]


def described(text: str) -> str:
    """Return a script's description, with the command in its first line marked as code."""
    first, _, rest = inspect.cleandoc(text).partition("\n")
    words, colon, command = first.partition(": python ")
    first = f"{words}: `python {command}`" if colon else first
    rest = [f"`{line}`" if line.startswith("python ") else in_markdown(line) for line in rest.splitlines()]
    return "\n".join([first, *rest])


def kind_of(action: argparse.Action) -> str:
    """Describe the value of another script's flag."""
    if action.choices is not None:
        return ", ".join(f"`{choice}`" for choice in action.choices)
    if action.nargs == 0:
        return "no value"
    gives = action.type
    if inspect.isfunction(gives) and gives not in (given_path, new_folder):  # a checker, annotated with its return type
        gives = typing.get_type_hints(gives).get("return")
    kinds = {int: "whole number", float: "number", Path: "path", given_path: "path", new_folder: "path"}
    kind = kinds.get(gives, "text")
    return f"{kind}, {'one' if action.nargs == '+' else 'none'} or more" if action.nargs in ("+", "*") else kind


def shown(value: object) -> str:
    """Format a default as on the command line."""
    if value in (None, "", []):
        return ""
    if isinstance(value, (str, Path)) and Path(value).is_absolute():  # inside this repository
        value = Path(value).relative_to(RUN.parent.resolve())
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def in_markdown(text: str) -> str:
    """Return a text on one line, with code marked."""
    text = " ".join(text.split())
    return re.sub(r"(?<![\w`-])(--\w+|[\w-]*<\w+>|\w+\[\w+\]|\{[^{}]*\})", r"`\1`", text)


def row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    sys.stdout.write(page(all_parsers()))
