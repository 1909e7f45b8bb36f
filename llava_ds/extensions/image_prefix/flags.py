"""Flags for computing the common first tokens of records about one image once."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from llava_ds.config.flags import flags_of
from llava_ds.extensions.base import ExtensionFlags

if TYPE_CHECKING:
    from llava_ds.config.arguments import Arguments

_images, _ = flags_of("image_prefix")


@dataclass(frozen=True)
class Flags(ExtensionFlags):
    """Flags for computing the common first tokens of records about one image once."""

    needs: ClassVar = {
        "known_samples": "records of an image are grouped first",
        "routerless_mlps": "routers count the tokens of every record",
    }

    share_image_prefix: bool = _images(
        False,
        "Compute the tokens and images that several records of a step begin with only once. Loss and gradients are "
        "equal up to rounding. In random order, hardly any step has two records of an image: see --group_by_image.",
        resume="layout",
    )
    group_by_image: bool = _images(
        False,
        "With --share_image_prefix: take images in random order, and all records of an image in sequence. Every step "
        "then has fewer images.",
    )

    def requested_by(self) -> str:
        """Return the flag that enables sharing."""
        return "--share_image_prefix True"

    def problems(self, args: "Arguments") -> Iterator[str]:
        """Yield a line for every conflict with other flags."""
        if not self.share_image_prefix:
            yield "--group_by_image True belongs to --share_image_prefix True: give that, or leave it out"
        if args.training.objective != "sft":
            yield (
                f"--share_image_prefix True goes with --objective sft: leave it out for {args.training.objective}, "
                "which has --share_prompts"
            )
        if args.training.tokens_per_micro_batch is None:
            yield "--share_image_prefix True shares within a pack: also give --tokens_per_micro_batch"
        others = [name for name, value in vars(args.data).items() if name.startswith("group_by") and value]
        others = others if args.data.shuffle else ["shuffle False"]
        if self.group_by_image and others:
            yield f"--group_by_image True and --{others[0]} set different orders of the records: choose one"
