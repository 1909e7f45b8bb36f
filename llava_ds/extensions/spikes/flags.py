"""The flags of loss spikes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from llava_ds.config.bounds import MOST, Bounds, Positive
from llava_ds.config.flags import flags_of
from llava_ds.extensions.base import ExtensionFlags

if TYPE_CHECKING:
    from llava_ds.config.arguments import Arguments

_spikes, _ = flags_of("spikes")


@dataclass(frozen=True)
class Flags(ExtensionFlags):
    """The flags of loss spikes."""

    on_loss_spike: Literal["continue", "rewind"] = _spikes(
        "continue",
        "Reaction to a jump of the loss. continue: report it; rewind: go back to the weights of the last checkpoint "
        "and skip the samples since then; their steps still count.",
    )
    loss_spike_sigma: Positive = _spikes(
        6.0,
        "A loss is a spike when it is this many standard deviations above the mean of the steps before.",
        resume="rewind",
    )
    loss_spike_window: Annotated[int, Bounds(4, MOST)] = _spikes(
        128,
        "Number of steps before that a loss is compared with; judging begins after half of them.",
        resume="rewind",
    )

    @property
    def rewinds(self) -> bool:
        """True if a spike returns the run to its last checkpoint."""
        return self.on_loss_spike == "rewind"

    def problems(self, args: "Arguments") -> Iterator[str]:
        """Yield a line for every conflict. Rewinding needs complete checkpoints, and samples known in advance."""
        training = args.training
        if not self.rewinds:
            return
        if training.save_strategy == "no":
            yield "--on_loss_spike rewind needs checkpoints: give --save_strategy steps instead of no"
        if training.save_only_model:
            yield (
                "--save_only_model True and --on_loss_spike rewind: --on_loss_spike goes with checkpoints of the whole "
                "training state, leave one of them out"
            )
        if args.traits.draws:
            yield f"--on_loss_spike rewind can't be used with --objective {training.objective}: leave it out"
