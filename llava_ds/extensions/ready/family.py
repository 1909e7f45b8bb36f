# N tiles, S side of a tile, C width of the tower, D width of the language model, P features of a tile
"""What a family of ready vision-language models says of itself: data, and a few functions of its parts."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModel,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from llava_ds.boxes import THOUSANDTHS, BoxFormat
from llava_ds.extensions.ready.ready_videos import VideoRule
from llava_ds.layouts import MediaLayout
from llava_ds.tilings import Tiling

VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
Layouts = Sequence[MediaLayout]  # of the images and videos of a batch, in order


@dataclass(frozen=True)
class TileSpec:
    """What an image becomes. tiling: into which tiles; patches: of a tile; positions: of the tower's sequence for it;
    features, P: of the language model's for it, a square number; windowed_layers: layers of the tower whose attention
    sees a window, where tiles are the cells of an image."""

    tiling: Tiling
    patches: int
    positions: int
    features: int
    windowed_layers: int = 0


def build_tower(config: PreTrainedConfig) -> nn.Module:
    """The vision model of transformers' class, in torch's default dtype."""
    return AutoModel.from_config(config, attn_implementation="sdpa", dtype=torch.get_default_dtype())


def shrink(config: PreTrainedConfig) -> None:
    """Make the vision model of a whole configuration small; its language model is small already."""
    for name, value in VISION.items():
        setattr(config.vision_config, name, value)


def prompt_mask(
    config: PreTrainedConfig, embeds: torch.Tensor, mask: torch.Tensor, is_image: torch.Tensor
) -> torch.Tensor:
    """The mask of tokens (B, L), from which transformers' language model makes a causal one."""
    return mask


def tower_widths(config: PreTrainedConfig) -> tuple[int, int]:
    """Width of a vision model's layers, and of their MLPs."""
    return config.hidden_size, config.intermediate_size


def no_videos(*_: object) -> VideoRule:
    """What a family without videos says of them."""
    raise ValueError("its processor has none")


@dataclass(frozen=True)
class ReadyFamily:
    """A family of models of transformers' AutoModelForImageTextToText.

    name: for messages; model_types: of config.json; vision, trunk: parts of transformers' class, by name; connector:
    the same of the modules that make up the connector, and the beginning of their names in it; tiles: from the whole
    configuration, the image processor's settings, the whole processor's and the tokenizer, or raise ValueError that
    says why such a model can't be trained; build_connector: from the whole configuration;
    features: (N, 3, S, S) normalised pixels, and Batch.tower, through the vision model to what connect takes;
    connect: those through the connector to (N, P, D), or (N, P, K * D) where K - 1 further features are added behind
    the language model's first layers; patch_embedding: the vision model's first layer; processed: from the whole
    configuration, normalised pixels and the layouts of their images, the pixels as the family's image processor gives
    them, without padding; outer_inputs: the whole configuration, these pixels, the layouts of their images, and (B, T)
    bool, True at features, to the arguments of transformers' forward; resample: Pillow's number of the filter, where
    its files don't say it.

    build_tower: from the vision model's configuration; text_models: classes of language models for which transformers
    has no causal language model, or none that keeps samples apart; has_image_blocks: True for a whole configuration
    with which tokens of one image see each other (ImageBlocks), and blocks_need_windows: only in layers with a window;
    casts_pixels: False if its vision model computes with pixels in fp32 before its first layer;
    videos: from the whole configuration, the tiling, the image processor's settings, the video processor's and the
    tokenizer, or raise ValueError that says why its videos can't be read;
    beside: parts that no image needs, by the beginnings of their names, which are exported as they are;
    prompt_mask: the attention_mask of transformers' language model for prompts; is_flat: True if config.json may hold
    the language model's settings among its own; shrink, prompt_mask, tower_widths: as these functions do; boxes: how
    its models were trained to write boxes and points.
    """

    name: str
    model_types: tuple[str, ...]
    vision: str
    connector: Mapping[str, str]
    trunk: str
    tiles: Callable[[PreTrainedConfig, dict, dict, PreTrainedTokenizerBase], TileSpec]
    build_connector: Callable[[PreTrainedConfig], nn.Module]
    features: Callable[[nn.Module, torch.Tensor, dict], torch.Tensor]
    connect: Callable[[nn.Module, PreTrainedConfig, torch.Tensor], torch.Tensor]
    patch_embedding: Callable[[nn.Module], nn.Module]
    outer_inputs: Callable[[PreTrainedConfig, torch.Tensor, Layouts, torch.Tensor], dict[str, torch.Tensor]]
    resample: int
    processed: Callable[[PreTrainedConfig, torch.Tensor, Layouts], torch.Tensor] = lambda config, pixels, layouts: (
        pixels
    )
    build_tower: Callable[[PreTrainedConfig], nn.Module] = build_tower
    text_models: tuple[type[PreTrainedModel], ...] = ()
    has_image_blocks: Callable[[PreTrainedConfig], bool] = lambda config: False
    blocks_need_windows: bool = False
    videos: Callable[[PreTrainedConfig, Tiling, dict, dict, PreTrainedTokenizerBase], VideoRule] = no_videos
    casts_pixels: bool = True
    beside: tuple[str, ...] = ()
    prompt_mask: Callable[[PreTrainedConfig, torch.Tensor, torch.Tensor, torch.Tensor], object] = prompt_mask
    is_flat: bool = False
    shrink: Callable[[PreTrainedConfig], None] = shrink
    tower_widths: Callable[[PreTrainedConfig], tuple[int, int]] = tower_widths
    boxes: BoxFormat = THOUSANDTHS


@dataclass(frozen=True)
class ReadyModel:
    """A folder's family, and the configuration of the whole model."""

    family: ReadyFamily
    config: PreTrainedConfig

    def outer_class(self) -> type[PreTrainedModel]:
        """Return transformers' class of the whole model."""
        return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(self.config)]


def expect(settings: dict, **values: object) -> None:
    """Raise ValueError for a setting of a processor that is there and not as expected."""
    for name, value in values.items():
        found = settings.get(name)
        if found is not None and found != value:
            raise ValueError(f"its processor says {name} {found!r}, expected {value!r}")


def setting(settings: dict, name: str, default: int) -> int:
    """A setting of a processor, or its default where it has none. Raises ValueError for one of another type."""
    value = settings.get(name)
    if value is not None and type(value) is not type(default):
        raise ValueError(f"its processor says {name} {value!r}, expected a value like {default!r}")
    return default if value is None else value


def side_of(settings: dict, name: str, *keys: str) -> int:
    """A side in pixels among a processor's settings, the same under all keys of `name`. Raises ValueError."""
    value = settings.get(name)
    found = [value.get(key) for key in keys] if isinstance(value, dict) and set(value) == set(keys) else [None]
    if len(set(found)) != 1 or type(found[0]) is not int or not 1 <= found[0] <= 2**14:
        raise ValueError(f"its processor says {name} {value!r}, expected {', '.join(keys)}: one number of pixels")
    return found[0]


def token_of(tokenizer: PreTrainedTokenizerBase, token: object) -> str:
    """The token. Raises ValueError if the tokenizer does not have it."""
    if not isinstance(token, str) or token not in tokenizer.get_vocab():
        raise ValueError(f"its tokenizer has no token {token!r}, which its processor writes around images")
    return token


def expect_frames(videos: dict, images: dict, **values: object) -> None:
    """Raise ValueError for settings of a video processor that make other pixels of a frame than images have."""
    expect(
        videos,
        **dict.fromkeys(("do_resize", "do_rescale", "do_convert_rgb"), True),
        **{name: images[name] for name in ("image_mean", "image_std", "resample") if images.get(name) is not None},
        **values,
    )


def written_token(tokenizer: PreTrainedTokenizerBase, token: object) -> str:
    """A token that the chat template writes for a video. Raises ValueError."""
    if token_of(tokenizer, token) not in str(tokenizer.chat_template):
        raise ValueError(f"its chat template writes no {token} for one")
    return token


def chosen_frames(videos: dict) -> dict[str, float | None]:
    """The choice of frames that a video processor's settings say, as a VideoRule has it. Raises ValueError."""
    counts = {"most_frames": "max_frames", "num_frames": "num_frames"}
    return {"fps": positive(videos, "fps"), **{field: whole(videos, name) for field, name in counts.items()}}


def positive(settings: dict, name: str) -> float | None:
    """A number of a processor's settings, None where there is none. Raises ValueError for one below 1."""
    value = settings.get(name)
    if value is not None and not (type(value) in (int, float) and 1 <= value < math.inf):
        raise ValueError(f"its processor says {name} {value!r}, expected a number of 1 or more")
    return value


def whole(settings: dict, name: str) -> int | None:
    """The same of a whole number."""
    value = positive(settings, name)
    if value is not None and value != int(value):
        raise ValueError(f"its processor says {name} {value!r}, expected a whole number")
    return None if value is None else int(value)


def media_ids(config: PreTrainedConfig, layouts: Layouts) -> torch.Tensor:
    """The id of every feature of images and videos, (M,); frames of models without an id for videos are images."""
    video_id = getattr(config, "video_token_id", None)
    ids = torch.tensor([config.image_token_id, config.image_token_id if video_id is None else video_id])
    return ids[_are_videos(layouts)]


def media_types(layouts: Layouts, is_media: torch.Tensor) -> torch.Tensor:
    """transformers' mm_token_type_ids (B, T): 1 at features of images, 2 at those of videos. is_media (B, T) bool."""
    types = torch.zeros_like(is_media, dtype=torch.int64)
    return types.masked_scatter(is_media, _are_videos(layouts).to(is_media.device) + 1)


def _are_videos(layouts: Layouts) -> torch.Tensor:
    """(M,) int64: 1 at features of videos."""
    counts = torch.tensor([layout.num_tokens for layout in layouts], dtype=torch.int64)
    return torch.tensor([layout.is_video for layout in layouts], dtype=torch.int64).repeat_interleave(counts)
