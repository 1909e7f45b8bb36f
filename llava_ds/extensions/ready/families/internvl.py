# N tiles, S side of a tile, C width of the tower, D width of the language model, P features of a tile
"""InternVL 3 and 3.5 in transformers' format: square tiles through InternViT, pixel shuffle, two layers."""

import dataclasses

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.internvl.modeling_internvl import InternVLModel, InternVLMultiModalProjector

from llava_ds.boxes import BoxFormat
from llava_ds.extensions.ready.family import (
    ReadyFamily,
    TileSpec,
    chosen_frames,
    expect,
    expect_frames,
    setting,
    side_of,
    token_of,
    written_token,
)
from llava_ds.extensions.ready.ready_tilings import CanvasTiling
from llava_ds.extensions.ready.ready_videos import VideoRule

MAX_TILES = 1000  # per image; published models have 12
VIDEO_SIDE = 384  # pixels of a frame, by default
_TOKENS = ("context_image_token", "start_image_token", "end_image_token")


def _tiles(config: PreTrainedConfig, images: dict, processor: dict, tokenizer: PreTrainedTokenizerBase) -> TileSpec:
    expect(images, do_resize=True, do_rescale=True, do_normalize=True, do_convert_rgb=True)
    vision, shrink = config.vision_config, round(1 / config.downsample_ratio)
    if config.vision_feature_layer != -1 or config.vision_feature_select_strategy != "default":
        raise ValueError("its features are not those of the tower's last layer without the class token")
    side, patch = side_of(images, "size", "height", "width"), vision.patch_size[0]
    patches, rest = divmod(side, patch)
    if rest or patches % shrink or list(vision.image_size) != [side, side] or len(set(vision.patch_size)) != 1:
        raise ValueError(f"tiles of {side} pixels don't fit the tower's {vision.image_size} with patches of {patch}")
    features = (patches // shrink) ** 2
    if (said := processor.get("image_seq_length", features)) != features:
        raise ValueError(f"its processor_config.json says image_seq_length {said}, but a tile has {features} features")
    image_token, start, end = (token_of(tokenizer, getattr(tokenizer, name, None)) for name in _TOKENS)
    if tokenizer.convert_tokens_to_ids(image_token) != config.image_token_id:
        raise ValueError(f"config.json says image_token_id {config.image_token_id}, but that id is not {image_token}")
    # InternVLProcessor always crops and ignores its image processor's crop_to_patches.
    least, most = setting(images, "min_patches", 1), setting(images, "max_patches", 12)
    if not 1 <= least <= most <= MAX_TILES:
        raise ValueError(f"its image processor says min_patches {least} and max_patches {most}")
    tiling = CanvasTiling(side, least, most, True, image_token, start, end)
    return TileSpec(tiling, patches**2, patches**2 + 1, features)


def _videos(
    config: PreTrainedConfig, tiling: CanvasTiling, images: dict, settings: dict, tokenizer: PreTrainedTokenizerBase
) -> VideoRule:
    """Return the VideoRule: a frame is one tile, preceded by its number."""
    token = written_token(tokenizer, getattr(tokenizer, "video_token", None))
    expect_frames(settings, images, do_normalize=True)
    sizes = {"size": {"height": VIDEO_SIDE, "width": VIDEO_SIDE}, **settings}
    for name in ("size", *(["crop_size"] if settings.get("do_center_crop") else [])):
        if (side := side_of(sizes, name, "height", "width")) != tiling.side:
            raise ValueError(f"its video processor makes frames of {side} pixels, but tiles have {tiling.side}")
    return VideoRule(
        token,
        dataclasses.replace(tiling, splits=False),
        "InternVLVideoProcessor",
        stamp="Frame{number}: ",
        between="\n",
        **chosen_frames(settings),
    )


def _connect(connector: nn.Module, config: PreTrainedConfig, features: torch.Tensor) -> torch.Tensor:
    """Concatenate the features of 2 x 2 patches, and project: (N, patches, C) to (N, P, D)."""
    n, patches, width = features.shape
    side = round(patches**0.5)
    grid = features.reshape(n, side, side, width)
    shuffled = InternVLModel.pixel_shuffle(None, grid, scale_factor=config.downsample_ratio)
    return connector(shuffled.reshape(n, -1, shuffled.shape[-1]))


FAMILY = ReadyFamily(
    name="InternVL",
    model_types=("internvl",),
    vision="model.vision_tower",
    connector={"model.multi_modal_projector": ""},
    trunk="model.language_model",
    tiles=_tiles,
    build_connector=InternVLMultiModalProjector,
    features=lambda tower, pixels, _: tower(pixel_values=pixels).last_hidden_state[:, 1:],
    connect=_connect,
    patch_embedding=lambda tower: tower.embeddings.patch_embeddings.projection,
    outer_inputs=lambda config, pixels, *_: {"pixel_values": pixels},
    resample=3,  # bicubic
    videos=_videos,
    boxes=BoxFormat("norm1000", "<box>[[{}, {}, {}, {}]]</box>", "<box>[[{}, {}]]</box>", "<ref>{}</ref>"),
)
