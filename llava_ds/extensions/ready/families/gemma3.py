# B prompts, L tokens of the longest, D width of the language model
"""Gemma 3: a square image goes through SigLIP, and patches are averaged to a fixed number of tokens."""

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.gemma3.modeling_gemma3 import (
    Gemma3MultiModalProjector,
    create_masks_for_vision_model,
    get_block_sequence_ids_for_mask,
)

from llava_ds.extensions.ready.family import ReadyFamily, TileSpec, expect, side_of, token_of
from llava_ds.extensions.ready.ready_tilings import SquareTiling

_TOKENS = ("image_token", "boi_token", "eoi_token")


def _tiles(config: PreTrainedConfig, images: dict, processor: dict, tokenizer: PreTrainedTokenizerBase) -> TileSpec:
    expect(images, do_resize=True, do_rescale=True, do_normalize=True, do_convert_rgb=True, do_pan_and_scan=False)
    vision, features = config.vision_config, config.mm_tokens_per_image
    if config.text_config.use_bidirectional_attention:
        raise ValueError("its text_config says use_bidirectional_attention: all of its tokens attend to each other")
    if vision.model_type != "siglip_vision_model":
        raise ValueError(f"its vision_config is a {vision.model_type}, expected a siglip_vision_model")
    if vision.vision_use_head:
        raise ValueError("its vision_config has a pooling head, which nothing uses: set vision_use_head to false")
    side = side_of(images, "size", "height", "width")
    patches, per_row = side // vision.patch_size, round(features**0.5)
    if side != vision.image_size or per_row < 1 or per_row**2 != features or patches % per_row:
        raise ValueError(
            f"mm_tokens_per_image {features} doesn't fit images of {side} pixels, with patches of {vision.patch_size} "
            f"and a tower for {vision.image_size} pixels"
        )
    if (said := processor.get("image_seq_length", features)) != features:
        raise ValueError(
            f"its processor_config.json says image_seq_length {said}, but an image has {features} features"
        )
    image_token, start, end = (token_of(tokenizer, getattr(tokenizer, name, None)) for name in _TOKENS)
    if tokenizer.convert_tokens_to_ids(image_token) != config.image_token_id:
        raise ValueError(f"config.json says image_token_id {config.image_token_id}, but that id is not {image_token}")
    return TileSpec(SquareTiling(side, image_token, start, end), patches**2, patches**2, features)


def _prompt_mask(
    config: PreTrainedConfig, embeds: torch.Tensor, mask: torch.Tensor, is_image: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return masks by kind of layer. embeds (B, L, D); mask (B, L), 0 at padding; is_image (B, L) bool."""
    blocks = get_block_sequence_ids_for_mask(is_image.long())
    return create_masks_for_vision_model(config, embeds, mask, None, None, blocks)


FAMILY = ReadyFamily(
    name="Gemma 3",
    model_types=("gemma3",),
    vision="model.vision_tower",
    connector={"model.multi_modal_projector": ""},
    trunk="model.language_model",
    tiles=_tiles,
    build_connector=Gemma3MultiModalProjector,
    features=lambda tower, pixels, _: tower(pixel_values=pixels).last_hidden_state,
    connect=lambda connector, config, features: connector(features),
    patch_embedding=lambda tower: tower.embeddings.patch_embedding,
    outer_inputs=lambda config, pixels, cells, is_image: {"pixel_values": pixels, "token_type_ids": is_image.long()},
    resample=2,  # bilinear
    has_image_blocks=lambda config: True,
    prompt_mask=_prompt_mask,
)
