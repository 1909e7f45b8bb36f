# N tiles, S side of a tile, C width of the tower, D width of the language model, P features of a tile
"""Idefics3, SmolVLM and SmolVLM 2: square tiles go through SigLIP, pixel shuffle and one matrix."""

import dataclasses

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.idefics3.modeling_idefics3 import Idefics3Connector
from transformers.models.smolvlm import processing_smolvlm
from transformers.models.smolvlm.modeling_smolvlm import SmolVLMConnector

from llava_ds.extensions.ready.family import (
    ReadyFamily,
    TileSpec,
    expect,
    expect_frames,
    no_videos,
    positive,
    setting,
    side_of,
    token_of,
    whole,
)
from llava_ds.extensions.ready.ready_tilings import MAX_SIDE, SplitTiling
from llava_ds.extensions.ready.ready_videos import VideoRule

VIDEO_TOKEN = "<video>"
VIDEO_SIDE = 364  # pixels of a frame's tile, by default
VIDEO_EDGE = 4 * VIDEO_SIDE  # default longer side to which a frame is scaled first
_CONNECTORS = {"idefics3": Idefics3Connector, "smolvlm": SmolVLMConnector}


def _tiles(config: PreTrainedConfig, images: dict, processor: dict, tokenizer: PreTrainedTokenizerBase) -> TileSpec:
    expect(images, do_resize=True, do_rescale=True, do_normalize=True, do_convert_rgb=True, do_pad=True)
    vision, scale = config.vision_config, config.scale_factor
    side = side_of(images, "max_image_size", "longest_edge")
    longest = side_of(images, "size", "longest_edge")
    patches = side // vision.patch_size  # SmolVLM's tower drops incomplete patches
    if patches == 0 or patches % scale or side > vision.image_size:
        raise ValueError(f"tiles of {side} pixels don't fit {scale} x {scale} patches of {vision.patch_size}")
    features = (patches // scale) ** 2
    if (said := processor.get("image_seq_len", features)) != features:
        raise ValueError(f"its processor_config.json says image_seq_len {said}, but a tile has {features} features")
    tiling = SplitTiling(side, longest, setting(images, "do_image_splitting", True))
    for token in (tiling.image_token, tiling.around):
        token_of(tokenizer, token)
    if tokenizer.convert_tokens_to_ids(tiling.image_token) != config.image_token_id:
        raise ValueError(
            f"config.json says image_token_id {config.image_token_id}, but that id is not {tiling.image_token}"
        )
    return TileSpec(tiling, patches**2, patches**2, features)


def _videos(
    config: PreTrainedConfig, tiling: SplitTiling, images: dict, settings: dict, tokenizer: PreTrainedTokenizerBase
) -> VideoRule:
    """Return SmolVLM's VideoRule: a frame is a single overview tile, preceded by its time."""
    if config.model_type != "smolvlm":
        return no_videos()
    expect_frames(settings, images, do_normalize=True, do_pad=True)
    side = side_of({"max_image_size": {"longest_edge": VIDEO_SIDE}, **settings}, "max_image_size", "longest_edge")
    if side != tiling.side:
        raise ValueError(f"its video processor makes frames of {side} pixels, but tiles have {tiling.side}")
    # video_sampling has the number and rate of frames, and their default size.
    sampling = settings.get("video_sampling")
    sampling = sampling if isinstance(sampling, dict) else {}
    sizes = {"size": sampling.get("video_size", {"longest_edge": VIDEO_EDGE}), **settings}
    bound = "max_frames" if sampling else "num_frames"
    return VideoRule(
        getattr(tokenizer, "video_token", None) or VIDEO_TOKEN,
        dataclasses.replace(tiling, longest_edge=min(side_of(sizes, "size", "longest_edge"), MAX_SIDE), splits=False),
        "SmolVLMVideoProcessor",
        stamp=processing_smolvlm.FRAME_TIMESTAMP_MESSAGE,
        intro=processing_smolvlm.DEFAULT_VIDEO_INTRO,
        outro=processing_smolvlm.DEFAULT_MEDIA_OUTTRO,
        template=processing_smolvlm.DEFAULT_CHAT_TEMPLATE,
        bound="num_frames",
        fps=positive(sampling or settings, "fps"),
        most_frames=whole(sampling or settings, bound),
    )


def _features(tower: nn.Module, pixels: torch.Tensor, _: dict) -> torch.Tensor:
    """Encode (N, 3, S, S) to (N, patches, C). Calls the tower's parts, because its forward with a mask would sync."""
    patches = pixels.shape[-1] // tower.patch_size
    full = torch.ones(len(pixels), patches, patches, dtype=torch.bool, device=pixels.device)
    hidden = tower.embeddings(pixel_values=pixels, patch_attention_mask=full)
    return tower.post_layernorm(tower.encoder(inputs_embeds=hidden, attention_mask=None).last_hidden_state)


FAMILY = ReadyFamily(
    name="Idefics3 and SmolVLM",
    model_types=("idefics3", "smolvlm"),
    vision="model.vision_model",
    connector={"model.connector": ""},
    trunk="model.text_model",
    tiles=_tiles,
    build_connector=lambda config: _CONNECTORS[config.model_type](config),
    features=_features,
    connect=lambda connector, config, features: connector(features),
    patch_embedding=lambda tower: tower.embeddings.patch_embedding,
    outer_inputs=lambda config, pixels, *_: {"pixel_values": pixels[None]},
    resample=1,  # Lanczos
    videos=_videos,
)
