"""Models that need a --plugin to answer are opened with it only."""

import functools
import os
import sys

from llava_ds.constants import ConfigError
from llava_ds.extensions.active import plugins


def refuse_missing(config: dict[str, object], where: str) -> None:
    """Raise ConfigError for a model that names plugins that are not loaded, and that it needs to answer.

    config: with the entries of active.plugin_entries(). Prints a line, once, for each plugin with another content.
    """
    named, free = config["llava_ds_plugin"], config.get("llava_ds_answers_without", [])
    is_valid = isinstance(named, dict) and all(isinstance(each, str) for pair in named.items() for each in pair)
    if not (is_valid and isinstance(free, list)):
        raise ConfigError(f"{where}: llava_ds_plugin in config.json is not names with sha256: copy the folder again")
    now = plugins()
    missing = [f"{name}.py (sha256 {digest[:12]})" for name, digest in named.items() if name not in [*now, *free]]
    if missing:
        raise ConfigError(f"{where} was trained with a plugin, {' and '.join(missing)}: give its path as --plugin FILE")
    for name, digest in named.items():
        if now.get(name, digest) != digest:
            _say(f"{where} was trained with another {name}.py (sha256 {digest[:12]}, --plugin has {now[name][:12]})")


@functools.cache
def _say(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr)
