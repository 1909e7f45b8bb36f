# N cells of all images, C width of the tower, D width of the language model
"""Qwen2-VL: every patch attends to its complete image."""

from functools import partial

from transformers import PreTrainedConfig
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import (
    PatchMerger,
    Qwen2VisionTransformerPretrainedModel,
    Qwen2VLTextModel,
)

from llava_ds.boxes import BoxFormat
from llava_ds.extensions.ready.families import qwen_vl
from llava_ds.extensions.ready.family import VISION, ReadyFamily


class Qwen2VLForCausalLM(qwen_vl.CausalTrunk):
    """Qwen2-VL's language model with its output layer."""

    config_class, trunk = Qwen2VLTextConfig, Qwen2VLTextModel


def _build_connector(config: PreTrainedConfig) -> PatchMerger:
    vision = config.vision_config
    return PatchMerger(vision.hidden_size, vision.embed_dim, vision.spatial_merge_size)


def _shrink(config: PreTrainedConfig) -> None:
    vision = config.vision_config
    vision.depth, vision.num_heads = VISION["num_hidden_layers"], VISION["num_attention_heads"]
    vision.embed_dim, vision.hidden_size = VISION["hidden_size"], config.text_config.hidden_size


FAMILY = ReadyFamily(
    name="Qwen2-VL",
    model_types=("qwen2_vl",),
    **qwen_vl.COMMON,
    tiles=qwen_vl.cell_tiles,
    build_connector=_build_connector,
    build_tower=partial(qwen_vl.build_tower, Qwen2VisionTransformerPretrainedModel),
    text_models=(Qwen2VLForCausalLM,),
    is_flat=True,
    shrink=_shrink,
    tower_widths=lambda vision: (vision.embed_dim, int(vision.embed_dim * vision.mlp_ratio)),
    boxes=BoxFormat(
        "norm1000",
        "<|box_start|>({},{}),({},{})<|box_end|>",
        "<|box_start|>({},{})<|box_end|>",
        "<|object_ref_start|>{}<|object_ref_end|>",
    ),
)
