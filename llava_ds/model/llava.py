# T tokens of a pack, N image tiles, P patches each, C tower width, D language-model width, M image positions (F
# features, the rest newlines), n positions of a head, R pooled features made from up to K features each
"""The LLaVA model: tower, projector and language model, run on one micro-batch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from llava_ds.batch import Batch, Placing
from llava_ds.config.arguments import ModelArguments
from llava_ds.extensions.active import active, text_part
from llava_ds.model import attention, last_layer, output_loss
from llava_ds.model.families.language import has_layer_embeddings, has_state, hold_rotary_angles
from llava_ds.model.heads import SUMMED, Head
from llava_ds.model.open.names import OWN
from llava_ds.model.projector import Newline, Projector
from llava_ds.model.vision import TowerPlan, VisionTower


class LlavaModel(nn.Module):
    """A LLaVA model for samples laid end to end."""

    def __init__(
        self,
        vision_tower: VisionTower,
        projector: Projector,
        language_model: nn.Module,
        newline: Newline | None = None,
        value_head: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.vision_tower = vision_tower
        self.projector = projector
        if newline is not None:
            self.newline = newline
        self.language_model = language_model
        if value_head is not None:
            self.value_head = value_head
        self.learning_rate: float | None = None  # own rate if trained as a child model; None: the parent's
        self._knows_lengths = has_state(language_model.config) or attention.needs_lengths(language_model.config)
        self.short_last_layer = False
        output_loss.add_loss(language_model.get_output_embeddings())

    def shorten_last_layer(self) -> None:
        """Compute the language model's last layer at the head's positions only.

        Call it only for language models whose results don't change by this; probe.py tests it.
        """
        last_layer.shorten(self.language_model)
        self.short_last_layer = True

    def forward(self, batch: Batch, head: Head = SUMMED) -> Any:
        """Return the head's result on the language model's last hidden states; by default the summed loss."""
        embeds, options = self.begin(batch)
        wanted, places = head.positions(batch), options.pop("places", None)  # (n,), (T,)
        wanted = wanted if places is None else places.index_select(0, wanted)
        if self.short_last_layer and head.shortens:
            # Kernels don't accept zero rows: if no position is wanted, compute one; end() drops it.
            options["query_positions"] = wanted if len(wanted) else batch.cu_seqlens[:1].long()
        layout = {name: getattr(batch, name) for name in ("position_ids", "cu_seqlens", "max_seqlen")}
        # Call the trunk, because the language model's forward would not pass targets to the output layer.
        trunk = self.language_model.base_model(inputs_embeds=embeds, use_cache=False, **layout | options)
        hidden = trunk.last_hidden_state  # (1, T, D), or (1, n, D) at query_positions
        return self.end(hidden, batch, head, wanted)

    def begin(self, batch: Batch) -> tuple[torch.Tensor, dict[str, object]]:
        """Return the language model's inputs: embeddings (1, T, D), and keyword arguments that extend or replace the
        batch's. If these contain "places" (T,), each token's index into the embeddings, there are fewer than T."""
        options = self.layer_options(batch)
        embeds, deeper = self.embed_deep(batch)
        if deeper:
            options |= self.vision_tower.deeper_options(batch.placing.positions, deeper)
        return embeds, options

    def end(self, hidden: torch.Tensor, batch: Batch, head: Head, wanted: torch.Tensor) -> Any:
        """Return the head's result. wanted (n,): the head's positions; hidden: (1, T, D), or (1, n, D) at `wanted`."""
        short = self.short_last_layer and head.shortens
        hidden = hidden[0, : len(wanted)] if short else hidden[0].index_select(0, wanted)  # (n, D)
        return head(self, hidden, batch)

    def layer_options(self, batch: Batch) -> dict[str, object]:
        """Return keyword arguments that describe the pack, for language models whose layers need them."""
        options = {"lengths": batch.lengths} if self._knows_lengths else {}
        if batch.shared is not None:  # pass no unused lengths: torch.compile would recompile for them
            unread = {} if self._knows_lengths else {"lengths": None, "own": None}
            options["shared_prompts"] = batch.shared._replace(**unread)
        return options | batch.trunk | self.layer_inputs(batch.input_ids, batch.placing.positions)

    def layer_inputs(self, input_ids: torch.Tensor, image_positions: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return per-layer embeddings, with the padding token's at image positions; {} if the model has none."""
        config = self.language_model.config
        if not has_layer_embeddings(config):
            return {}
        ids = input_ids.index_fill(1, image_positions, config.pad_token_id)
        return {"per_layer_inputs": self.language_model.base_model.get_per_layer_inputs(ids)}

    def embed(self, batch: Batch) -> torch.Tensor:
        """Return token embeddings with image features at the image positions: (1, T, D)."""
        return self.embed_deep(batch)[0]

    def embed_deep(self, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the result of embed(), and for each of the first layers features (M, D) to add at image positions. For
        most models this list is empty.

        Tower, projector and newline run exactly once for any batch, so that all ranks run the same collectives. Unused
        features get a gradient of zero.
        """
        features = self.image_features(batch.pixel_values, batch.tower)  # (N, P, D) or (N, P, K * D)
        embeds = self.language_model.get_input_embeddings()(batch.input_ids)  # (1, T, D)
        return merge_features(embeds, features, batch.placing, getattr(self, "newline", None))

    def image_features(self, pixel_values: torch.Tensor, tower_inputs: dict | None = None) -> torch.Tensor:
        """Compute projected features (N, P, D) of tiles (N, 3, H, W) uint8. A frozen tower stores no activations."""
        trained = any(p.requires_grad for p in self.vision_tower.parameters())
        with torch.set_grad_enabled(trained and torch.is_grad_enabled()):
            features = self.vision_tower(pixel_values, tower_inputs)  # (N, P, C)
        return self.projector(features)


def all_models(model: nn.Module) -> dict[str, LlavaModel]:
    """Return the model under the name "", and the models that train as its children under their names."""
    children = {name: child for name, child in model.named_children() if isinstance(child, LlavaModel)}
    return {"": model, **children}


def merge_features(
    embeds: torch.Tensor,
    features: torch.Tensor,
    placing: Placing,
    newline: Callable[[torch.Tensor, int], torch.Tensor] | None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Place the features (N, P, D) of a batch's tiles at their positions in the token embeddings (1, T, D).

    newline: appends newlines to F placed features, up to all M rows (Newline.forward); None for models without one.
    Of features (N, P, K * D), the first D channels are placed, and the K - 1 others are returned as a list of (M, D).
    """
    table = features.flatten(0, 1)  # (N * P, D)
    if len(placing.pool_index):
        table = torch.cat([table, _pooled(table, placing)])  # (N * P + R, D)
    placed = table.index_select(0, placing.features)  # (F, D)
    if newline is not None:
        placed = newline(placed, len(placing.positions))  # (M, D)
    placed, deeper, width = placed.to(embeds.dtype), [], embeds.shape[-1]
    if placed.shape[1] > width:
        placed, *deeper = placed.split(width, 1)
    return embeds.index_copy(1, placing.positions, placed[None]), deeper


def _pooled(features: torch.Tensor, placing: Placing) -> torch.Tensor:
    """Pool features (N * P, D) to (R, D) by weighted sum or maximum, in float32.

    Adds one of the K sources at a time, because gathering all would need K times the memory of the result.
    """
    index, weight = placing.pool_index, placing.pool_weight  # (R, K)
    pooled = torch.zeros(len(index), features.shape[1], dtype=torch.float32, device=features.device)
    if placing.pools_by_max:
        taken = weight.isinf()  # (R, K)
        weight = weight.masked_fill(taken, 0)
        largest = torch.full_like(pooled, -torch.inf)
    for k in range(index.shape[1]):
        part = features.index_select(0, index[:, k]).float()  # (R, D)
        pooled = pooled + weight[:, k, None] * part
        if placing.pools_by_max:  # like max_pool2d: the first of equal values gets the gradient; NaN propagates
            largest = torch.where(taken[:, k, None] & ((part > largest) | part.isnan()), part, largest)
    if placing.pools_by_max:
        pooled = torch.where(taken[:, :1], largest, pooled)
    return pooled.to(features.dtype)


def assemble(
    text_config: PreTrainedConfig,
    tower: TowerPlan,
    args: ModelArguments,
    mean: torch.Tensor,
    std: torch.Tensor,
    value_head: bool = False,
) -> LlavaModel:
    """Build the model, uninitialised, in torch's default dtype. mean, std (3,): see VisionTower; value_head: True to
    add a value head."""
    language_model = AutoModelForCausalLM.from_config(
        text_config, attn_implementation=attention.register(), dtype=torch.get_default_dtype()
    )
    text_part(text_config).assembled(language_model, text_config, args)
    hold_rotary_angles(language_model)
    language_model.tie_weights()  # from_config does so in initialisation, but callers switch that off
    projector = tower.build_projector(args, text_config.hidden_size)
    newline = Newline(text_config.hidden_size) if "unpad" in args.mm_patch_merge_type else None
    head = None
    if value_head:
        from llava_ds.model.open.value_head import ValueHead

        head = ValueHead(text_config.hidden_size)
    model = LlavaModel(tower.build(mean, std), projector, language_model, newline, head)
    for name, build in active(args.own).modules.items():
        model.add_module(OWN + name, build(text_config, tower, args))
    return model


def layer_classes(model: nn.Module) -> list[type[nn.Module]]:
    """Return the classes of the repeated layers in tower and language model."""
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    return sorted({type(stack[0]) for stack in stacks}, key=lambda cls: cls.__name__)
