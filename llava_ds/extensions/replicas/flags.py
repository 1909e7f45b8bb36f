"""The flag for comparing the ranks' copies of the weights."""

from dataclasses import dataclass
from typing import ClassVar

from llava_ds.config.bounds import NotNegative
from llava_ds.config.flags import flags_of
from llava_ds.extensions.base import ExtensionFlags

_, _replicas_free = flags_of("replicas")


@dataclass(frozen=True)
class Flags(ExtensionFlags):
    """The flag for comparing the ranks' copies of the weights."""

    zeros: ClassVar = {"check_divergence_steps": "copies of the weights are never compared"}

    check_divergence_steps: NotNegative = _replicas_free(
        1000,
        "Steps between comparisons of the weights that every rank holds a copy of: all weights at ZeRO 0 to 2, the "
        "smallest at 3. A difference ends the run, and the error names the rank. 0: never.",
    )
