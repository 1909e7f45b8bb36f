"""The flags of the sample questions."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from llava_ds.config.bounds import Count, Rate, step_share_problem
from llava_ds.config.flags import flags_of
from llava_ds.extensions.base import ExtensionFlags

if TYPE_CHECKING:
    from llava_ds.config.arguments import Arguments

_, _samples = flags_of("samples")


@dataclass(frozen=True)
class Flags(ExtensionFlags):
    """The flags of the sample questions."""

    zeros: ClassVar = {"sample_steps": "no questions are answered while training"}
    needs_text: ClassVar = True

    sample_steps: Rate | None = _samples(
        None,
        "Answer a few sample questions every so many steps and at the end; below 1, it is a fraction of all steps, "
        "rounded up (0.1 in the recipes). Absent or 0: never.",
    )
    num_sample_questions: Count = _samples(4, "Number of questions that are answered at --sample_steps.")
    sample_max_new_tokens: Count = _samples(64, "Maximum length of these answers in tokens.")
    sample_data_path: str | None = _samples(
        None,
        "Samples whose first questions are answered at --sample_steps, those with images first, in any format of "
        "--data_path. Absent: the eval samples, or else the training samples.",
        path="pattern",
        remote=True,
    )

    @property
    def takes_samples(self) -> bool:
        """True if questions are answered."""
        return bool(self.sample_steps)

    @property
    def data_path(self) -> str | None:
        """Path of the samples to take questions from; None for the eval or training samples."""
        return self.sample_data_path

    def problems(self, args: "Arguments") -> Iterator[str]:
        """Yield a line for every conflict. Questions need regular steps, and a model that generates answers."""
        yield from step_share_problem("sample_steps", self.sample_steps)
        if self.sample_data_path is not None and not self.sample_steps:
            yield f"--sample_data_path {self.sample_data_path} has questions for --sample_steps: give that as well"
        if self.sample_steps and args.traits.scores:
            yield (
                f"--sample_steps can't be used with --objective {args.training.objective}, because a reward "
                "model generates no answers"
            )
