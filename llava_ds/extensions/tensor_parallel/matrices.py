# O outputs and I inputs of a matrix, t ranks that share it
"""Tensor parallelism: DeepSpeed's AutoTP cuts the matrices of the language model's layers over ranks.

The first matrices of attention and MLP are cut by rows (O / t, I), so a rank has some heads or inner units. The last
ones are cut by columns (O, I / t), and their outputs are summed over ranks. All other parameters are replicated: tower,
projector, embeddings, output layer, norms. Source: arXiv 1909.08053; deepspeed.module_inject, 0.19.8.
"""

import itertools
import math
import re
from collections.abc import Iterator

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.initialization import no_init_weights

from llava_ds.engine.placement import Placement, Share, slice_of
from llava_ds.model.families.language import head_width, layer_configs
from llava_ds.model.open.names import LANGUAGE_MODEL
from llava_ds.runtime.mesh import Mesh

OUTPUTS = r"self_attn\.[qkv]_proj|mlp\.(gate|up)_proj"  # cut by rows, with their biases
INPUTS = r"self_attn\.o_proj|mlp\.down_proj"  # cut by columns
HEAD_NORMS = r"self_attn\.[qk]_norm"  # replicated, but each rank's gradient covers only its heads
# Replicated completely: recurrent layers, and the matrices that add a layer's additional token embeddings.
WHOLE = r"linear_attn\..+|(per_layer_input_gate|per_layer_projection)\.weight"
_LAYER = r"(?:.*\.)?layers\.(\d+)\."
WORDS = "self_attn.[q|k|v|o]_proj and mlp.[gate|up|down]_proj"


class CutMatrices(Placement):
    """Every rank has an equal slice of each cut matrix, and a copy of all other parameters."""

    def shares(self, model: nn.Module) -> Iterator[tuple[Share, nn.Parameter]]:
        """Yield all parameters, each with this rank's slice."""
        for share, parameter in super().shares(model):
            if (dim := dim_of(share.name)) is not None:
                shape = tuple(n * self.size if i == dim else n for i, n in enumerate(share.shape))
                share = share._replace(shape=shape, slice=slice_of(shape, dim, self.index, self.size))
            yield share, parameter


def problems(config: PreTrainedConfig, tp: int) -> list[str]:
    """Return the reasons why a language model can't be cut over tp ranks."""
    found, layer_heads = [], dict.fromkeys(map(_heads, layer_configs(config)))
    if any(count % tp for counts in layer_heads for count in counts):
        common = math.gcd(*itertools.chain(*layer_heads))
        sizes = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        counts = " or ".join(f"{heads} heads, with {key_heads} of keys," for heads, key_heads in layer_heads)
        fitting = f"give {sizes}" if common > 1 else "leave the flag out, ZeRO shards this family"
        found.append(f"{counts} can't be divided over {tp} ranks: {fitting}")
    if getattr(config, "attention_dropout", 0.0):
        found.append(
            f"attention_dropout is {config.attention_dropout} in its config.json, and ranks would drop the same "
            "positions in different heads: write 0"
        )
    with torch.device("meta"), no_init_weights():
        model = AutoModelForCausalLM.from_config(config)
    layers = [(name, p) for name, p in model.named_parameters() if re.match(_LAYER, name)]
    configs = layer_configs(config)
    others = [name for name, p in layers if not _is_supported(name, p, configs)]
    if not layers or others:
        example = others[0] if others else "other names"
        found.append(f"layers have {example}, but only {WORDS} can be cut: leave the flag out, ZeRO shards this family")
    elif uneven := [name for name, p in layers if _dim(name) is not None and p.shape[_dim(name)] % tp]:
        found.append(f"{uneven[0]} can't be divided into {tp} parts")
    return found


def _heads(layer: PreTrainedConfig) -> tuple[int, int]:
    """Return the numbers of query heads and key heads of a layer."""
    return layer.num_attention_heads, getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads


def _is_supported(name: str, parameter: torch.Tensor, layers: list[PreTrainedConfig]) -> bool:
    """Return True for a layer's parameter that is cut, or can be replicated. layers: each layer's configuration."""
    number, name = int(re.match(_LAYER, name)[1]), re.sub(rf"^{_LAYER}", "", name)
    if _dim(f"layers.0.{name}") is not None or re.fullmatch(rf"({INPUTS})\.bias", name):
        return True
    if name.startswith(("self_attn.", "mlp.")):
        shape = (head_width(layers[number]),)
        return re.fullmatch(rf"({HEAD_NORMS})\.weight", name) is not None and tuple(parameter.shape) == shape
    return parameter.ndim == 1 or re.fullmatch(WHOLE, name) is not None


def _dim(name: str) -> int | None:
    """Return the dimension along which a parameter of the language model is cut; None if it is replicated."""
    if re.fullmatch(rf"{_LAYER}({OUTPUTS})\.(weight|bias)", name):
        return 0
    return 1 if re.fullmatch(rf"{_LAYER}({INPUTS})\.weight", name) else None


def dim_of(name: str) -> int | None:
    """Return the dimension along which a parameter of the complete model is cut, by name; None if it is replicated."""
    return _dim(name.removeprefix(LANGUAGE_MODEL)) if name.startswith(LANGUAGE_MODEL) else None


def rules(tp: int) -> dict:
    """Return DeepSpeed's JSON section, with rules for all cut matrices: by default, it would also cut the tower."""
    inside = r"^language_model\..*\.layers\.\d+\."
    specs = [
        {"patterns": [rf"{inside}({OUTPUTS})(\.weight)?$"], "partition_type": "column"},
        {"patterns": [rf"{inside}({INPUTS})(\.weight)?$"], "partition_type": "row"},
        {"patterns": [rf"{inside}({HEAD_NORMS})(\.weight)?$"], "partition_type": "skip", "grad_allreduce": True},
    ]
    return {"autotp_size": tp, "partition_config": {"use_default_specs": False, "layer_specs": specs}}


def cut_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of a complete model that will be divided equally over ranks."""
    return {p for name, p in model.named_parameters() if dim_of(name) is not None}


def place_matrices(engine, mesh: Mesh) -> None:
    """Record how the engine has cut the matrices, and disable its comparison of the first batches.

    DeepSpeed 0.19.8 pickles the batch of the first forward, sends it to the other ranks, and compares objects that
    don't support comparison. Its check is not needed, because the ranks of a group plan equal batches and agree on
    which samples they could decode (data/shared_loader.py).
    """
    place = mesh.at("tp")
    assert engine.autotp_size() == place.size, f"DeepSpeed cuts matrices for {engine.autotp_size()} ranks"
    engine.first_dataloader_check.remove()
    assert engine.mpu.get_tensor_model_parallel_rank() == place.index, "DeepSpeed lays ranks out in another order"
    placement = CutMatrices("tp", place.size, place.index, place.group)
    held = placement.held(engine.module).items()
    other = [s.name for p, s in held if bool(s.slice) != getattr(p, "tensor_model_parallel", False)]
    assert not other, f"DeepSpeed cuts other parameters: {other[:3]}"
    assert any(share.slice for _, share in held), "DeepSpeed cut nothing"
    engine.module.placement = placement
