"""Models that were trained with --plugin are opened with it only."""

import functools
import os
import sys

from llava_ds.constants import ConfigError
from llava_ds.extensions.active import plugins


def refuse_missing(named: object, where: str) -> None:
    """Raise ConfigError for a model that names plugins that are not loaded.

    named: llava_ds_plugin of its config.json, sha256 by name. Prints a line, once, for each with another content.
    """
    if not isinstance(named, dict) or not all(isinstance(each, str) for pair in named.items() for each in pair):
        raise ConfigError(f"{where}: llava_ds_plugin in config.json is not names with sha256: copy the folder again")
    now = plugins()
    if missing := [f"{name}.py (sha256 {digest[:12]})" for name, digest in named.items() if name not in now]:
        raise ConfigError(f"{where} was trained with a plugin, {' and '.join(missing)}: give its path as --plugin FILE")
    for name, digest in named.items():
        if now[name] != digest:
            _say(f"{where} was trained with another {name}.py (sha256 {digest[:12]}, --plugin has {now[name][:12]})")


@functools.cache
def _say(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr)
