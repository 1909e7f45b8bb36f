# N pictures, C tower width, P patches per picture
"""The vision tower: a frozen CLIP that stops at the selected layer and takes uint8 pictures."""

import copy
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import CLIPVisionConfig, CLIPVisionModel

from llava_ds import geometry
from llava_ds.constants import ConfigError


@dataclass(frozen=True)
class ImageSpec:
    """What a tower wants to be shown: side of the square in pixels, and mean and deviation per channel in [0, 1]."""

    size: int
    patch_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def num_tokens(self) -> int:
        """Features per picture."""
        return geometry.num_image_tokens(self.size, self.patch_size)


def read_vision_config(path: str | Path) -> CLIPVisionConfig:
    """The configuration of a CLIP tower. Raises ConfigError when the folder holds another kind of model."""
    file = Path(path) / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"--vision_tower {path}: config.json can't be read ({error})") from error
    kind = config.get("model_type")
    if kind not in ("clip", "clip_vision_model"):
        raise ConfigError(f"--vision_tower {path}: model_type is {kind!r}, expected 'clip' or 'clip_vision_model'")
    return CLIPVisionConfig.from_dict(config["vision_config"] if kind == "clip" else config)


def read_image_spec(path: str | Path) -> ImageSpec:
    """How pictures are prepared for the tower in a folder, from its preprocessor_config.json and config.json."""
    vision = read_vision_config(path)
    file = Path(path) / "preprocessor_config.json"
    try:
        processor = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"--vision_tower {path}: preprocessor_config.json can't be read ({error})") from error
    crop = processor.get("crop_size", vision.image_size)
    size = crop["height"] if isinstance(crop, dict) else crop
    if size != vision.image_size:
        raise ConfigError(
            f"--vision_tower {path}: preprocessor_config.json crops to {size} pixels, "
            f"but the tower takes {vision.image_size}"
        )
    return ImageSpec(size, vision.patch_size, tuple(processor["image_mean"]), tuple(processor["image_std"]))


class VisionTower(nn.Module):
    """CLIP up to the selected layer. Features are its hidden state there, without the class token.

    The layers behind the selected one are not built: they would never run, and a frozen layer that is not there costs
    nothing. Export takes their weights from the tower's own folder.
    """

    def __init__(self, config: CLIPVisionConfig, select_layer: int, mean: torch.Tensor, std: torch.Tensor) -> None:
        """mean and std: (3,) float32, made outside zero.Init, which would round them to the training dtype."""
        super().__init__()
        self.clip = CLIPVisionModel(truncated(config, select_layer))
        self.register_buffer("mean", mean.view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", std.view(1, 3, 1, 1), persistent=False)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """(N, 3, H, W) uint8 to (N, P, C)."""
        pixels = (pixel_values.float() / 255 - self.mean) / self.std
        dtype = self.clip.embeddings.patch_embedding.weight.dtype
        # The last hidden state before the tower's final norm: CLIP's last_hidden_state.
        return self.clip(pixels.to(dtype)).last_hidden_state[:, 1:]


def truncated(config: CLIPVisionConfig, select_layer: int) -> CLIPVisionConfig:
    """The configuration of a tower whose last layer gives hidden_states[select_layer] of the whole tower."""
    layers = config.num_hidden_layers
    kept = select_layer + layers + 1 if select_layer < 0 else select_layer
    if not 0 < kept <= layers:
        raise ConfigError(
            f"--mm_vision_select_layer {select_layer}: the tower has {layers} layers, give -{layers} to {layers}"
        )
    short = copy.deepcopy(config)
    short.num_hidden_layers = kept
    return short
