"""The flags of the moving average."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from llava_ds.config.bounds import PartBelowOne
from llava_ds.config.flags import flags_of
from llava_ds.extensions.base import ExtensionFlags

if TYPE_CHECKING:
    from llava_ds.config.arguments import Arguments

_ema, _ = flags_of("ema")


@dataclass(frozen=True)
class Flags(ExtensionFlags):
    """Flags of the moving average."""

    needs: ClassVar = {"dense_mlps": "it is untested with upcycled experts"}
    moments: ClassVar = 1

    enable_ema: bool = _ema(
        False,
        "Keep an fp32 moving average of the trained weights, placed like the optimizer's states, and also export that "
        "model, into the folder ema of --output_dir.",
    )
    ema_decay: PartBelowOne = _ema(
        0.992, "With --enable_ema: weight of the average at every step; the new weights get the rest."
    )

    def problems(self, args: "Arguments") -> Iterator[str]:
        """Yield a line if --ema_decay is given without --enable_ema."""
        if not self.enable_ema:
            yield "--ema_decay has no effect without --enable_ema True: give that, or leave it out"
