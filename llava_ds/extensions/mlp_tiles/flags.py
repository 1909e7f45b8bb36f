"""The flag for running MLPs on tiles of tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from llava_ds.config.bounds import Count
from llava_ds.config.flags import flags_of
from llava_ds.extensions.base import ExtensionFlags

if TYPE_CHECKING:
    from llava_ds.config.arguments import Arguments

_, _tiles_free = flags_of("mlp_tiles")


@dataclass(frozen=True)
class Flags(ExtensionFlags):
    """The flag for running MLPs on tiles of tokens."""

    needs: ClassVar = {"dense_mlps": "experts distribute tokens themselves"}

    mlp_tile_tokens: Count | None = _tiles_free(
        None,
        "Tokens that an MLP of the language model takes at a time, recomputed in backward, so that its memory does not "
        "grow with a sample's length. Absent: all of a micro-batch.",
    )

    @property
    def mlp_tokens(self) -> int | None:
        """Tokens per MLP tile; None if MLPs are not tiled."""
        return self.mlp_tile_tokens

    @classmethod
    def saving_memory(cls, args: "Arguments", tokens: int, is_one_sample: bool) -> Iterator[str]:
        """Suggest tiles of an eighth of the tokens."""
        if is_one_sample and "mlp_tiles" not in args.own and "routerless_mlps" not in args.broken:
            yield f"--mlp_tile_tokens {max(1, tokens // 8)}: MLPs take this many at a time, recomputed in backward"
