"""Sizes of a vision tower and its connector that determine memory."""

import math
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from llava_ds.config.arguments import Arguments, adapted_parts, trained_parts
from llava_ds.engine.activation_checkpointing import repeated_layers
from llava_ds.model.llava import LlavaModel
from llava_ds.model.vision import TowerPlan


@dataclass(frozen=True)
class TowerShape:
    """Widths and layers of the vision tower, features per tile, and a tile's side in pixels.

    num_patches: projector features per tile, each from `shuffled` tower positions. class_tokens: additional positions.
    num_parameters: of the tower only. trained: True if the training stage trains the tower. saved, saved_fp32: average
    values that a trained layer saves per position for backward, in the weights' precision and in fp32. connector:
    values that the projector saves per feature in addition to the tower's output.
    """

    hidden: int
    intermediate: int
    num_layers: int
    num_patches: int
    image_size: int
    num_parameters: int
    trained: bool
    shuffled: int = 1
    class_tokens: int = 1
    saved: int = 0
    saved_fp32: int = 0
    connector: int = 0

    @property
    def num_positions(self) -> int:
        """Tower positions per tile, including a class token."""
        return self.num_patches * self.shuffled + self.class_tokens


def tower_shape(model: LlavaModel, tower: TowerPlan, args: Arguments) -> TowerShape:
    """Determine the sizes from a model on the meta device."""
    each = [_saved_by(layer) for layer in repeated_layers(model.vision_tower.tower)]  # includes a second tower
    saved, saved_fp32 = (math.ceil(sum(numbers) / tower.num_layers) for numbers in zip(*each))
    linears = [layer for layer in model.projector.modules() if isinstance(layer, nn.Linear)]
    # The tensor between two matrices is saved before and after its activation.
    between = [a.out_features for a, b in pairwise(linears) if a.out_features == b.in_features]
    return TowerShape(
        hidden=tower.layer_width,
        intermediate=tower.mlp_width,
        num_layers=tower.num_layers,
        num_patches=tower.images.num_tokens,
        image_size=tower.images.size,
        num_parameters=sum(p.numel() for p in model.vision_tower.parameters()),
        trained="vision_tower" in trained_parts(args.model) | adapted_parts(args.model),
        shuffled=tower.patches_per_feature,
        class_tokens=tower.num_positions - tower.images.num_tokens * tower.patches_per_feature,
        saved=saved,
        saved_fp32=saved_fp32,
        connector=sum(layer.in_features for layer in linears) + sum(between),
    )


def _saved_by(layer: nn.Module) -> tuple[int, int]:
    """Return the number of values that a layer saves per position for backward: in the weights' precision, and in fp32.

    LayerNorm: input and output. RMSNorm: input in fp32, normalised input, and its product with the weight. Attention:
    query, key, value and output; a fused matrix for the first three also saves query and key before rotation. Output
    scale: its input. MLP: tensors before and after the activation, quick GELU's sigmoid, and the other factor and the
    product of a gate. Gemma's norms, including the head norms, multiply in fp32; matrices with bounds save their inputs
    and outputs twice.
    """
    modules = dict(layer.named_modules())
    linears = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
    in_attention = [name for name in linears if "attn" in name or "attention" in name]
    in_mlp = [name for name in linears if name not in in_attention]
    hidden, intermediate = modules[in_attention[0]].in_features, modules[in_mlp[0]].out_features
    norms = [m for n, m in modules.items() if "norm" in n.lower() and getattr(m, "weight", None) is not None]
    block_norms = [norm for norm in norms if norm.weight.numel() == hidden]
    layer_norms = sum(isinstance(norm, nn.LayerNorm) for norm in block_norms)
    other_norms = len(block_norms) - layer_norms
    scales = sum(p.numel() == hidden and "lambda" in name for name, p in layer.named_parameters())
    has_gate = len(in_mlp) > 2
    is_quick = any("QuickGELU" in type(module).__name__ for module in modules.values())
    between = 4 if has_gate else 3 if is_quick else 2
    attention = 4 if len(in_attention) > 2 else 6
    numbers = hidden * (attention + 2 * layer_norms + 2 * other_norms + scales) + intermediate * between
    if not any(type(norm).__name__.startswith("Gemma") for norm in block_norms):
        return numbers, hidden * other_norms
    numbers -= hidden * other_norms
    if any(hasattr(module, "input_max") for module in modules.values()):
        numbers += 11 * hidden + 3 * intermediate
    return numbers, hidden * (2 * other_norms + 5)  # query and key norms save twice, value norms once without a weight
