"""The flags of training while the data are encoded."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from llava_ds.config.bounds import Count
from llava_ds.config.flags import flags_of
from llava_ds.extensions.base import ExtensionFlags

if TYPE_CHECKING:
    from llava_ds.config.arguments import Arguments

_streaming, _ = flags_of("streaming")


@dataclass(frozen=True)
class Flags(ExtensionFlags):
    """The flags of training while the data are encoded."""

    other_names: ClassVar = {
        "--stream": "--streaming",
        "--shuffle_buffer_size": "--buffer_size --streaming_buffer_size",
    }
    stream: bool = _streaming(
        False,
        "Begin training when the first records are checked and encoded, and encode the rest meanwhile. The order "
        "covers all records, and bad ones leave empty places in a step: it is the same at any state of the encoding, "
        "but differs from the order without --stream.",
    )
    shuffle_buffer_size: Count = _streaming(
        16_384,
        "With --stream: number of records to shuffle together, in whole shards of 4,096 from random places of the "
        "data. Training begins when this many are encoded.",
    )

    @property
    def breaks(self) -> tuple[str, ...]:
        """known_samples: training begins before all samples are known."""
        return ("known_samples",) if self.stream else ()

    def requested_by(self) -> str:
        """Return the flag that enables streaming."""
        return "--stream True"

    def problems(self, args: "Arguments") -> Iterator[str]:
        """Yield a line if --shuffle_buffer_size is given without --stream."""
        if not self.stream:
            yield "--shuffle_buffer_size belongs to --stream True: give that, or leave it out"
