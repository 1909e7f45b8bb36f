"""Register pipeline parallelism: check settings and models, and build and run stages."""

from collections.abc import Iterator

from transformers import PreTrainedConfig

from llava_ds.config.arguments import Arguments
from llava_ds.engine.ds_config.activation import deep_compiles
from llava_ds.engine.ds_config.draft import value_at
from llava_ds.engine.ds_config.resolve import ResolvedConfig
from llava_ds.engine.ds_config.zero import OFFLOADED, offload_device
from llava_ds.extensions.active import text_part
from llava_ds.extensions.base import Extension, MeshPart
from llava_ds.extensions.pipeline import stage_runner, stages
from llava_ds.train.plan import PlanDraft


def check(resolved: ResolvedConfig) -> Iterator[str]:
    """Yield a line for every setting that conflicts with stages."""
    flag, config = f"--pipeline_parallel_size is {resolved.args.size_of('pp')}", resolved.config
    stage = value_at(config, "zero_optimization.stage")
    if stage in (2, 3):
        what = "send gradients" if stage == 2 else "gather a stage's weights"
        yield (
            f"{flag}, but zero_optimization.stage is {stage}, at which ranks would {what} for every micro-batch: "
            "write 1, because a stage only holds its own part of the model anyway"
        )
    for part in OFFLOADED:
        if (device := offload_device(config, part)) != "none":
            yield f'{flag}, but zero_optimization.{part}.device is "{device}", an untested combination: remove it'
    for key in ("fp16", "torch_autocast"):
        if value_at(config, f"{key}.enabled") is True:
            yield f"{flag}, but {key} is on, and stages can't agree on its loss scale: use bf16 or fp32"
    if deep_compiles(config):
        yield f"{flag}, but compile.deepcompile traces a whole model: remove one of them"


def fits(args: Arguments, config: PreTrainedConfig) -> Iterator[str]:
    """Yield the reasons why a language model can't be cut into stages."""
    size = args.size_of("pp")
    flag = f"--pipeline_parallel_size is {size}"
    if config.num_hidden_layers < size:
        yield f"{flag}: the language model has {config.num_hidden_layers} layers: give as many or fewer"
    if problem := stages.problem(config):
        yield f"{flag}: the language model's {problem}: use another axis"
    if "routerless_mlps" in text_part(config).breaks(config):
        yield f"{flag}: stages don't exchange the routers' loss or experts: use another axis"


def plan(draft: PlanDraft) -> None:
    """Raise ConfigError if the first stage can't have all layers that need it."""
    stages.check_layers(draft.model.text_config.num_hidden_layers, draft.model.tower, draft.args.size_of("pp"))


extension = Extension(
    check=check,
    fits=fits,
    plan=plan,
    mesh=MeshPart(
        "pp",
        cut=stage_runner.cutting,
        owners=stages.owners,
        build=stage_runner.build,
        engine=stage_runner.options,
        started=stage_runner.started,
        runner=stage_runner.Pipelined,
    ),
)
