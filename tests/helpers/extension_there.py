"""Skip tests of the core and of other extensions if an extension that they also use was deleted."""

import pytest

from llava_ds.config.arguments import every_flag
from llava_ds.extensions.table import EXTENSIONS

AXES = [name for name, flag in every_flag().items() if flag.shares_samples]  # flags of sizes


def if_there(name: str, **flags: object) -> dict[str, object]:
    """The flags, if the extension that they belong to is there."""
    return flags if name in EXTENSIONS else {}


def needs_extension(name: str) -> pytest.MarkDecorator:
    """Return a mark for a test that also needs an extension."""
    return pytest.mark.skipif(name not in EXTENSIONS, reason=f"there is no extension {name}")
