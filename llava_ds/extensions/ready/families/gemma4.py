# N cells of all images, M x M patches per cell, P patches of all images, p patches of one image, S side of a cell, C
# width of the tower, D width of the language model, B prompts, L tokens of the longest prompt
"""Gemma 4: images have about their original shape within a budget of tokens. A token averages a cell of patches.

A tile is a cell of M x M patches; the tower's last step turns it into one feature. In some model sizes, every layer of
the language model has additional embeddings, and layers share keys and values. In others, the tokens of an image attend
to each other, but only in layers with a window. One size has experts and an MLP in every layer. The audio tower is not
used.
"""

import dataclasses

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.gemma4.modeling_gemma4 import (
    Gemma4MultimodalEmbedder,
    Gemma4VisionModel,
    create_masks_for_vision_model,
    get_block_sequence_ids_for_mask,
)

from llava_ds.boxes import BoxFormat
from llava_ds.extensions.ready.family import (
    VISION,
    Layouts,
    ReadyFamily,
    TileSpec,
    chosen_frames,
    expect,
    expect_frames,
    media_types,
    prompt_mask,
    setting,
    token_of,
    written_token,
)
from llava_ds.extensions.ready.ready_tilings import BudgetTiling
from llava_ds.extensions.ready.ready_videos import VideoRule
from llava_ds.extensions.table import EXTENSIONS
from llava_ds.model import attention

MOST_TOKENS, FRAME_TOKENS = 280, 70  # defaults for an image and a frame
VIDEO_TOKEN = "<|video|>"
PATCH, POOLING = 16, 3  # defaults of a patch's side, and of patches along a cell
_TOKENS = ("image_token", "boi_token", "eoi_token")


def _tiles(config: PreTrainedConfig, images: dict, processor: dict, tokenizer: PreTrainedTokenizerBase) -> TileSpec:
    text, vision = config.text_config, config.vision_config
    if text.enable_moe_block and "mixtures" not in EXTENSIONS:
        raise ValueError("its text_config says enable_moe_block, and llava_ds/extensions/mixtures was not found")
    if text.use_bidirectional_attention == "all":
        raise ValueError("its text_config says use_bidirectional_attention all, but its attention has to be causal")
    expect(images, do_resize=True, do_rescale=True, do_convert_rgb=True)
    # A missing value is refused, because other code reads it as 0.5.
    scale = {name: images.get(name, "nothing") for name in ("image_mean", "image_std")}
    expect({**images, **scale}, image_mean=[0, 0, 0], image_std=[1, 1, 1])
    patch, merge = setting(images, "patch_size", PATCH), setting(images, "pooling_kernel_size", POOLING)
    if (patch, merge) != (vision.patch_size, vision.pooling_kernel_size):
        raise ValueError(
            f"its image processor makes cells of {merge} x {merge} patches of {patch} pixels, but its vision_config "
            f"says pooling_kernel_size {vision.pooling_kernel_size} and patch_size {vision.patch_size}"
        )
    most = setting(images, "max_soft_tokens", MOST_TOKENS)
    if not 1 <= most <= vision.position_embedding_size // merge:
        raise ValueError(
            f"its image processor says max_soft_tokens {most}, expected 1 to {vision.position_embedding_size // merge}"
            ", for which its tower has positions"
        )
    image_token, start, end = (token_of(tokenizer, getattr(tokenizer, name, None)) for name in _TOKENS)
    if tokenizer.convert_tokens_to_ids(image_token) != config.image_token_id:
        raise ValueError(f"config.json says image_token_id {config.image_token_id}, but that id is not {image_token}")
    return TileSpec(BudgetTiling(patch * merge, merge, most, image_token, start, end), merge**2, merge**2, 1)


def _videos(
    config: PreTrainedConfig, tiling: BudgetTiling, images: dict, settings: dict, tokenizer: PreTrainedTokenizerBase
) -> VideoRule:
    """Return the VideoRule: a frame is an image with fewer tokens, preceded by its time."""
    vision, token = config.vision_config, written_token(tokenizer, VIDEO_TOKEN)
    if tokenizer.convert_tokens_to_ids(token) != config.video_token_id:
        raise ValueError(f"config.json says video_token_id {config.video_token_id}, but that id is not {token}")
    if tokenizer.tokenize(token) != [token]:
        raise ValueError(f"its tokenizer splits {token}: add it to the special tokens of its files")
    expect_frames(settings, images, patch_size=vision.patch_size, pooling_kernel_size=vision.pooling_kernel_size)
    most = setting(settings, "max_soft_tokens", FRAME_TOKENS)
    if not 1 <= most <= vision.position_embedding_size // tiling.merge:
        raise ValueError(f"its video processor says max_soft_tokens {most}, for which its tower has no positions")
    return VideoRule(
        token,
        dataclasses.replace(tiling, most=most, image_token=token),
        "Gemma4VideoProcessor",
        stamp="{timestamp} ",
        between=" ",
        **chosen_frames(settings),
    )


def _build_tower(config: PreTrainedConfig) -> nn.Module:
    """Build the tower with this package's attention, in torch's default dtype."""
    tower = Gemma4VisionModel._from_config(config, attn_implementation="sdpa", dtype=torch.get_default_dtype())
    # transformers' setter would look for this name on the hub.
    tower.config._attn_implementation = attention.register_for_towers()
    return tower


def _patches(config: PreTrainedConfig, pixels: torch.Tensor) -> torch.Tensor:
    """Split cells (N, 3, S, S) into patches (N, M * M, 3 * (S / M)^2), with the channels of a pixel adjacent."""
    n, channels, side, _ = pixels.shape
    merge = config.pooling_kernel_size
    patch = side // merge
    patches = pixels.reshape(n, channels, merge, patch, merge, patch).permute(0, 2, 4, 3, 5, 1)
    return patches.reshape(n, merge**2, -1)


def _processed(config: PreTrainedConfig, pixels: torch.Tensor, layouts: Layouts) -> torch.Tensor:
    """Reorder cells (N, 3, S, S) to the patches of every image and frame, row by row: (P, 3 * (S / M)^2)."""
    merge, parts = config.vision_config.pooling_kernel_size, []
    patches, cells = _patches(config.vision_config, pixels), [cells for _, cells in _shown(layouts)]
    for (across, down), own in zip(cells, patches.split([across * down for across, down in cells])):
        rows = own.reshape(down, across, merge, merge, -1).transpose(1, 2)
        parts.append(rows.reshape(down * merge * across * merge, -1))
    return torch.cat(parts)


def _shown(layouts: Layouts) -> list[tuple[bool, tuple[int, int]]]:
    """Return (is a frame, cells) for every image and every frame."""
    return [(layout.is_video, layout.cells) for layout in layouts for _ in range(layout.moments)]


def _outer_inputs(
    config: PreTrainedConfig, patches: torch.Tensor, layouts: Layouts, is_media: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the arguments of transformers' forward for patches (P, 3 * (S / M)^2), padded to the largest image."""
    merge, shown = config.vision_config.pooling_kernel_size, _shown(layouts)
    places = [
        torch.cartesian_prod(torch.arange(down * merge), torch.arange(across * merge)).flip(1)
        for _, (across, down) in shown
    ]  # (p, 2): column and row
    parts = patches.split([len(each) for each in places])
    inputs = {"mm_token_type_ids": media_types(layouts, is_media)}
    for of_videos, pixels, positions in (
        (False, "pixel_values", "image_position_ids"), (True, "pixel_values_videos", "video_position_ids"),
    ):  # fmt: skip
        own = [i for i, (is_frame, _) in enumerate(shown) if is_frame == of_videos]
        if own:
            inputs[pixels] = nn.utils.rnn.pad_sequence([parts[i] for i in own], batch_first=True)
            padded = nn.utils.rnn.pad_sequence([places[i] for i in own], batch_first=True, padding_value=-1)
            inputs[positions] = padded.to(patches.device)
    if counts := [layout.moments for layout in layouts if layout.is_video]:
        inputs["num_frames_per_video"] = torch.tensor(counts, device=patches.device)
    return inputs


def _features(tower: nn.Module, pixels: torch.Tensor, tower_inputs: dict) -> torch.Tensor:
    """Encode cells (N, 3, S, S) in [0, 1] to (N, 1, C). Calls the tower's parts, because its forward would sync."""
    patches = _patches(tower.config, pixels).flatten(0, 1)[None]  # (1, P, 3 * (S / M)^2)
    positions = tower_inputs["position_ids"].flip(1)[None]  # (1, P, 2): column and row
    padding = torch.zeros(positions.shape[:2], dtype=torch.bool, device=pixels.device)
    hidden = tower.patch_embedder(patches, positions, padding)  # (1, P, C)
    angles = tower.encoder.rotary_emb(hidden, positions)
    bounds = {"cu_seq_lens_q": tower_inputs["cu_seqlens"], "max_length_q": tower_inputs["max_seqlen"]}
    for layer in tower.encoder.layers:
        hidden = layer(hidden, position_embeddings=angles, attention_mask=None, position_ids=positions, **bounds)
    averaged = hidden.reshape(len(pixels), -1, hidden.shape[-1]).float().mean(1).to(hidden.dtype)  # (N, C)
    scaled = averaged.float() * tower.pooler.root_hidden_size
    if tower.config.standardize:
        scaled = (scaled - tower.std_bias.float()) * tower.std_scale.float()
    return scaled.to(hidden.dtype)[:, None]


def _prompt_mask(
    config: PreTrainedConfig, embeds: torch.Tensor, mask: torch.Tensor, is_image: torch.Tensor
) -> torch.Tensor | dict[str, torch.Tensor]:
    """Return masks by kind of layer. embeds (B, L, D); mask (B, L), 0 at padding; is_image (B, L) bool."""
    if config.use_bidirectional_attention != "vision":
        return prompt_mask(config, embeds, mask, is_image)
    blocks = get_block_sequence_ids_for_mask(is_image.long(), device=embeds.device)
    return create_masks_for_vision_model(config, embeds, mask, None, None, blocks)


def _shrink(config: PreTrainedConfig) -> None:
    vision = config.vision_config
    for name, value in {**VISION, "num_key_value_heads": 2, "head_dim": 16}.items():
        setattr(vision, name, value)
    config.audio_config = None
    config.audio_token_id = -1  # the small copy has no audio token


FAMILY = ReadyFamily(
    name="Gemma 4",
    model_types=("gemma4",),
    vision="model.vision_tower",
    connector={"model.embed_vision": ""},
    trunk="model.language_model",
    tiles=_tiles,
    build_connector=lambda config: Gemma4MultimodalEmbedder(config.vision_config, config.text_config),
    features=_features,
    connect=lambda connector, config, features: connector(features),
    patch_embedding=lambda tower: tower.patch_embedder.input_proj,
    outer_inputs=_outer_inputs,
    resample=3,  # bicubic
    videos=_videos,
    processed=_processed,
    build_tower=_build_tower,
    has_image_blocks=lambda config: config.text_config.use_bidirectional_attention == "vision",
    blocks_need_windows=True,
    casts_pixels=False,
    beside=("model.audio_tower.", "model.embed_audio."),
    prompt_mask=_prompt_mask,
    shrink=_shrink,
    # Source: Google's documentation of Gemma, Image understanding: answers are {"box_2d": …, "label": …}.
    boxes=BoxFormat("norm1000", "[{1}, {0}, {3}, {2}]", "[{1}, {0}]"),
)
