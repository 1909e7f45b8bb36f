# N tiles, S side of a tile, C width of the tower, D width of the language model, P features of a tile
"""Describe a family of ready vision-language models by data and a few functions."""

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
Layouts = Sequence[MediaLayout]  # for a batch's images and videos, in order


@dataclass(frozen=True)
class TileSpec:
    """The tiles of an image.

    tiling: how images are cut into tiles. Per tile, patches: number of patches; positions: tower sequence length;
    features (P): number of tokens in the language model, a square number. windowed_layers: number of tower layers with
    window attention, if tiles are cells.
    """

    tiling: Tiling
    patches: int
    positions: int
    features: int
    windowed_layers: int = 0


def build_tower(config: PreTrainedConfig) -> nn.Module:
    """Build the vision model of transformers' class, in torch's default dtype."""
    return AutoModel.from_config(config, attn_implementation="sdpa", dtype=torch.get_default_dtype())


def shrink(config: PreTrainedConfig) -> None:
    """Shrink the vision model's settings in a complete configuration whose language model is small already."""
    for name, value in VISION.items():
        setattr(config.vision_config, name, value)


def prompt_mask(
    config: PreTrainedConfig, embeds: torch.Tensor, mask: torch.Tensor, is_image: torch.Tensor
) -> torch.Tensor:
    """Return the padding mask (B, L) that transformers' language model extends to a causal mask."""
    return mask


def tower_widths(config: PreTrainedConfig) -> tuple[int, int]:
    """Return the hidden width and the MLP width of a vision model's layers."""
    return config.hidden_size, config.intermediate_size


def no_videos(*_: object) -> VideoRule:
    """Raise ValueError, because the family doesn't support videos."""
    raise ValueError("its processor has none")


@dataclass(frozen=True)
class ReadyFamily:
    """A family of models of transformers' AutoModelForImageTextToText.

    name: used in messages. model_types: values in config.json. vision, trunk: names of the vision model and the
    language model in transformers' class. connector: maps names of connector modules in that class to name prefixes in
    this project. tiles: returns a TileSpec from the complete configuration, the settings of image processor and
    processor, and the tokenizer; raises ValueError if such a model can't be trained. build_connector: takes the
    complete configuration. features: maps vision model, normalised pixels (N, 3, S, S) and Batch.tower to the
    connector's input. connect: applies the connector and returns (N, P, D), or (N, P, K * D) if the language model's
    first K - 1 layers add features, too. patch_embedding: returns the vision model's first layer. processed: converts
    normalised pixels, given the complete configuration and image layouts, to the unpadded output of the family's image
    processor. outer_inputs: returns the arguments of transformers' forward from the complete configuration, such
    pixels, layouts, and a mask (B, T) of feature positions. resample: Pillow's filter number, if the folder's files
    have none. build_tower: takes the vision model's configuration. text_models: language model classes missing from
    transformers, or whose versions there mix packed samples. has_image_blocks: returns True for a complete
    configuration in which tokens of one image attend to each other (ImageBlocks). blocks_need_windows: True if they do
    so only in layers with a window. fed_layers: returns K - 1 from the complete configuration. casts_pixels: False if
    the vision model needs fp32 pixels. videos: returns a VideoRule from the complete configuration, the tiling, the
    settings of image and video processor, and the tokenizer; raises ValueError if videos can't be read. beside:
    prefixes of parts that images don't use, exported unchanged. is_flat: True if config.json may have the language
    model's settings at its top level. shrink, prompt_mask, tower_widths: see the functions with these names. boxes: the
    format of boxes and points that the family was trained with.
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
    fed_layers: Callable[[PreTrainedConfig], int] = lambda config: 0
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
    """The family of a model folder, and the configuration of the complete model."""

    family: ReadyFamily
    config: PreTrainedConfig

    def outer_class(self) -> type[PreTrainedModel]:
        """Return transformers' class of the complete model."""
        return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(self.config)]


def expect(settings: dict, **values: object) -> None:
    """Raise ValueError if one of the settings is present with a value other than the expected one."""
    for name, value in values.items():
        found = settings.get(name)
        if found is not None and found != value:
            raise ValueError(f"its processor says {name} {found!r}, expected {value!r}")


def setting(settings: dict, name: str, default: int) -> int:
    """Return a processor's setting, or the default if it is missing. Raises ValueError for another type."""
    value = settings.get(name)
    if value is not None and type(value) is not type(default):
        raise ValueError(f"its processor says {name} {value!r}, expected a value like {default!r}")
    return default if value is None else value


def side_of(settings: dict, name: str, *keys: str) -> int:
    """Return settings[name] in pixels if it has the same value under all keys. Raises ValueError otherwise."""
    value = settings.get(name)
    found = [value.get(key) for key in keys] if isinstance(value, dict) and set(value) == set(keys) else [None]
    if len(set(found)) != 1 or type(found[0]) is not int or not 1 <= found[0] <= 2**14:
        raise ValueError(f"its processor says {name} {value!r}, expected {', '.join(keys)}: one number of pixels")
    return found[0]


def token_of(tokenizer: PreTrainedTokenizerBase, token: object) -> str:
    """Return a token from a configuration. Raises ValueError if the tokenizer lacks it."""
    if not isinstance(token, str) or token not in tokenizer.get_vocab():
        raise ValueError(f"its tokenizer has no token {token!r}, but its processor writes it")
    return token


def expect_frames(videos: dict, images: dict, **values: object) -> None:
    """Raise ValueError if the video processor's settings prepare frames differently from images."""
    expect(
        videos,
        **dict.fromkeys(("do_resize", "do_rescale", "do_convert_rgb"), True),
        **{name: images[name] for name in ("image_mean", "image_std", "resample") if images.get(name) is not None},
        **values,
    )


def written_token(tokenizer: PreTrainedTokenizerBase, token: object) -> str:
    """Return a video token. Raises ValueError if the tokenizer lacks it, or the chat template doesn't write it."""
    if token_of(tokenizer, token) not in str(tokenizer.chat_template):
        raise ValueError(f"its chat template writes no {token} for one")
    return token


def chosen_frames(videos: dict) -> dict[str, float | None]:
    """Return how a video processor's settings choose frames, as VideoRule fields. Raises ValueError if invalid."""
    counts = {"most_frames": "max_frames", "num_frames": "num_frames"}
    return {"fps": positive(videos, "fps"), **{field: whole(videos, name) for field, name in counts.items()}}


def positive(settings: dict, name: str) -> float | None:
    """Return a number in a processor's settings; None if it is missing. Raises ValueError for one below 1."""
    value = settings.get(name)
    if value is not None and not (type(value) in (int, float) and 1 <= value < math.inf):
        raise ValueError(f"its processor says {name} {value!r}, expected a number of 1 or more")
    return value


def whole(settings: dict, name: str) -> int | None:
    """Return a whole number in a processor's settings; None if missing. Raises ValueError for any other value."""
    value = positive(settings, name)
    if value is not None and value != int(value):
        raise ValueError(f"its processor says {name} {value!r}, expected a whole number")
    return None if value is None else int(value)


def media_ids(config: PreTrainedConfig, layouts: Layouts) -> torch.Tensor:
    """Return the token ids (M,) of all image and video features.

    In models without a video token, frames use the image token.
    """
    video_id = getattr(config, "video_token_id", None)
    ids = torch.tensor([config.image_token_id, config.image_token_id if video_id is None else video_id])
    return ids[_are_videos(layouts)]


def media_types(layouts: Layouts, is_media: torch.Tensor) -> torch.Tensor:
    """Return transformers' mm_token_type_ids (B, T): 1 at image features, 2 at video features. is_media (B, T) bool."""
    types = torch.zeros_like(is_media, dtype=torch.int64)
    return types.masked_scatter(is_media, _are_videos(layouts).to(is_media.device) + 1)


def _are_videos(layouts: Layouts) -> torch.Tensor:
    """Return (M,) int64: 1 at features of videos, 0 at features of images."""
    counts = torch.tensor([layout.num_tokens for layout in layouts], dtype=torch.int64)
    return torch.tensor([layout.is_video for layout in layouts], dtype=torch.int64).repeat_interleave(counts)
