"""The flag of the integrity checks."""

from dataclasses import dataclass
from typing import ClassVar

from llava_ds.config.bounds import NotNegative
from llava_ds.config.flags import flags_of
from llava_ds.extensions.base import ExtensionFlags

_, _integrity_free = flags_of("integrity")


@dataclass(frozen=True)
class Flags(ExtensionFlags):
    """The flag of the integrity checks."""

    needs: ClassVar = {"whole_layers": "it sums the states around the engine's own step"}

    check_integrity_steps: NotNegative = _integrity_free(
        0,
        "Steps between checks that only the optimizer changed weights, gradients and optimizer states, and that it "
        "updated every shard. Batches and speed of the ranks are checked in every step. A fault ends the run with rank "
        "and step. 1: every step; 0: never (docs/integrity.md).",
    )
