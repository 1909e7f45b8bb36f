# T tokens of all samples laid end to end, N image tiles, P patches each, C tower width, D language-model width,
# M image positions (F of them features, the rest newlines), S supervised positions, n positions, V vocabulary,
# R pooled features made of up to K others
"""The composition: tower, projector, language model, and the loss of one micro-batch."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from llava_ds.batch import Batch
from llava_ds.config.arguments import ModelArguments
from llava_ds.model import attention, last_layer, output_loss
from llava_ds.model.families.language import (
    final_logits,
    has_layer_embeddings,
    has_state,
    hold_rotary_angles,
    is_upcycled,
    logits_divisor,
)
from llava_ds.model.projector import Newline, Projector
from llava_ds.model.stages import Stage, is_last
from llava_ds.model.value_head import ValueHead
from llava_ds.model.vision import TowerPlan, VisionTower

if TYPE_CHECKING:
    from llava_ds.model.ready import Connector, ReadyTower, ReadyVision


class LlavaModel(nn.Module):
    """A LLaVA over samples laid end to end. Its forward returns the loss, summed over the supervised positions."""

    def __init__(
        self,
        vision_tower: "VisionTower | ReadyTower",
        projector: "Projector | Connector",
        language_model: nn.Module,
        newline: Newline | None = None,
        value_head: ValueHead | None = None,
    ) -> None:
        super().__init__()
        self.vision_tower = vision_tower
        self.projector = projector
        if newline is not None:
            self.newline = newline
        self.language_model = language_model
        if value_head is not None:
            self.value_head = value_head
        self._softcap = getattr(language_model.config, "final_logit_softcapping", None)
        self._divisor = logits_divisor(language_model.config)
        self._knows_lengths = has_state(language_model.config) or attention.needs_lengths(language_model.config)
        self._short_last_layer = False
        self.sequence_group: torch.distributed.ProcessGroup | None = None  # set by share_tokens
        self.stage: Stage | None = None  # set by keep_stage
        self.lora_start: dict[str, torch.Tensor] = {}  # set by add_lora
        output_loss.add_loss(language_model.get_output_embeddings())

    def shorten_last_layer(self) -> None:
        """Compute the last layer of the language model at supervised positions only, in training.

        Only for models whose loss stays the same, as probe.py tests.
        """
        last_layer.shorten(self.language_model)
        self._short_last_layer = True

    def share_tokens(self, group: torch.distributed.ProcessGroup | None) -> None:
        """Set the ranks that share the tokens of a micro-batch, of which each has one of Batch.parts."""
        self.sequence_group = group

    def forward(
        self,
        batch: Batch,
        logits_at: torch.Tensor | None = None,
        num_sources: int | None = None,
        log_probs: bool = False,
        temperature: float = 1.0,
        values_at: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The cross-entropy summed over the S supervised positions, each by its weight, float32, a scalar.

        With logits_at, (S,) indices into T, the output layer there instead: (S, V). With num_sources, that sum, and
        what it consists of: the cross-entropy and the number of positions of every data source, (2, num_sources)
        float64, without a gradient. With log_probs, the log-probability of every target under logits that are divided
        by temperature: (S,) float64; of a model with a critic, that and the critic's value before each: (S,) float32.
        With values_at, (n,) ascending indices into T, the value head there, without the output layer: (n,) float32. Of
        a stage before a pipeline's last, whatever is asked for, what the next one goes on with: (1, T, D).
        """
        given = logits_at if values_at is None else values_at
        wanted = batch.target_positions if given is None else given
        options = self._options(batch)
        if batch.parts > 1:
            options["sequence_group"] = self.sequence_group
        elif self._short_last_layer and logits_at is None and is_last(self):
            # Kernels don't take zero rows: without supervised positions, compute one and drop it.
            options["query_positions"] = wanted if len(wanted) else batch.cu_seqlens[:1].long()
        embeds, deeper = self.embed_deep(batch) if batch.hidden is None else (batch.hidden, [])
        if deeper:
            options |= {"visual_pos_masks": batch.image_positions, "deepstack_visual_embeds": deeper}
        # Not the whole language model, whose output layer takes no targets.
        trunk = self.language_model.base_model(
            inputs_embeds=embeds,
            position_ids=batch.position_ids,
            cu_seqlens=batch.cu_seqlens,
            max_seqlen=batch.max_seqlen,
            use_cache=False,
            **options,
        )
        if not is_last(self):
            return trunk.last_hidden_state
        hidden = trunk.last_hidden_state[0]  # (1, T, D) to (T, D), or at query_positions
        hidden = hidden[: len(wanted)] if "query_positions" in options else hidden.index_select(0, wanted)  # (S, D)
        if values_at is not None:
            return self.value_head(hidden)
        output_layer = self.language_model.get_output_embeddings()
        if logits_at is not None:
            return final_logits(output_layer(hidden), self.language_model.config)
        divisor = temperature * self._divisor
        hidden = hidden if divisor == 1 else hidden / divisor
        if log_probs:
            # c tanh(x / c) / t is (c / t) tanh((x / t) / (c / t)).
            softcap = None if self._softcap is None else self._softcap / temperature
            rows = output_layer(hidden, targets=batch.targets, softcap=softcap, by_row=True)
            return (rows, self.critic(batch, values_at=batch.target_positions)) if has_critic(self) else rows
        loss, row_losses = output_layer(
            hidden, targets=batch.targets, softcap=self._softcap, row_weights=batch.target_weights
        )
        if num_sources is None:
            return loss
        return loss, _by_source(row_losses, batch.sources.index_select(0, batch.target_samples), num_sources)

    def _options(self, batch: Batch) -> dict[str, object]:
        """What layers of some models need to know of a pack beside where samples begin."""
        options = {} if batch.image_blocks is None else {"image_blocks": batch.image_blocks}
        options |= {"lengths": batch.lengths} if self._knows_lengths else {}
        return options | self.layer_inputs(batch.input_ids, batch.image_positions)

    def layer_inputs(self, input_ids: torch.Tensor, image_positions: torch.Tensor) -> dict[str, torch.Tensor]:
        """The embeddings that layers of some models take beside the first one's, padding's at images (Gemma 4)."""
        config = self.language_model.config
        if not has_layer_embeddings(config):
            return {}
        ids = input_ids.index_fill(1, image_positions, config.pad_token_id)
        return {"per_layer_inputs": self.language_model.base_model.get_per_layer_inputs(ids)}

    def embed(self, batch: Batch) -> torch.Tensor:
        """Token embeddings with the images' features in their places: (1, T, D)."""
        return self.embed_deep(batch)[0]

    def embed_deep(self, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The same, and the features (M, D) to add at image positions behind each of the first layers; [] for most.

        Tower, projector and newline run exactly once, whatever the batch holds, so that the collectives of all ranks
        match; unused features take part with a gradient of zero.
        """
        features = self.image_features(batch.pixel_values, batch.tower_inputs)  # (N, P, D) or (N, P, K * D)
        embeds = self.language_model.get_input_embeddings()(batch.input_ids)  # (1, T, D)
        return merge_features(embeds, features, batch, getattr(self, "newline", None))

    def image_features(self, pixel_values: torch.Tensor, tower_inputs: dict | None = None) -> torch.Tensor:
        """(N, 3, H, W) uint8 to (N, P, D). A frozen tower stores nothing for backward."""
        trained = any(p.requires_grad for p in self.vision_tower.parameters())
        with torch.set_grad_enabled(trained and torch.is_grad_enabled()):
            features = self.vision_tower(pixel_values, tower_inputs)  # (N, P, C)
        return self.projector(features)


def has_critic(model: nn.Module) -> bool:
    """True for a model that trains with PPO: a second one, with a value head, is its child `critic`."""
    return hasattr(model, "critic")


def merge_features(
    embeds: torch.Tensor,
    features: torch.Tensor,
    batch: Batch,
    newline: Callable[[torch.Tensor, int], torch.Tensor] | None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Token embeddings (1, T, D) with the features (N, P, D) of the batch's tiles at their positions.

    newline: Newline's forward, from F placed features to all M rows; None for models without. Of features (N, P, K * D)
    the first D are placed, and the others returned beside: K - 1 of (M, D).
    """
    table = features.flatten(0, 1)  # (N * P, D)
    if len(batch.pool_index):
        table = torch.cat([table, _pooled(table, batch)])  # (N * P + R, D)
    placed = table.index_select(0, batch.feature_index)  # (F, D)
    if newline is not None:
        placed = newline(placed, len(batch.image_positions))  # (M, D)
    placed, deeper, width = placed.to(embeds.dtype), [], embeds.shape[-1]
    if placed.shape[1] > width:
        placed, *deeper = placed.split(width, 1)
    return embeds.index_copy(1, batch.image_positions, placed[None]), deeper


def _by_source(row_losses: torch.Tensor, sources: torch.Tensor, num_sources: int) -> torch.Tensor:
    """(2, num_sources) float64: losses (S,) summed by source, and their numbers; always added in the same order."""
    is_from = sources == torch.arange(num_sources, device=sources.device)[:, None]  # (num_sources, S)
    return torch.stack([torch.where(is_from, row_losses, 0.0).sum(1), is_from.sum(1).double()])


def _pooled(features: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Weighted sums of features, or the largest of them: (N * P, D) to (R, D), added up in float32.

    One source at a time, for all at once would hold K times the result.
    """
    index, weight = batch.pool_index, batch.pool_weight  # (R, K)
    pooled = torch.zeros(len(index), features.shape[1], dtype=torch.float32, device=features.device)
    if batch.pools_by_max:
        taken = weight.isinf()  # (R, K)
        weight = weight.masked_fill(taken, 0)
        largest = torch.full_like(pooled, -torch.inf)
    for k in range(index.shape[1]):
        part = features.index_select(0, index[:, k]).float()  # (R, D)
        pooled = pooled + weight[:, k, None] * part
        if batch.pools_by_max:  # the first of equal ones has the gradient, and NaN stays, as in torch's max_pool2d
            largest = torch.where(taken[:, k, None] & ((part > largest) | part.isnan()), part, largest)
    if batch.pools_by_max:
        pooled = torch.where(taken[:, :1], largest, pooled)
    return pooled.to(features.dtype)


def assemble(
    text_config: PreTrainedConfig,
    tower: "TowerPlan | ReadyVision",
    args: ModelArguments,
    mean: torch.Tensor,
    std: torch.Tensor,
    value_head: bool = False,
) -> LlavaModel:
    """The composition, uninitialised, in torch's default dtype; mean and std (3,) as VisionTower takes them;
    value_head: with one."""
    language_model = AutoModelForCausalLM.from_config(
        text_config, attn_implementation=attention.register(), dtype=torch.get_default_dtype()
    )
    if is_upcycled(text_config):
        from llava_ds.model.upcycling import add_experts

        add_experts(language_model, text_config, args)
    hold_rotary_angles(language_model)
    language_model.tie_weights()  # from_config ties in its initialisation, which callers switch off
    projector = tower.build_projector(args, text_config.hidden_size)
    newline = Newline(text_config.hidden_size) if "unpad" in args.mm_patch_merge_type else None
    head = ValueHead(text_config.hidden_size) if value_head else None
    return LlavaModel(tower.build(mean, std), projector, language_model, newline, head)


def layer_classes(model: nn.Module) -> list[type[nn.Module]]:
    """The classes of the repeated layers of tower and language model."""
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    return sorted({type(stack[0]) for stack in stacks}, key=lambda cls: cls.__name__)
