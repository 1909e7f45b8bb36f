"""Register tensor parallelism: check settings and models, and configure DeepSpeed."""

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedConfig

from llava_ds.config.arguments import Arguments
from llava_ds.engine.ds_config.activation import deep_compiles
from llava_ds.engine.ds_config.draft import value_at
from llava_ds.engine.ds_config.resolve import ResolvedConfig
from llava_ds.engine.ds_config.zero import OFFLOADED, offload_device
from llava_ds.extensions.base import Extension, MeshPart
from llava_ds.extensions.tensor_parallel.matrices import cut_parameters, place_matrices, problems, rules
from llava_ds.runtime.mesh import Mesh

AXIS = "tp"
# Optimizers whose updates need complete matrices.
WHOLE_MATRICES = {"Lamb": "a layer's norm", "Adafactor": "a matrix's rows and columns", "Muon": "whole matrices"}
OWN_GROUPS = (
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
)


def check(resolved: ResolvedConfig) -> Iterator[str]:
    """Yield a line for every setting that conflicts with matrices divided over ranks."""
    flag, config = f"--tensor_parallel_size is {resolved.args.size_of(AXIS)}", resolved.config
    name = value_at(config, "optimizer.type")
    for optimizer, needs in WHOLE_MATRICES.items():
        if isinstance(name, str) and name.lower() == optimizer.lower():
            yield f"{flag}, but {optimizer}'s updates depend on {needs}, and no rank has these: use another optimizer"
    for key in OWN_GROUPS:
        value = value_at(config, f"zero_optimization.{key}")
        if value not in (None, False) and (value is True or value not in (1, -1)):
            yield f"{flag}, but zero_optimization.{key} makes its own groups of ranks: remove one"
    for part in OFFLOADED:
        if offload_device(config, part) == "nvme":
            yield f'{flag}, but zero_optimization.{part}.device is "nvme", an untested combination: write "cpu"'
    if deep_compiles(config):
        yield f"{flag}, but compile.deepcompile cuts matrices by its own rules: remove one"


def fits(args: Arguments, config: PreTrainedConfig) -> Iterator[str]:
    """Yield the reasons why a language model can't be cut."""
    size = args.size_of(AXIS)
    for problem in problems(config, size):
        yield f"--tensor_parallel_size is {size}: the language model's {problem}"


def engine(model: nn.Module, mesh: Mesh) -> dict[str, object]:
    """Return DeepSpeed's tensor_parallel section, with rules for all matrices to divide."""
    return {"config": {"tensor_parallel": rules(mesh.at(AXIS).size)}}


extension = Extension(
    check=check, fits=fits, mesh=MeshPart(AXIS, divides=cut_parameters, engine=engine, started=place_matrices)
)
