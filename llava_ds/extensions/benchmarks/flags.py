"""The flag of benchmarks that are asked while a run trains."""

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
    """The flag of benchmarks that are asked while a run trains."""

    needs_text: ClassVar = True

    eval_tasks: str | None = _tasks(
        None,
        "YAML file that lists benchmarks by names of yours, with run/evaluate.py's task, data_path, image_folder, "
        "metric and limit under each (docs/benchmarks.md): they are asked and scored at every evaluation, of "
        "which the names are numbers.",
        path="file",
    )

    @property
    def evaluates(self) -> bool:
        """True if an evaluation has scores."""
        return self.eval_tasks is not None

    @property
    def needs(self) -> Mapping[str, str]:
        """What a rank needs to answer alone."""
        whole = ("whole_matrices", "whole_layers", "whole_sample", "plain_weights")
        return dict.fromkeys(whole, "each answers alone") | {"dense_mlps": "it is not tried with these experts"}

    def problems(self, args: "Arguments") -> Iterator[str]:
        """A model that gives text is needed."""
        if args.traits.scores:
            yield "--eval_tasks can't be used with --objective reward, whose model scores answers and gives none"
