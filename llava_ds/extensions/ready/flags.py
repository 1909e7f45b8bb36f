"""Ready models have no flags of their own: a model's folder asks for them."""

from dataclasses import dataclass

from llava_ds.extensions.base import ExtensionFlags


@dataclass(frozen=True)
class Flags(ExtensionFlags):
    """No flags."""
