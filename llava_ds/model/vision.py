# N images, S side of their square, C tower width, P features per image
"""The vision tower up to the selected layer, on uint8 images. families/towers.py lists the families."""

import copy
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig

from llava_ds.batch import Inputs
from llava_ds.config.arguments import Arguments, ModelArguments
from llava_ds.extensions.architecture import Architecture
from llava_ds.geometry import ImageOptions, ImageSpec, image_options
from llava_ds.model import attention
from llava_ds.model.families.towers import tower_family
from llava_ds.model.open.names import SECOND_TOWER, runs_in_tower
from llava_ds.model.projector import Projector, build_projector

if TYPE_CHECKING:
    from llava_ds.model.open.any_shape import FlexTiling


@dataclass(frozen=True)
class TowerPlan:
    """Plan of a tower.

    config: the tower's configuration with all its layers; scales: S2's sides in pixels, ascending, () without S2;
    stride: side, in patches, of the square that becomes one projected feature; cells: tiling of images of any shape,
    None for square images; second: a second tower, whose features are appended to the first tower's.
    """

    config: PreTrainedConfig
    images: ImageSpec
    select_layer: int
    scales: tuple[int, ...] = ()
    stride: int = 1
    cells: "FlexTiling | None" = None
    second: "TowerPlan | None" = None
    architecture: ClassVar[Architecture | None] = None
    has_image_blocks: ClassVar[bool] = False  # True if tokens of an image see each other in the LLM
    blocks_need_windows: ClassVar[bool] = False  # True if they do so only in layers with a window
    fed_layers: ClassVar[int] = 0  # number of first LLM layers after which more features are added

    def image_options(self, args: Arguments) -> ImageOptions:
        """Return the image preprocessing for this tower. Raises ConfigError for flags that it doesn't support."""
        if self.cells is not None:
            from llava_ds.model.open.any_shape import native_options

            return native_options(args, self.images, self.cells)
        return image_options(args.model, args.data, self.images)

    @property
    def width(self) -> int:
        """C, the width of a feature, over all scales and towers."""
        return self.config.hidden_size * max(1, len(self.scales)) + (self.second.width if self.second else 0)

    @property
    def layer_width(self) -> int:
        """Width of the tower's layers."""
        return self.config.hidden_size

    @property
    def mlp_width(self) -> int:
        """Width of the MLPs in the tower's layers."""
        return tower_family(self.config).mlp_width(self.config)

    @property
    def num_layers(self) -> int:
        """Number of layers that run."""
        return num_running_layers(self.config.num_hidden_layers, self.select_layer)

    @property
    def num_first_tokens(self) -> int:
        """Number of positions before the patches: class token and registers, even if they are not used as features."""
        return tower_family(self.config).first_tokens(self.config)

    @property
    def patch_size(self) -> int:
        """Side of a patch in pixels."""
        return side_of(self.config.patch_size)

    @property
    def num_patches(self) -> int:
        """Number of patches per tile."""
        side = self.scales[0] if self.scales else self.images.size
        return (side // self.patch_size) ** 2

    @property
    def num_positions(self) -> int:
        """Number of positions per tile in the tower."""
        return self.num_patches + self.num_first_tokens

    @property
    def windowed_layers(self) -> int:
        """Number of layers whose attention is limited to a window; 0 for these towers."""
        return 0

    @property
    def patches_per_feature(self) -> int:
        """Number of patches per projected feature."""
        return self.stride**2

    def runs(self, name: str) -> bool:
        """True if the parameter is used when the tower runs up to the selected layer."""
        if name.startswith(SECOND_TOWER):
            return self.second is not None and self.second.runs(name.removeprefix(SECOND_TOWER))
        return runs_in_tower(name, self.num_layers)

    def build(self, mean: torch.Tensor, std: torch.Tensor) -> "VisionTower":
        """Build the tower, uninitialised."""
        return VisionTower(self, mean, std)

    def build_projector(self, args: ModelArguments, hidden_size: int) -> Projector:
        """Build the projector to a language model of this width, uninitialised. Raises ConfigError if impossible."""
        return build_projector(args.mm_projector_type, self.width, hidden_size)

    def patch_embedding(self, tower: nn.Module) -> nn.Module:
        """Return a tower's patch embedding."""
        return tower.get_submodule(tower_family(self.config).patch_embedding)


def side_of(sides: object) -> object:
    """Return the side of a square given as a number or as two equal numbers; anything else unchanged."""
    is_pair = isinstance(sides, (list, tuple)) and len(sides) == 2 and sides[0] == sides[1]
    return sides[0] if is_pair else sides


def num_running_layers(layers: int, select_layer: int) -> int:
    """Return the number of tower layers to run for hidden_states[select_layer]."""
    return select_layer + layers + 1 if select_layer < 0 else select_layer


class VisionTower(nn.Module):
    """A tower up to the selected layer, whose hidden state is the features.

    Later layers, the final norm and the pooling head would never run, so they are not built. Export copies their
    weights from the tower's folder.
    Source: LLaVA's CLIPVisionTower and CLIPVisionTowerS2, LLaVA-NeXT's SigLipVisionTower.
    """

    def __init__(self, plan: TowerPlan, mean: torch.Tensor, std: torch.Tensor) -> None:
        """mean, std: (3,) float32. Create them outside zero.Init: it rounds new tensors to the training dtype."""
        super().__init__()
        self.plan = plan
        config = copy.deepcopy(plan.config)
        family = tower_family(config)
        for name, value in {**family.settings, "num_hidden_layers": plan.num_layers}.items():
            setattr(config, name, value)
        self.tower = family.model(config)
        setattr(self.tower, family.norm, nn.Identity())  # so that last_hidden_state is the selected one
        if hasattr(self.tower.embeddings, "mask_token"):
            self.tower.embeddings.mask_token = None  # only for pretraining
        if plan.cells is not None:
            # Don't use transformers' setter: it would look for this name on the hub.
            self.tower.config._attn_implementation = attention.register_for_flex()
        self.register_buffer("mean", mean.view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", std.view(1, 3, 1, 1), persistent=False)
        if plan.second is not None:
            # Use torch.from_numpy, because zero.Init rounds the results of torch.tensor. The second tower is a child of
            # the first, because weights of all towers are looked up in the first.
            colours = (plan.second.images.mean, plan.second.images.std)
            own = (torch.from_numpy(np.array(each, np.float32)).to(mean.device) for each in colours)
            self.tower.second = VisionTower(plan.second, *own)

    def forward(self, pixel_values: torch.Tensor, tower_inputs: Inputs | None = None) -> torch.Tensor:
        """Compute features (N, P, C) of images (N, 3, S, S) uint8. tower_inputs: Batch.tower, for any-shape images."""
        return self.features((pixel_values.float() / 255 - self.mean) / self.std, tower_inputs)

    def prompt_mask(
        self, config: PreTrainedConfig, embeds: torch.Tensor, mask: torch.Tensor, is_image: torch.Tensor
    ) -> torch.Tensor:
        """Return the language model's attention mask for prompts. mask (B, L): 0 at padding; is_image (B, L) bool."""
        return mask

    def features(self, pixels: torch.Tensor, tower_inputs: Inputs | None = None) -> torch.Tensor:
        """Compute features (N, P, C) of normalised images (N, 3, S, S)."""
        beside = []
        if self.plan.second is not None:
            second = self.tower.second
            beside.append(second.features((pixels * self.std + self.mean - second.mean) / second.std))
        pixels = pixels.to(self.plan.patch_embedding(self.tower).weight.dtype)
        if self.plan.cells is not None:
            from llava_ds.model.flex_tower import flex_features

            return flex_features(self.tower, pixels, tower_inputs)
        own = multiscale(self._features, pixels, self.plan.scales) if self.plan.scales else self._features(pixels)
        return torch.cat([own, *beside], 2) if beside else own

    def _features(self, pixels: torch.Tensor) -> torch.Tensor:
        if self.plan.config.model_type == "siglip2_vision_model":
            from llava_ds.model.flex_tower import patches_of

            patches = patches_of(pixels, self.plan.patch_size)
            # Keep this tensor on the CPU, where the model can read it without waiting for the device.
            shapes = torch.tensor([[math.isqrt(patches.shape[1])] * 2] * len(pixels))
            return self.tower(patches, pixel_attention_mask=None, spatial_shapes=shapes).last_hidden_state
        features = self.tower(pixels).last_hidden_state  # class token, registers, patches
        patches = features[:, self.plan.num_first_tokens :]
        return torch.cat([features[:, :1], patches], 1) if self.plan.images.class_token else patches


def multiscale(features_of, pixels: torch.Tensor, scales: tuple[int, ...]) -> torch.Tensor:
    """Compute S2's features: scale the image, cut every scale into tiles of the first scale's size, average features
    down to the first scale's grid, and concatenate the features of all scales.

    features_of: maps (N, 3, S, S) to (N, P, C) at the first scale; pixels (N, 3, L, L): images at the last scale.
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
