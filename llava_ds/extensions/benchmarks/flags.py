"""Flag for benchmarks during training."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from llava_ds.config.flags import flags_of
from llava_ds.extensions.base import ExtensionFlags

if TYPE_CHECKING:
    from llava_ds.config.arguments import Arguments

_, _tasks = flags_of("benchmarks")


@dataclass(frozen=True)
class Flags(ExtensionFlags):
    """Flag for benchmarks during training."""

    needs_text: ClassVar = True

    eval_tasks: str | None = _tasks(
        None,
        "YAML file of benchmarks under names that you choose, each with run/evaluate.py's task, data_path, "
        "image_folder, metric and limit (docs/benchmarks.md): they are answered and scored at every evaluation, and "
        "the scores are logged under these names.",
        path="file",
    )

    @property
    def evaluates(self) -> bool:
        """True if evaluations include scores of benchmarks."""
        return self.eval_tasks is not None

    @property
    def needs(self) -> Mapping[str, str]:
        """Return the properties that each rank needs to answer questions without the other ranks."""
        whole = ("whole_matrices", "whole_layers", "whole_sample", "plain_weights")
        return dict.fromkeys(whole, "each answers alone") | {"dense_mlps": "it is untested with these experts"}

    def problems(self, args: "Arguments") -> Iterator[str]:
        """Yield a line for a model that doesn't generate text."""
        if args.traits.scores:
            yield "--eval_tasks can't be used with --objective reward, because a reward model generates no answers"
