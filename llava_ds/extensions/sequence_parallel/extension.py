"""Register sequence parallelism: parts of packs, and the exchange around attention."""

from collections.abc import Iterator
from functools import partial

from transformers import PreTrainedConfig

from llava_ds.config.arguments import Arguments
from llava_ds.extensions.base import Extension, MeshPart
from llava_ds.extensions.sequence_parallel.cut import cut
from llava_ds.extensions.sequence_parallel.exchange import heads_problem
from llava_ds.extensions.sequence_parallel.shared_tokens import share_tokens
from llava_ds.model.families.language import has_state, layer_configs, state_heads
from llava_ds.model.llava import LlavaModel
from llava_ds.runtime.mesh import Mesh

AXIS = "sp"


def fits(args: Arguments, config: PreTrainedConfig) -> Iterator[str]:
    """Yield a line for every number of heads that can't be divided over the ranks, after tensor parallelism has divided
    them."""
    size, cut_by = args.size_of(AXIS), args.size_of("tp")
    heads_of_layers = {
        (layer.num_attention_heads, getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads)
        for layer in layer_configs(config)
    }
    for heads, key_heads in sorted(heads_of_layers):
        yield from _problems_of_heads(heads, key_heads, size, cut_by)
    if has_state(config):
        yield from _problems_of_state(config, size, cut_by)


def _problems_of_heads(heads: int, key_heads: int, size: int, cut_by: int) -> Iterator[str]:
    """Yield a line if the heads of a layer can't be divided. cut_by: ranks of tensor parallelism."""
    flag = f"--sequence_parallel_size is {size}"
    if problem := heads_problem(heads, key_heads, size):
        yield f"{flag}: the language model's {problem}"
    elif heads % cut_by or key_heads % cut_by:
        return  # tensor parallelism reports this problem
    elif problem := heads_problem(heads // cut_by, key_heads // cut_by, size):
        yield f"{flag}, and --tensor_parallel_size {cut_by} leaves each rank a part of the heads: {problem}"


def _problems_of_state(config: PreTrainedConfig, size: int, cut_by: int) -> Iterator[str]:
    """Yield a line if the heads of recurrent layers can't be divided. cut_by: ranks of tensor parallelism."""
    flag = f"--sequence_parallel_size is {size}"
    key_heads, value_heads = state_heads(config)
    if key_heads % size or value_heads % size:
        yield (
            f"{flag}: the language model's layers with a state have {key_heads} and {value_heads} heads of keys and "
            "values: give a divisor of both"
        )
    elif cut_by > 1:
        yield f"{flag}, with --tensor_parallel_size {cut_by}: not tried for layers with a state, leave one of them out"


def cutting(mesh: Mesh) -> partial:
    """Return the function that cuts a rank's part out of a micro-batch."""
    place = mesh.at(AXIS)
    return partial(cut, rank=place.index, ranks=place.size)


def adapt(model: LlavaModel, mesh: Mesh) -> None:
    """Make a model accept parts of packs."""
    share_tokens(model, mesh.at(AXIS).group)


extension = Extension(fits=fits, mesh=MeshPart(AXIS, cut=cutting, adapt=adapt))
