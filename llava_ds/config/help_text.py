"""The text of --help."""

import argparse

from llava_ds.config.flags import GROUPS, string_to_bool
from llava_ds.config.other_trainers import WITHOUT_EFFECT
from llava_ds.constants import ConfigError, did_you_mean
from llava_ds.extensions.table import EXTENSIONS

FEW_CHOICES = 5  # flags with more choices list them in their help text


def help_text(parser: argparse.ArgumentParser, topic: str | None) -> str:
    """Format the flags by group, each in one spelling: without its variants with hyphens, and without --no_<name>.

    topic: the name of an extension, for its flags only; "all", for flags of the core and all extensions; None, for
    flags of the core and a line per extension. Raises ConfigError for any other topic.
    """
    if topic not in (None, "all", *EXTENSIONS):
        known = f"give all, or an extension: {', '.join(EXTENSIONS)}"
        raise ConfigError(f"--help {topic}: unknown extension: {did_you_mean(topic, EXTENSIONS, known)}")
    formatter = _HelpFormatter(parser.prog)
    formatter.add_usage(f"{parser.prog} [--recipe FILE] [--name value ...]", [], [])
    formatter.add_text(parser.description)
    actions: dict[tuple, argparse.Action] = {}
    for action in parser._actions:  # keep the first action of a flag: --name, not --no_name
        actions.setdefault((action.dest, action.flag and action.flag.group), action)
    titles = {name: f"{name}: {trigger.title}" for name, trigger in EXTENSIONS.items()}
    titles = {topic: titles[topic]} if topic in titles else {**GROUPS, **(titles if topic == "all" else {})}
    sections = {
        title: [action for action in actions.values() if action.flag and action.flag.group == group]
        for group, title in titles.items()
    }
    if topic not in EXTENSIONS:
        sections[GROUPS["run"]].append(actions["help", None])
        sections["accepted without effect, for LLaVA's scripts"] = [actions[name, None] for name in WITHOUT_EFFECT]
    for title, members in sections.items():
        formatter.start_section(title)
        formatter.add_arguments(members)
        formatter.end_section()
    if topic is None:
        formatter.start_section("extensions (--help NAME shows one's flags, --help all shows all)")
        formatter.add_arguments(
            [argparse.Action([], name, help=each.title, metavar=name) for name, each in EXTENSIONS.items()]
        )
        formatter.end_section()
    if topic not in EXTENSIONS:
        formatter.add_text(parser.epilog)
    return formatter.format_help()


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Formats a flag in one spelling, with a word for the kind of its value."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return str(action.metavar)
        names = [name for name in action.option_strings if "-" not in name.lstrip("-")]
        if action.nargs == 0:
            return ", ".join(names)
        words = {int: "N", float: "X", string_to_bool: "True|False"}
        kind = "PATH" if action.flag and action.flag.path else words.get(action.type, "TEXT")
        if action.choices is not None:
            kind = "{" + ",".join(map(str, action.choices)) + "}" if len(action.choices) <= FEW_CHOICES else "NAME"
        return f"{', '.join(names)} {f'[{kind}]' if action.nargs in ('?', '*') else kind}"

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help if action.default in (None, False) else super()._get_help_string(action)
        many = action.choices is not None and len(action.choices) > FEW_CHOICES
        return f"{text} One of {', '.join(map(str, action.choices))}." if many else text
