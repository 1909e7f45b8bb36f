"""The flag of pipeline parallelism."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from llava_ds.config.bounds import Count
from llava_ds.config.flags import flags_of
from llava_ds.extensions.base import Axis, ExtensionFlags

if TYPE_CHECKING:
    from llava_ds.config.arguments import Arguments

_pipeline, _ = flags_of("pipeline")


@dataclass(frozen=True)
class Flags(ExtensionFlags):
    """The flag of pipeline parallelism."""

    needs: ClassVar = {
        "whole_matrices": "AutoTP makes groups of all ranks",
        "routerless_mlps": "routers' loss is not carried between stages",
        "trained_layers": "a stage without trained weights has nothing to do",
    }
    breaks: ClassVar = ("whole_layers", "sharded_gradients", "sharded_weights", "offload")
    keys: ClassVar = {"pipeline.stages": "pipeline_parallel_size"}
    other_keys: ClassVar = dict.fromkeys(
        ("pp", "pp_size", "pipeline_model_parallel_size", "pipeline_parallel_size", "pipeline_stages", "stages"),
        ((1,), 'write "pipeline": {{"stages": {size}}}'),
    )
    other_names: ClassVar = {
        "--pipeline_parallel_size": "--pipeline_model_parallel_size --pp --pipeline_stages --num_stages",
    }

    pipeline_parallel_size: Count = _pipeline(
        1,
        "Number of pipeline stages: each rank has some of the language model's layers, for nodes joined by slow links. "
        "A step should have many micro-batches (--gradient_accumulation_steps): the more, the less stages wait.",
        aliases=("--pp_size",),
        resume="layout",
        shares_samples=True,
    )

    @classmethod
    def in_json(cls, raw: Mapping[str, object], problems: list[str]) -> dict[str, tuple[object, str]]:
        """Return the number of stages in DeepSpeed's section. Appends a problem for each other key with an effect."""
        from llava_ds.extensions.pipeline.pipeline_json import stages_in  # imported only if the section exists

        return {"pipeline_parallel_size": (stages_in(raw["pipeline"], problems), "pipeline.stages")}

    @classmethod
    def saving_memory(cls, args: "Arguments", tokens: int, is_one_sample: bool) -> Iterator[str]:
        """Suggest more pipeline stages if the run already has several."""
        if (size := args.size_of("pp")) > 1:
            yield f"--pipeline_parallel_size {2 * size}: fewer layers on each GPU"

    @property
    def axis(self) -> Axis:
        """Return the pipeline's axis, whose ranks are as far apart as possible."""
        return Axis("pp", "pipeline_parallel_size", self.pipeline_parallel_size, order=-1, divides_model=True)
