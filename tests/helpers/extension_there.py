"""Tests of the core and of other extensions that take an extension along, which may have been deleted."""

import pytest

from llava_ds.config.arguments import every_flag
from llava_ds.extensions.table import EXTENSIONS

AXES = [name for name, flag in every_flag().items() if flag.shares_samples]  # flags of sizes


def if_there(name: str, **flags: object) -> dict[str, object]:
    """The flags, if the extension that they belong to is there."""
    return flags if name in EXTENSIONS else {}


def runs_there(runs: dict) -> dict:
    """The runs of which there are all flags: what each is described by, or the last of that."""
    flags = {name: run[-1] if isinstance(run, tuple) else run for name, run in runs.items()}
    return {name: run for name, run in runs.items() if flags[name].keys() <= every_flag().keys()}


def needs_extension(name: str) -> pytest.MarkDecorator:
    """A mark for a test that is about an extension, too."""
    return pytest.mark.skipif(name not in EXTENSIONS, reason=f"there is no extension {name}")
