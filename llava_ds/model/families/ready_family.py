# N tiles, S side of a tile, C width of the tower, D width of the language model, P features of a tile
"""What a family of ready vision-language models says of itself: data, and a few functions of its parts."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from llava_ds.tilings import Tiling


@dataclass(frozen=True)
class TileSpec:
    """What an image becomes. tiling: into which tiles; patches: of a tile; positions: of the tower's sequence for it;
    features, P: of the language model's for it, a square number."""

    tiling: Tiling
    patches: int
    positions: int
    features: int


@dataclass(frozen=True)
class ReadyFamily:
    """A family of models of transformers' AutoModelForImageTextToText.

    name: for messages; model_types: of config.json; vision, connector, trunk: parts of transformers' class, by name;
    tiles: from the whole configuration, the image processor's settings, the whole processor's, and the tokenizer, or
    raise ValueError that says why such a model can't be trained; build_connector: from the whole configuration;
    features: (N, 3, S, S) normalised pixels through the vision model to what connect takes; connect: those through the
    connector to (N, P, D); patch_embedding: the vision model's first layer; outer_pixels: pixels of one sample to the
    arguments of transformers' forward; resample: Pillow's number of the filter, where its files don't say it.
    """

    name: str
    model_types: tuple[str, ...]
    vision: str
    connector: str
    trunk: str
    tiles: Callable[[PreTrainedConfig, dict, dict, PreTrainedTokenizerBase], TileSpec]
    build_connector: Callable[[PreTrainedConfig], nn.Module]
    features: Callable[[nn.Module, torch.Tensor], torch.Tensor]
    connect: Callable[[nn.Module, PreTrainedConfig, torch.Tensor], torch.Tensor]
    patch_embedding: Callable[[nn.Module], nn.Module]
    outer_pixels: Callable[[torch.Tensor], dict[str, torch.Tensor]]
    resample: int


def expect(settings: dict, **values: object) -> None:
    """Raise ValueError for a setting of an image processor that is there and not as expected."""
    for name, value in values.items():
        found = settings.get(name)
        if found is not None and found != value:
            raise ValueError(f"its image processor says {name} {found!r}, expected {value!r}")


def setting(settings: dict, name: str, default: int) -> int:
    """A setting of an image processor, or its default where it has none. Raises ValueError for one of another type."""
    value = settings.get(name)
    if value is not None and type(value) is not type(default):
        raise ValueError(f"its image processor says {name} {value!r}, expected a value like {default!r}")
    return default if value is None else value


def side_of(settings: dict, name: str, *keys: str) -> int:
    """A side in pixels among an image processor's settings, the same under all keys of `name`. Raises ValueError."""
    value = settings.get(name)
    found = [value.get(key) for key in keys] if isinstance(value, dict) and set(value) == set(keys) else [None]
    if len(set(found)) != 1 or type(found[0]) is not int or not 1 <= found[0] <= 2**14:
        raise ValueError(f"its image processor says {name} {value!r}, expected {', '.join(keys)}: one number of pixels")
    return found[0]


def token_of(tokenizer: PreTrainedTokenizerBase, token: object) -> str:
    """The token. Raises ValueError if the tokenizer does not have it."""
    if not isinstance(token, str) or token not in tokenizer.get_vocab():
        raise ValueError(f"its tokenizer has no token {token!r}, which its processor writes around images")
    return token
