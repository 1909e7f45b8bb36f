# T tokens of all samples laid end to end
"""Qwen3.5: Qwen3-VL's tower without DeepStack, and a language model with recurrent state in most layers.

Its mixture of experts (Qwen3.5-MoE) differs only in the language model.
"""

import dataclasses
from functools import partial
from types import ModuleType

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5TextModel,
    Qwen3_5VisionModel,
    Qwen3_5VisionPatchMerger,
)
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTextModel, Qwen3_5MoeVisionModel

from llava_ds.extensions.ready.delta_net import Samples, keep_samples_apart, let_the_cpu_compute
from llava_ds.extensions.ready.families import qwen_vl
from llava_ds.extensions.ready.family import ReadyFamily, TileSpec, shrink


class _Packed:
    """Base of layers changed to keep the samples of a pack apart. library: transformers' module of the layers."""

    library: ModuleType

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        let_the_cpu_compute(self.library)
        keep_samples_apart(self)

    def forward(
        self, cu_seqlens: torch.Tensor | None = None, lengths: tuple[int, ...] | None = None, **options: object
    ) -> BaseModelOutputWithPast:
        """lengths: tokens of each packed sample, on the host. For others see varlen_attention and transformers."""
        if cu_seqlens is not None:
            options |= {"cu_seqlens": cu_seqlens, "samples": Samples.of(lengths, cu_seqlens)}
        return super().forward(**options)


class PackedTrunk(_Packed, Qwen3_5TextModel):
    """Qwen3.5's layers."""

    library = modeling_qwen3_5


class PackedMixture(_Packed, Qwen3_5MoeTextModel):
    """Qwen3.5-MoE's layers."""

    library = modeling_qwen3_5_moe


class Qwen35ForCausalLM(qwen_vl.CausalTrunk):
    """Qwen3.5's language model with its output layer."""

    config_class, trunk = Qwen3_5TextConfig, PackedTrunk


class Qwen35MoeForCausalLM(qwen_vl.CausalTrunk):
    """Qwen3.5-MoE's language model with its output layer."""

    config_class, trunk = Qwen3_5MoeTextConfig, PackedMixture

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # as in qwen3_vl.py


def _tiles(config: PreTrainedConfig, images: dict, processor: dict, tokenizer: PreTrainedTokenizerBase) -> TileSpec:
    side = int(config.vision_config.num_position_embeddings**0.5)
    return qwen_vl.cell_tiles(config, images, processor, tokenizer, table=side)


def _shrink(config: PreTrainedConfig) -> None:
    shrink(config)
    config.vision_config.out_hidden_size = config.text_config.hidden_size


FAMILY = ReadyFamily(
    name="Qwen3.5",
    model_types=("qwen3_5",),
    **qwen_vl.COMMON,
    tiles=_tiles,
    build_connector=lambda config: Qwen3_5VisionPatchMerger(config=config.vision_config),
    build_tower=partial(qwen_vl.build_tower, Qwen3_5VisionModel),
    text_models=(Qwen35ForCausalLM,),
    shrink=_shrink,
)

MIXTURE = dataclasses.replace(
    FAMILY,
    name="Qwen3.5-MoE",
    model_types=("qwen3_5_moe",),
    build_tower=partial(qwen_vl.build_tower, Qwen3_5MoeVisionModel),
    text_models=(Qwen35MoeForCausalLM,),
)
