"""No flags of its own: values of the core's ask for it."""

from dataclasses import dataclass

from llava_ds.extensions.base import ExtensionFlags


@dataclass(frozen=True)
class Flags(ExtensionFlags):
    """None."""
