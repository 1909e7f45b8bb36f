# N cells of all images, M image positions, C width of the tower, D width of the language model, K features of a cell
"""Qwen3-VL: features of earlier tower layers are added after the first layers of the language model.

Its mixture of experts (Qwen3-VL-MoE) differs only in the language model.
"""

import dataclasses
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLTextModel,
    Qwen3VLVisionModel,
    Qwen3VLVisionPatchMerger,
)
from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeTextConfig
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextModel, Qwen3VLMoeVisionModel

from llava_ds.boxes import THOUSANDTHS
from llava_ds.extensions.ready.families import qwen_vl
from llava_ds.extensions.ready.family import ReadyFamily, TileSpec, shrink

MERGERS = ("merger", "deepstack_merger_list")


def _add_at_positions(
    self: nn.Module, hidden_states: torch.Tensor, visual_pos_masks: torch.Tensor, visual_embeds: torch.Tensor
) -> torch.Tensor:
    """Add features at positions (M,), counted over all rows laid end to end.

    transformers passes a mask instead that would make the host wait for the device.
    """
    rows = hidden_states.flatten(0, 1).index_add(0, visual_pos_masks, visual_embeds.to(hidden_states.dtype))
    return rows.view_as(hidden_states)


class DeepTrunk(Qwen3VLTextModel):
    """Qwen3-VL's layers."""

    _deepstack_process = _add_at_positions


class DeepMixture(Qwen3VLMoeTextModel):
    """Qwen3-VL-MoE's layers."""

    _deepstack_process = _add_at_positions


class Qwen3VLForCausalLM(qwen_vl.CausalTrunk):
    """Qwen3-VL's language model with its output layer."""

    config_class, trunk = Qwen3VLTextConfig, DeepTrunk


class Qwen3VLMoeForCausalLM(qwen_vl.CausalTrunk):
    """Qwen3-VL-MoE's language model with its output layer."""

    config_class, trunk = Qwen3VLMoeTextConfig, DeepMixture

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # transformers 5.23 searches for experts in the class's source file


class Mergers(nn.Module):
    """The mergers of the tower's last layer and of its earlier layers."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        vision = config.vision_config
        self.merger = Qwen3VLVisionPatchMerger(config=vision, use_postshuffle_norm=False)
        self.deepstack_merger_list = nn.ModuleList(
            Qwen3VLVisionPatchMerger(config=vision, use_postshuffle_norm=True) for _ in vision.deepstack_visual_indexes
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Merge (N, K, M * M * C) to (N, 1, K * D)."""
        first, *deeper = features.unbind(1)
        merged = [self.merger(first.reshape(-1, self.merger.norm.normalized_shape[0]))]
        merged += [merger(each) for merger, each in zip(self.deepstack_merger_list, deeper, strict=True)]
        return torch.cat(merged, -1)[:, None]


def _tiles(config: PreTrainedConfig, images: dict, processor: dict, tokenizer: PreTrainedTokenizerBase) -> TileSpec:
    vision, layers = config.vision_config, config.text_config.num_hidden_layers
    if (deep := len(vision.deepstack_visual_indexes)) >= layers:
        raise ValueError(f"its vision_config has {deep} deepstack layers, expected fewer than the LLM's {layers}")
    return qwen_vl.cell_tiles(config, images, processor, tokenizer, table=int(vision.num_position_embeddings**0.5))


def _build_tower(kind: type[PreTrainedModel], config: PreTrainedConfig) -> nn.Module:
    tower = qwen_vl.build_tower(kind, config)
    tower.deepstack_merger_list = nn.ModuleList(
        qwen_vl.SideBySide(config.spatial_merge_size**2) for _ in config.deepstack_visual_indexes
    )
    return tower


def _shrink(config: PreTrainedConfig) -> None:
    shrink(config)
    vision, text = config.vision_config, config.text_config
    vision.out_hidden_size = text.hidden_size
    vision.deepstack_visual_indexes = list(range(len(vision.deepstack_visual_indexes)))
    vision.depth = text.num_hidden_layers = 1 + len(vision.deepstack_visual_indexes)


FAMILY = ReadyFamily(
    name="Qwen3-VL",
    model_types=("qwen3_vl",),
    **qwen_vl.COMMON
    | {
        "connector": {f"{qwen_vl.VISION}.{name}": f"{name}." for name in MERGERS},
        "connect": lambda connector, config, features: connector(features),
    },
    tiles=_tiles,
    build_connector=Mergers,
    build_tower=partial(_build_tower, Qwen3VLVisionModel),
    text_models=(Qwen3VLForCausalLM,),
    fed_layers=lambda config: len(config.vision_config.deepstack_visual_indexes),
    shrink=_shrink,
    boxes=THOUSANDTHS,
)

MIXTURE = dataclasses.replace(
    FAMILY,
    name="Qwen3-VL-MoE",
    model_types=("qwen3_vl_moe",),
    build_tower=partial(_build_tower, Qwen3VLMoeVisionModel),
    text_models=(Qwen3VLMoeForCausalLM,),
)
