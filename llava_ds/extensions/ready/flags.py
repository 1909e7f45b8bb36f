"""An empty flag section: this extension is loaded because of the model's folder, not because of a flag."""

from dataclasses import dataclass

from llava_ds.extensions.base import ExtensionFlags


@dataclass(frozen=True)
class Flags(ExtensionFlags):
    """No flags."""
