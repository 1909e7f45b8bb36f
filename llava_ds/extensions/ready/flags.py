"""Ready models have no flags of their own: the extension is loaded for a model's folder."""

from dataclasses import dataclass

from llava_ds.extensions.base import ExtensionFlags


@dataclass(frozen=True)
class Flags(ExtensionFlags):
    """No flags."""
