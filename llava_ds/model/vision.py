# N images, S side of their square, C tower width, P features per image
"""The vision tower: CLIP, SigLIP or SigLIP 2 up to the selected layer, on uint8 images."""

import copy
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    PreTrainedConfig,
    Siglip2VisionConfig,
    Siglip2VisionModel,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from llava_ds.config.arguments import Arguments, ModelArguments
from llava_ds.constants import ConfigError
from llava_ds.files.model_files import is_there, library_errors, read_config, read_json, shown
from llava_ds.geometry import ImageOptions, image_options
from llava_ds.model.open.names import runs_in_tower
from llava_ds.model.projector import Projector, build_projector, pooled_patch_size

# By model_type of a vision model's own configuration.
TOWERS = {
    "clip_vision_model": (CLIPVisionConfig, CLIPVisionModel),
    "siglip_vision_model": (SiglipVisionConfig, SiglipVisionModel),
    "siglip2_vision_model": (Siglip2VisionConfig, Siglip2VisionModel),
}
# Models of images and texts, of which the vision model is used.
PAIRS = {"clip": "clip_vision_model", "siglip": "siglip_vision_model", "siglip2": "siglip2_vision_model"}


@dataclass(frozen=True)
class ImageSpec:
    """A tower's input, and its number of features.

    size: side of the square in pixels; patch_size: side of what one projected feature stands for; mean, std: per
    channel, in [0, 1]; stretch: its own processor makes an image square by stretching, not by a center crop;
    class_token: a feature of the whole image comes before those of its patches.
    """

    size: int
    patch_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    stretch: bool = False
    class_token: bool = False

    @property
    def num_tokens(self) -> int:
        """Features per image."""
        return (self.size // self.patch_size) ** 2 + self.class_token


@dataclass(frozen=True)
class TowerPlan:
    """A tower before it is built. config: of all its layers; scales: sides in pixels of S2's, rising, () without."""

    config: PreTrainedConfig
    images: ImageSpec
    select_layer: int
    scales: tuple[int, ...] = ()

    def image_options(self, args: Arguments) -> ImageOptions:
        """Image preprocessing for this tower with the given flags. Raises ConfigError for flags that don't fit it."""
        spec = self.images
        return image_options(
            args.model,
            args.data,
            spec.size,
            spec.patch_size,
            spec.mean,
            stretch=spec.stretch,
            class_token=spec.class_token,
        )

    @property
    def width(self) -> int:
        """C, numbers in a feature."""
        return self.config.hidden_size * max(1, len(self.scales))

    @property
    def layer_width(self) -> int:
        """Width of its layers."""
        return self.config.hidden_size

    @property
    def mlp_width(self) -> int:
        """Width of the MLPs in them."""
        return self.config.intermediate_size

    @property
    def num_layers(self) -> int:
        """Layers that run."""
        return num_running_layers(self.config.num_hidden_layers, self.select_layer)

    @property
    def has_class_token(self) -> bool:
        """True if the tower computes a class token, used or not."""
        return self.config.model_type == "clip_vision_model"

    @property
    def num_patches(self) -> int:
        """Patches of a tile."""
        if self.config.model_type == "siglip2_vision_model":
            return self.config.num_patches
        return (self.config.image_size // self.config.patch_size) ** 2

    @property
    def num_positions(self) -> int:
        """Positions of a tile in the tower."""
        return self.num_patches + self.has_class_token

    def runs(self, name: str) -> bool:
        """True for parameters of layers that run."""
        return runs_in_tower(name, self.num_layers)

    def build(self, mean: torch.Tensor, std: torch.Tensor) -> "VisionTower":
        """The tower, uninitialised."""
        return VisionTower(self, mean, std)

    def build_projector(self, args: ModelArguments, hidden_size: int) -> Projector:
        """The projector to a language model of this width, uninitialised. Raises ConfigError for an impossible one."""
        return build_projector(args.mm_projector_type, self.width, hidden_size)

    def patch_embedding(self, tower: nn.Module) -> nn.Module:
        """The first layer of a tower."""
        return tower.embeddings.patch_embedding


def read_tower(path: str | Path, args: ModelArguments) -> TowerPlan:
    """The plan of the tower in a folder of its own. Raises ConfigError when the folder holds none."""
    where = f"--vision_tower {path}"
    return plan_tower(read_vision_config(path), read_processor(path, where), where, args)


def plan_tower(config: PreTrainedConfig, processor: dict, where: str, args: ModelArguments) -> TowerPlan:
    """The plan of a tower from its configuration and its image processor's. Raises ConfigError that names where."""
    layers, select_layer = config.num_hidden_layers, args.mm_vision_select_layer
    if not 0 < num_running_layers(layers, select_layer) <= layers:
        raise ConfigError(
            f"--mm_vision_select_layer {select_layer}: the tower has {layers} layers, give -{layers} to {layers}"
        )
    size, patch_size = _image_size(config, where), config.patch_size
    if patch_size > size:
        raise ConfigError(f"{where}: config.json says patch_size {patch_size} and image_size {size}: copy it again")
    stretch = not processor.get("do_center_crop", config.model_type == "clip_vision_model")
    shown = processor.get("size" if stretch else "crop_size")
    shown = shown.get("height") if isinstance(shown, dict) else shown
    if shown is not None and shown != size and config.model_type != "siglip2_vision_model":
        raise ConfigError(f"{where}: its image processor makes images of {shown} pixels, but the tower takes {size}")
    class_token = args.mm_vision_select_feature == "cls_patch" and config.model_type == "clip_vision_model"
    if class_token and args.mm_projector_type == "pooler":
        raise ConfigError("--mm_projector_type pooler needs --mm_vision_select_feature patch: it pools a grid")
    scales = _scales(args)
    if scales:
        if scales[0] != size or any(scale % size for scale in scales):
            raise ConfigError(
                f"--s2_scales {','.join(map(str, scales))}: give multiples of the tower's {size} pixels, itself first"
            )
        if class_token:
            raise ConfigError("--s2 True needs --mm_vision_select_feature patch: there is one class token per tile")
        if args.mm_patch_merge_type != "flat":
            raise ConfigError("--s2 True needs --mm_patch_merge_type flat: it makes tiles of its own")
        size, patch_size = scales[-1], patch_size * (scales[-1] // scales[0])
    mean, std = (tuple(processor.get(name, [0.5] * 3)) for name in ("image_mean", "image_std"))
    patch_size = pooled_patch_size(args.mm_projector_type, patch_size)
    images = ImageSpec(size, patch_size, mean, std, stretch, class_token)
    return TowerPlan(config, images, select_layer, scales)


def _scales(args: ModelArguments) -> tuple[int, ...]:
    if not args.s2:
        return ()
    try:
        return tuple(sorted(int(scale) for scale in args.s2_scales.split(",")))
    except ValueError:
        raise ConfigError(f"--s2_scales {args.s2_scales}: give sizes in pixels, like 336,672,1008") from None


def read_vision_config(path: str | Path) -> PreTrainedConfig:
    """The configuration of a tower. Raises ConfigError when the folder holds another kind of model."""
    config = read_config(Path(path) / "config.json", f"--vision_tower {path}")
    return vision_config(config, f"--vision_tower {path}")


def vision_config(config: dict, where: str) -> PreTrainedConfig:
    """The tower's configuration from the config.json of a tower, or of a model of images and texts."""
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in PAIRS:
        kind, config = PAIRS[kind], config.get("vision_config")
        if not isinstance(config, dict):
            raise ConfigError(f"{where}: config.json says vision_config {shown(config)}, expected an object")
    if not isinstance(kind, str) or kind not in TOWERS:
        known = ", ".join([*PAIRS, *TOWERS])
        raise ConfigError(f"{where}: model_type is {shown(kind)}, expected one of {known}")
    with library_errors(where, "config.json is not what transformers expects"):
        tower = TOWERS[kind][0].from_dict({**config, "model_type": kind})
    sides = "num_patches" if kind == "siglip2_vision_model" else "image_size"
    for name in (sides, "patch_size"):
        if type(side := getattr(tower, name)) is not int:
            raise ConfigError(f"{where}: config.json says {name} {shown(side)}, expected a whole number")
    return tower


def read_processor(path: str | Path, where: str) -> dict:
    """The settings of a folder's image processor, in the file of any transformers version."""
    file, whole = Path(path) / "preprocessor_config.json", Path(path) / "processor_config.json"  # whole: transformers 5
    if not is_there(file) and is_there(whole):
        file, settings = whole, read_json(whole, where).get("image_processor", {})
    else:
        settings = read_json(file, where)
    problem = "image_processor is no object" if not isinstance(settings, dict) else _processor_problem(settings)
    if problem:
        raise ConfigError(f"{where}: {file.name} can't be used: {problem}: copy it again")
    return settings


def _processor_problem(settings: dict) -> str | None:
    for name in ("image_mean", "image_std"):
        values = settings.get(name, [0.5] * 3)
        numbers = isinstance(values, list) and len(values) == 3 and all(type(v) in (int, float) for v in values)
        if not numbers or (name == "image_std" and 0 in values):
            return f"{name} is {shown(values)}, expected three numbers" + ", none of them 0" * (name == "image_std")
    for name in ("size", "crop_size"):
        side = settings.get(name)
        if not isinstance(side, (dict, int, type(None))):
            return f"{name} is {shown(side)}, expected an object or a number"
    return None


def _image_size(config: PreTrainedConfig, where: str) -> int:
    """Side of the square in pixels; for a SigLIP 2 of any aspect ratio, the square that it was trained on."""
    if config.model_type != "siglip2_vision_model":
        return config.image_size
    side = math.isqrt(config.num_patches)
    if side**2 != config.num_patches:
        raise ConfigError(f"{where}: {config.num_patches} patches are no square, but images are made square")
    return side * config.patch_size


def num_running_layers(layers: int, select_layer: int) -> int:
    """Number of layers to run for hidden_states[select_layer] of a tower with this many."""
    return select_layer + layers + 1 if select_layer < 0 else select_layer


class VisionTower(nn.Module):
    """A tower up to the selected layer. Features are its hidden state there.

    The layers after the selected one, the final norm and the pooling head would never run, and are not built. Export
    takes their weights from the tower's folder.
    Source: LLaVA's CLIPVisionTower and CLIPVisionTowerS2, LLaVA-NeXT's SigLipVisionTower.
    """

    def __init__(self, plan: TowerPlan, mean: torch.Tensor, std: torch.Tensor) -> None:
        """mean and std: (3,) float32, made outside zero.Init, which would round them to the training dtype."""
        super().__init__()
        self.plan = plan
        config = copy.deepcopy(plan.config)
        config.num_hidden_layers = plan.num_layers
        config.vision_use_head = False
        self.tower = TOWERS[config.model_type][1](config)
        self.tower.post_layernorm = nn.Identity()  # the last hidden state is then the selected one
        self.register_buffer("mean", mean.view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", std.view(1, 3, 1, 1), persistent=False)

    def forward(self, pixel_values: torch.Tensor, tower_inputs: dict | None = None) -> torch.Tensor:
        """(N, 3, S, S) uint8 to (N, P, C). tower_inputs: Batch's, of which it takes none."""
        pixels = (pixel_values.float() / 255 - self.mean) / self.std
        pixels = pixels.to(self.tower.embeddings.patch_embedding.weight.dtype)
        return multiscale(self._features, pixels, self.plan.scales) if self.plan.scales else self._features(pixels)

    def _features(self, pixels: torch.Tensor) -> torch.Tensor:
        if self.plan.config.model_type == "siglip2_vision_model":
            patches, shapes = _patches(pixels, self.plan.config.patch_size)
            return self.tower(patches, pixel_attention_mask=None, spatial_shapes=shapes).last_hidden_state
        features = self.tower(pixels).last_hidden_state
        drop_class_token = self.plan.has_class_token and not self.plan.images.class_token
        return features[:, 1:] if drop_class_token else features


def _patches(pixels: torch.Tensor, patch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(N, 3, S, S) to (N, P, 3 * patch_size**2), and (N, 2): patches down and across. Source: Siglip2ImageProcessor."""
    n, channels, height, width = pixels.shape
    down, across = height // patch_size, width // patch_size
    cut = pixels.reshape(n, channels, down, patch_size, across, patch_size).permute(0, 2, 4, 3, 5, 1)
    # On the CPU, where the model reads it without waiting for the device.
    return cut.reshape(n, down * across, -1), torch.tensor([[down, across]] * n)


def multiscale(features_of, pixels: torch.Tensor, scales: tuple[int, ...]) -> torch.Tensor:
    """S2: the image at every scale, cut into tiles of the first one's size, its features averaged down to the first
    scale's grid and laid beside each other.

    features_of: (N, 3, S, S) to (N, P, C) at the first scale; pixels (N, 3, L, L) at the last.
    Returns (N, P, C * scales). Source: S2 (arXiv 2403.13043), s2wrapper's forward as LLaVA calls it.
    """
    n, base = len(pixels), scales[0]
    beside = []
    for scale in scales:
        times = scale // base
        shown = pixels
        if scale != pixels.shape[-1]:
            shown = F.interpolate(pixels.float(), size=(scale, scale), mode="bicubic").to(pixels.dtype)
        tiles = shown.reshape(n, 3, times, base, times, base).permute(2, 4, 0, 1, 3, 5).reshape(-1, 3, base, base)
        features = features_of(tiles)  # (times * times * N, P, C)
        side = math.isqrt(features.shape[1])
        grid = features.reshape(times, times, n, side, side, -1).permute(2, 5, 0, 3, 1, 4)
        grid = grid.reshape(n, -1, times * side, times * side)  # (N, C, rows, columns)
        if times > 1:
            grid = F.interpolate(grid.float(), size=(side, side), mode="area").to(features.dtype)
        beside.append(grid)
    return torch.cat(beside, dim=1).flatten(2).transpose(1, 2)
