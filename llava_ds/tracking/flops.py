# T tokens, L tokens of one sample, S supervised positions, N image tiles
"""Count the useful floating-point operations of training, for MFU, from the configurations alone.

Forward, a matrix costs 2 FLOPs per weight and token. Backward, it costs 2 for its input's gradient, if anything before
it trains, and 2 for its weight's gradient, if it trains. Per layer, attention costs 4 times the width of all heads for
each pair of a token and a visible token, L (L + 1) / 2 per sample; backward costs twice that. If an image's P tokens
see each other, they add P (P - 1) / 2 pairs. A layer with a state (the delta rule) has no pairs: forward, it costs 6
FLOPs per token and state value (read twice, changed once), and backward twice that.

Padding, recomputation and blank images are not counted. Every layer counts at every token, attention windows count as
full attention, and the output layer counts at supervised positions only. As usual, norms, activations and the optimizer
are not counted.
Source: Chowdhery et al. 2022 (arXiv 2204.02311), appendix B.
"""

from collections import Counter
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.initialization import no_init_weights
from transformers.pytorch_utils import Conv1D

from llava_ds.config.arguments import ModelArguments, adapted_parts, trained_parts, trains_new_rows
from llava_ds.extensions.active import active, text_part
from llava_ds.model.families.language import attention_widths, has_state, num_attention_layers
from llava_ds.model.llava import LlavaModel, assemble
from llava_ds.model.vision import TowerPlan

MATRICES = (nn.Linear, Conv1D, nn.Conv1d, nn.Conv2d)  # Conv1d: the depthwise convolution in a layer with a state
SAMPLE = (1.25, 0.25)  # a typical sample's tokens per image token, and supervised fraction


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of forward and backward, per unit of input.

    per_token: all layers of the language model, without attention. per_pair: attention per pair of tokens. per_tile:
    tower and projector. per_target: output layer per supervised position. per_tile_pair: attention per pair of an
    image's tiles, in a tower that takes whole images. forward_per_token, forward_per_pair: the forward part, which
    checkpointed layers compute once more (not useful FLOPs in MFU).
    """

    per_token: float
    per_pair: float
    per_tile: float
    per_target: float
    forward_per_token: float = 0.0
    forward_per_pair: float = 0.0
    per_tile_pair: float = 0.0

    def of(self, tokens: float, pairs: float, tiles: float, targets: float, tile_pairs: float = 0.0) -> float:
        """Return the total FLOPs for these counts. pairs: sum of L (L + 1) / 2 over samples; targets: supervised
        positions; tile_pairs: as in Counts."""
        images = self.per_tile * tiles + self.per_tile_pair * tile_pairs
        return self.per_token * tokens + self.per_pair * pairs + images + self.per_target * targets

    def of_rank(self, tp: int) -> "ModelFlops":
        """Return the FLOPs per rank when tp ranks share the matrices of the language model's layers."""
        shared = ("per_token", "per_pair", "forward_per_token", "forward_per_pair")
        return replace(self, **{name: getattr(self, name) / tp for name in shared})

    def of_stage(self, layers: float, is_first: bool, is_last: bool) -> "ModelFlops":
        """Return the FLOPs of a pipeline stage. layers: its fraction of the layers; is_first: True if it has the tower;
        is_last: True if it has the output layer."""
        shared = ("per_token", "per_pair", "forward_per_token", "forward_per_pair")
        ends = {name: getattr(self, name) * is_first for name in ("per_tile", "per_tile_pair")}
        ends |= {"per_target": self.per_target * is_last}
        return replace(self, **{name: getattr(self, name) * layers for name in shared}, **ends)

    @property
    def pair_cost(self) -> float:
        """The factor c in a sample's cost L + c L**2, in units of per_token; L**2 / 2 approximates the pairs."""
        return self.per_pair / (2 * self.per_token)

    @property
    def other_costs(self) -> tuple[float, float, float]:
        """Costs, in units of per_token: supervised token, tile, pair of tiles."""
        return tuple(each / self.per_token for each in (self.per_target, self.per_tile, self.per_tile_pair))


def model_flops(text: PreTrainedConfig, tower: TowerPlan, args: ModelArguments) -> ModelFlops:
    """Return the FLOPs of a model with these flags, from a model built on the meta device.

    Matrices that extensions add are counted. Quantized weights count like unquantized ones.
    """
    with no_init_weights(), torch.device("meta"):
        model = assemble(text, tower, args, torch.zeros(3), torch.zeros(3))
    return flops_of_model(model, text, tower, args)


def flops_of_model(model: LlavaModel, text: PreTrainedConfig, tower: TowerPlan, args: ModelArguments) -> ModelFlops:
    """Return the FLOPs of a model. model: built without adapters, whose FLOPs are added here."""
    parts, adapted = trained_parts(args), adapted_parts(args)
    llm = model.language_model
    added: Counter[str] = Counter()
    for wrap in active(args.own, text).wraps:
        added.update(wrap.weights_per_token(model, tower.architecture, text, args))
    # Fractions of a part's layers. trains_*: layers that train; passes_*, reaches_*: layers with a gradient.
    top_llm, top_tower = args.unfreeze_topk_llm / text.num_hidden_layers, args.unfreeze_topk_vision / tower.num_layers
    trains_tower = (top_tower or 1) if "vision_tower" in parts else 0
    trains_layers = (top_llm or 1) if "language_model" in parts - adapted else 0
    passes_tower = 1 if "vision_tower" in adapted else trains_tower
    reaches_projector = passes_tower > 0
    before = reaches_projector or "projector" in parts | adapted or trains_new_rows(args)
    reaches_layers = 1 if before or "language_model" in adapted else trains_layers

    output = llm.get_output_embeddings()
    layers = text_part(text).used_per_token(llm, text, _dense_weights(llm, but=output))
    own = added["language_model"]
    forward_per_pair = 4 * sum(attention_widths(text))
    states = _state_flops(text)
    per_pair = forward_per_pair * (1 + 2 * reaches_layers)
    per_tile_pair, in_blocks = _block_pairs(text, tower)
    tied = output.weight is llm.get_input_embeddings().weight
    trains_output = (trains_layers == 1 and not top_llm) or ("output_layer" in parts and not tied)
    return ModelFlops(
        per_token=layers * _times(reaches_layers, trains_layers) + own * 6 + states * (1 + 2 * reaches_layers),
        per_pair=per_pair,
        per_tile=_tower_flops(model.vision_tower.tower, tower, passes_tower, trains_tower)
        + 6 * added["vision_tower"] * tower.num_positions * _tiles_of(tower)
        + _projector_flops(model.projector, tower, reaches_projector, parts, adapted)
        + 6 * added["projector"] * tower.images.num_tokens
        + in_blocks * (1 + 2 * reaches_layers),
        per_target=output.weight.numel() * _times(reaches_layers > 0, trains_output),
        forward_per_token=2 * (layers + own) + states,
        forward_per_pair=forward_per_pair,
        per_tile_pair=_tile_pair_flops(tower, passes_tower) + per_tile_pair * (1 + 2 * reaches_layers),
    )


def _times(passes: float, trains: float) -> float:
    """Return the FLOPs per weight and token. passes, trains: fractions of the weights for which backward computes the
    input's gradient, and the weight's gradient."""
    return 2 + 2 * passes + 2 * trains


def _block_pairs(text: PreTrainedConfig, tower: TowerPlan) -> tuple[float, float]:
    """Return forward FLOPs (per pair of tiles, per tile) of the attention between all tokens of an image, if any."""
    if not tower.has_image_blocks:
        return 0.0, 0.0
    pair, tokens = 4 * sum(attention_widths(text, tower.blocks_need_windows)), tower.images.num_tokens
    # An image of n cells adds n (n - 1) / 2 pairs.
    return (0.0, pair * tokens * (tokens - 1) / 2) if tower.cells is None else (pair / 2, -pair / 2)


def _state_flops(text: PreTrainedConfig) -> int:
    """Return the forward FLOPs per token for the states of all layers that have one."""
    if not has_state(text):
        return 0
    numbers = text.linear_num_value_heads * text.linear_key_head_dim * text.linear_value_head_dim
    return 6 * numbers * (text.num_hidden_layers - num_attention_layers(text))


def _tiles_of(plan: TowerPlan) -> int:
    """Return how many tiles the tower encodes per input tile: 1, or with S2 the sum over its scales."""
    return sum((scale // plan.scales[0]) ** 2 for scale in plan.scales) if plan.scales else 1


def _tower_flops(tower: nn.Module, plan: TowerPlan, passes: float, trains: float) -> float:
    """Return the FLOPs per tile, over all scales of S2. The patch embedding trains only if all layers train.

    passes, trains: fractions of layers with an input gradient, and of layers that train. For a tower that takes whole
    images, this includes the attention in layers with windows, as full windows; _tile_pair_flops has the rest.
    """
    positions, embedding = plan.num_positions, plan.patch_embedding(tower)
    layers, beside = _dense_weights(tower, but=embedding), 0.0
    if plan.second is not None:
        second = tower.second.tower
        layers -= _dense_weights(second, but=embedding)
        beside = _tower_flops(second, plan.second, passes, trains)
    pairs = plan.num_layers * positions**2
    if plan.cells is not None:
        pairs = positions**2 * plan.windowed_layers * (plan.cells.window or 0) ** 2
    once = (
        plan.num_patches * embedding.weight.numel() * _times(0, trains == 1)
        + positions * layers * _times(passes, trains)
        + 4 * pairs * plan.layer_width * (1 + 2 * passes)
    )
    return once * _tiles_of(plan) + beside


def _tile_pair_flops(plan: TowerPlan, passes: float) -> float:
    """Return the attention FLOPs per pair of an image's cells, in the tower's layers without windows."""
    if plan.cells is None:
        return 0.0
    layers = plan.num_layers - plan.windowed_layers
    return 4 * layers * plan.layer_width * plan.num_positions**2 * (1 + 2 * passes)


def _projector_flops(
    projector: nn.Module,
    plan: TowerPlan,
    trains_tower: bool,
    parts: frozenset[str],
    adapted: frozenset[str],
) -> float:
    """Return the FLOPs per tile. The first matrix's input needs a gradient only if the tower or a norm trains.

    parts: model parts that train; adapted: model parts with adapters.
    """
    trains, changes = "projector" in parts, "projector" in parts | adapted
    matrices = [p for p in projector.parameters() if p.ndim > 1]
    # If the first parameter is not a layer's weight, a norm precedes the first matrix, even if registered after it.
    layers = [m.weight for m in projector.modules() if isinstance(m, MATRICES)]
    first = matrices[0] if layers and next(projector.parameters()) is layers[0] else None
    per_feature = sum(
        weight.numel() * _times(trains_tower or (changes and weight is not first), trains) for weight in matrices
    )
    return per_feature * plan.images.num_tokens


def _dense_weights(module: nn.Module, but: nn.Module) -> int:
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, MATRICES) and m is not but)
