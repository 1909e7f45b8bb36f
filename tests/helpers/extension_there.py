"""Tests of the core and of other extensions that take an extension along, which may have been deleted."""

import pytest

from llava_ds.config.arguments import every_flag
from llava_ds.extensions.table import EXTENSIONS

AXES = [name for name, flag in every_flag().items() if flag.shares_samples]  # flags of sizes


def if_there(name: str, **flags: object) -> dict[str, object]:
    """The flags, if the extension that they belong to is there."""
    return flags if name in EXTENSIONS else {}


def needs_extension(name: str) -> pytest.MarkDecorator:
    """A mark for a test that is about an extension, too."""
    return pytest.mark.skipif(name not in EXTENSIONS, reason=f"there is no extension {name}")
