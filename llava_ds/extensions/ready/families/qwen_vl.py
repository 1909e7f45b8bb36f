# N cells of all images, M x M patches per cell, T frames of a patch, C tower width, D language-model width, K features
# of a cell: the first for the input sequence, the others for later layers
"""The common part of Qwen-VL and Qwen3.5: the tower encodes complete images at about their original size.

A tile is a cell of M x M patches; the connector (Qwen's merger) turns it into one feature. transformers' tower contains
the connector; here it is replaced by a module that concatenates a cell's patches.
"""

import types
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import CausalLMOutputWithPast

from llava_ds.extensions.ready.family import (
    Layouts,
    TileSpec,
    chosen_frames,
    expect,
    expect_frames,
    media_types,
    setting,
    token_of,
    written_token,
)
from llava_ds.extensions.ready.ready_tilings import CellTiling, FrameCells
from llava_ds.extensions.ready.ready_videos import VideoRule
from llava_ds.model import attention

PIXELS = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}  # the processor's default
# Defaults for videos: per frame, and per video with written times.
FRAME_PIXELS = {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28}
VIDEO_PIXELS = {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32}
# Default max_video_tokens for cap_pixels_per_frame: per video with FRAME_PIXELS, per frame with VIDEO_PIXELS.
FRAME_CAP, VIDEO_CAP = 128_000, 768
IMAGE_TOKEN, VIDEO_TOKEN = "<|image_pad|>", "<|video_pad|>"
VISION, TRUNK = "model.visual", "model.language_model"


class CausalTrunk(PreTrainedModel):
    """A language model with its output layer that transformers has only as a part of the complete model.

    Subclasses set config_class and trunk. trunk: the class of the model without the output layer.
    """

    trunk: type[PreTrainedModel]
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_attention_backend = _supports_sdpa = _supports_flash_attn = True
    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.model = self.trunk(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, logits_to_keep: torch.Tensor | None = None, **options: object) -> CausalLMOutputWithPast:
        """Return the logits at all positions, or at logits_to_keep: (1, T, V). options: the trunk's arguments."""
        hidden = self.model(**options).last_hidden_state
        kept = hidden if logits_to_keep is None else hidden.index_select(1, logits_to_keep)
        return CausalLMOutputWithPast(logits=self.lm_head(kept))


class SideBySide(nn.Module):
    """Replaces a connector: concatenates the patches of every cell."""

    def __init__(self, patches: int) -> None:
        super().__init__()
        self.patches = patches

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Reshape (N * M * M, C) to (N, M * M * C)."""
        return features.reshape(-1, self.patches * features.shape[-1])


def cell_tiles(
    config: PreTrainedConfig,
    images: dict,
    processor: dict,
    tokenizer: PreTrainedTokenizerBase,
    window: int | None = None,
    table: int | None = None,
    windowed_layers: int = 0,
) -> TileSpec:
    """Return the cells of an image from its processor's settings.

    window, table: as in CellTiling. Raises ValueError for unsupported settings.
    """
    expect(images, do_resize=True, do_rescale=True, do_normalize=True, do_convert_rgb=True)
    vision = config.vision_config
    for name, mine in (("patch_size", vision.patch_size), ("merge_size", vision.spatial_merge_size),
                       ("temporal_patch_size", vision.temporal_patch_size)):  # fmt: skip
        if type(mine) is not int:
            raise ValueError(f"its vision_config says {name} {mine!r}, expected a number")
        expect(images, **{name: mine})
    if vision.in_channels != 3:
        raise ValueError(f"its vision_config says in_channels {vision.in_channels}, expected 3")
    least, most = pixel_bounds(images)
    side, patches = vision.patch_size * vision.spatial_merge_size, vision.spatial_merge_size**2
    if not 1 <= least <= most or most < side**2:
        raise ValueError(f"its image processor makes images of {least} to {most} pixels, with cells of {side} a side")
    token = token_of(tokenizer, getattr(tokenizer, "image_token", IMAGE_TOKEN))
    if tokenizer.convert_tokens_to_ids(token) != config.image_token_id:
        raise ValueError(f"config.json says image_token_id {config.image_token_id}, but that id is not {token}")
    tiling = CellTiling(side, vision.spatial_merge_size, least, most, token, window, table)
    return TileSpec(tiling, patches, patches, 1, windowed_layers)


def videos(
    config: PreTrainedConfig, tiling: CellTiling, images: dict, settings: dict, tokenizer: PreTrainedTokenizerBase
) -> VideoRule:
    """Return the VideoRule from the video processor's settings. With a position table, times precede moments.

    Raises ValueError.
    """
    vision, stamped = config.vision_config, tiling.table is not None
    token = written_token(tokenizer, getattr(tokenizer, "video_token", None) or VIDEO_TOKEN)
    if tokenizer.convert_tokens_to_ids(token) != config.video_token_id:
        raise ValueError(f"config.json says video_token_id {config.video_token_id}, but that id is not {token}")
    expect_frames(
        settings,
        images,
        do_normalize=True,
        patch_size=vision.patch_size,
        merge_size=vision.spatial_merge_size,
        temporal_patch_size=vision.temporal_patch_size,
    )
    least, most = frame_bounds(settings, stamped)
    if not 1 <= least <= most or most < tiling.side**2:
        raise ValueError(
            f"its video processor makes frames of {least} to {most} pixels, with cells of {tiling.side} a side"
        )
    cap = setting(settings, "max_video_tokens", VIDEO_CAP if stamped else FRAME_CAP)
    cells = FrameCells(
        tiling.side,
        vision.temporal_patch_size,
        least,
        most,
        stamped,
        token,
        cap if settings.get("cap_pixels_per_frame") else None,
        *(("<|vision_start|>", "<|vision_end|>") if stamped else ()),
    )
    return VideoRule(
        token,
        cells,
        "Qwen3VLVideoProcessor" if stamped else "Qwen2VLVideoProcessor",
        moment=cells.moment,
        stamp="<{seconds:.1f} seconds>" if stamped else None,
        tokens_per_second=getattr(vision, "tokens_per_second", None),
        **chosen_frames(settings),
    )


def frame_bounds(videos: dict, stamps: bool) -> tuple[int, int]:
    """Return the minimum and maximum pixels of a frame, or with stamps of a video. Raises ValueError if invalid."""
    size = {**(VIDEO_PIXELS if stamps else FRAME_PIXELS), **(videos["size"] if is_size(videos) else {})}
    least, most = (setting(size, name, 1) for name in ("shortest_edge", "longest_edge"))
    if stamps:
        return least, most
    return setting(videos, "min_pixels", least), setting(videos, "max_pixels", most)


def is_size(settings: dict) -> bool:
    """Return True if a processor's settings have pixel limits under "size"."""
    return isinstance(settings.get("size"), dict)


def pixel_bounds(images: dict) -> tuple[int, int]:
    """Return the minimum and maximum pixels of an image from its processor's settings. Raises ValueError."""
    size = {**PIXELS, **(images["size"] if is_size(images) else {})}
    least = setting(images, "min_pixels", setting(size, "shortest_edge", PIXELS["shortest_edge"]))
    return least, setting(images, "max_pixels", setting(size, "longest_edge", PIXELS["longest_edge"]))


def build_tower(kind: type[PreTrainedModel], config: PreTrainedConfig) -> nn.Module:
    """Build the tower without its connector, in torch's default dtype, with this package's attention."""
    tower = kind._from_config(config, attn_implementation="sdpa", dtype=torch.get_default_dtype())
    # transformers' setter would look for this name on the hub.
    tower.config._attn_implementation = attention.register_for_towers()
    tower.merger = SideBySide(config.spatial_merge_size**2)
    # Replace the convolution by a matrix: patches don't overlap, and 3D convolutions are slow (pytorch#166122).
    tower.patch_embed.proj.forward = types.MethodType(_project_patches, tower.patch_embed.proj)
    return tower


def _project_patches(self: nn.Conv3d, patches: torch.Tensor) -> torch.Tensor:
    return F.linear(patches.flatten(1), self.weight.flatten(1), self.bias)


def patches_of(config: PreTrainedConfig, pixels: torch.Tensor) -> torch.Tensor:
    """Split normalised cells (N, 3, S, S), or (N, 3, T * S, S), into patches in the processor's order.

    Returns (N * M * M, 3 * T * S / M * S / M).
    """
    n, channels, height, side = pixels.shape
    merge, frames, shown = config.spatial_merge_size, config.temporal_patch_size, height // side
    patch = side // merge
    patches = pixels.reshape(n, channels, shown, merge, patch, merge, patch).permute(0, 3, 5, 1, 2, 4, 6)
    patches = patches.reshape(n * merge**2, channels, shown, patch, patch)
    return patches.expand(-1, -1, frames, -1, -1).flatten(1)  # an image is repeated for every frame of a patch


def processed(config: PreTrainedConfig, pixels: torch.Tensor, layouts: Layouts) -> torch.Tensor:
    """Return the patches of normalised cells. config: of the complete model."""
    return patches_of(config.vision_config, pixels)


def features(tower: nn.Module, pixels: torch.Tensor, tower_inputs: dict) -> torch.Tensor:
    """Encode normalised cells (N, 3, S, S), or (N, 3, T * S, S), to (N, K, M * M * C)."""
    found = tower(patches_of(tower.config, pixels), grid_thw=None, **tower_inputs)
    deeper = getattr(found, "deepstack_features", None) or []
    return torch.stack([found.pooler_output, *deeper], 1)


def outer_inputs(
    config: PreTrainedConfig, patches: torch.Tensor, layouts: Layouts, is_media: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the arguments of transformers' forward for patches and the layouts of their images and videos.

    transformers computes the positions itself.
    """
    merge, device = config.vision_config.spatial_merge_size, is_media.device
    counts = torch.tensor([layout.num_tokens for layout in layouts])
    are_videos = torch.tensor([layout.is_video for layout in layouts])
    of_patches = are_videos.repeat_interleave(counts * merge**2).to(device)
    inputs = {"mm_token_type_ids": media_types(layouts, is_media)}
    for is_video, (pixels, grids) in enumerate(
        (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw"))
    ):
        shown = [layout for layout in layouts if layout.is_video == is_video]
        if shown:
            rows = [(one.moments, one.cells[1] * merge, one.cells[0] * merge) for one in shown]
            inputs |= {pixels: patches[of_patches == is_video], grids: torch.tensor(rows, device=device)}
    if are_videos.any() and hasattr(config.vision_config, "tokens_per_second"):
        seconds = [layout.seconds for layout in layouts if layout.is_video]
        inputs["second_per_grid_ts"] = torch.tensor(seconds, device=device)
    return inputs


def merge(connector: nn.Module, config: PreTrainedConfig, features: torch.Tensor) -> torch.Tensor:
    """Apply a merger: (N, 1, M * M * C) to (N, 1, D)."""
    patches = config.vision_config.spatial_merge_size**2
    return connector(features.reshape(-1, features.shape[-1] // patches))[:, None]


# Fields of ReadyFamily.
COMMON = {
    "vision": VISION, "trunk": TRUNK, "connector": {f"{VISION}.merger": ""}, "connect": merge,
    "patch_embedding": lambda tower: tower.patch_embed.proj, "features": features, "outer_inputs": outer_inputs,
    "processed": processed, "videos": videos, "resample": 3,  # bicubic
}  # fmt: skip
