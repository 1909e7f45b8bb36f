"""Refuse to open a model without a --plugin that it needs to answer."""

import functools
import os
import sys

from llava_ds.constants import ConfigError
from llava_ds.extensions.active import plugins


def refuse_missing(config: dict[str, object], where: str) -> None:
    """Raise ConfigError if a model needs a plugin to answer that is not loaded.

    config: a config.json with the entries of active.plugin_entries(). Warns once if a plugin's content has changed.
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
