# N cells of all images, C width of the tower, D width of the language model
"""Qwen2.5-VL: patches attend to a window of their image, and in a few tower layers to the complete image."""

from functools import partial

from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
    Qwen2_5_VLPatchMerger,
    Qwen2_5_VLTextModel,
)

from llava_ds.boxes import BoxFormat
from llava_ds.extensions.ready.families import qwen_vl
from llava_ds.extensions.ready.family import ReadyFamily, TileSpec, shrink


class Qwen25VLForCausalLM(qwen_vl.CausalTrunk):
    """Qwen2.5-VL's language model with its output layer."""

    config_class, trunk = Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel


def _tiles(config: PreTrainedConfig, images: dict, processor: dict, tokenizer: PreTrainedTokenizerBase) -> TileSpec:
    vision = config.vision_config
    window = vision.window_size // vision.spatial_merge_size // vision.patch_size
    if window < 1:
        raise ValueError(f"its vision_config says window_size {vision.window_size}, smaller than one cell of patches")
    return qwen_vl.cell_tiles(
        config,
        images,
        processor,
        tokenizer,
        window=window,
        windowed_layers=vision.depth - len(set(vision.fullatt_block_indexes)),
    )


def _build_connector(config: PreTrainedConfig) -> Qwen2_5_VLPatchMerger:
    vision = config.vision_config
    return Qwen2_5_VLPatchMerger(vision.out_hidden_size, vision.hidden_size, vision.spatial_merge_size)


def _shrink(config: PreTrainedConfig) -> None:
    shrink(config)
    config.vision_config.out_hidden_size = config.text_config.hidden_size
    config.vision_config.fullatt_block_indexes = [1]


FAMILY = ReadyFamily(
    name="Qwen2.5-VL",
    model_types=("qwen2_5_vl",),
    **qwen_vl.COMMON,
    tiles=_tiles,
    build_connector=_build_connector,
    build_tower=partial(qwen_vl.build_tower, Qwen2_5_VisionTransformerPretrainedModel),
    text_models=(Qwen25VLForCausalLM,),
    is_flat=True,
    shrink=_shrink,
    boxes=BoxFormat("real"),
)
