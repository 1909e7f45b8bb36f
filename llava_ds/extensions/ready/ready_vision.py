# N tiles, S side of a tile, C width of the tower, D width of the language model, P features of a tile
"""Use a ready model's vision model and connector as tower and projector."""

import copy
import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments
from llava_ds.config.bounds import range_of_values
from llava_ds.constants import ConfigError
from llava_ds.extensions.ready.family import ReadyModel, TileSpec
from llava_ds.extensions.ready.ready_images import ReadyImageOptions
from llava_ds.extensions.ready.ready_tilings import BudgetTiling, CellTiling
from llava_ds.extensions.ready.ready_videos import VideoRule
from llava_ds.geometry import PIXEL_FLAGS, ImageSpec
from llava_ds.tilings import Tiling

VALUE_RANGE = "llava_ds_image_value_range"  # key of --image_value_range in an export's image settings


@dataclass(frozen=True)
class ReadyVision:
    """The plan of a ready model's vision model and connector, used as a TowerPlan.

    images: size and patch_size as in a TowerPlan, where a patch stands for one feature of the language model. tiles:
    number and order of tiles. resample: Pillow's filter number. video: preparation of videos, or None; no_videos then
    has the reason. value_range: --image_value_range of the run that exported the folder.
    """

    architecture: ReadyModel
    images: ImageSpec
    tiles: TileSpec
    resample: int
    video: VideoRule | None = None
    no_videos: str = ""
    scales: tuple[int, ...] = ()
    value_range: str | None = None
    second: ClassVar[None] = None

    @property
    def config(self) -> PreTrainedConfig:
        """The vision model's configuration."""
        return self.architecture.config.vision_config

    @property
    def width(self) -> int:
        """C, the width of the features that the vision model returns."""
        return self.architecture.family.tower_widths(self.config)[0]

    @property
    def layer_width(self) -> int:
        """Width of the vision model's layers."""
        return self.width

    @property
    def mlp_width(self) -> int:
        """Width of the MLPs in the vision model's layers."""
        return self.architecture.family.tower_widths(self.config)[1]

    @property
    def num_layers(self) -> int:
        """Number of vision layers that run; ready models run all layers."""
        return self.config.num_hidden_layers

    @property
    def num_positions(self) -> int:
        """Positions of a tile in the vision model."""
        return self.tiles.positions

    @property
    def num_patches(self) -> int:
        """Patches of a tile."""
        return self.tiles.patches

    @property
    def cells(self) -> CellTiling | BudgetTiling | None:
        """The cells of a vision model that takes complete images in any shape; None for others."""
        return self.tiles.tiling if self.tiles.tiling.takes_whole_images else None

    @property
    def has_image_blocks(self) -> bool:
        """True if the tokens of an image attend to each other in the language model."""
        return self.architecture.family.has_image_blocks(self.architecture.config)

    @property
    def blocks_need_windows(self) -> bool:
        """True if the tokens of an image attend to each other only in layers with a window."""
        return self.architecture.family.blocks_need_windows

    @property
    def fed_layers(self) -> int:
        """Number of first layers of the language model after which image features are added again."""
        return self.architecture.family.fed_layers(self.architecture.config)

    @property
    def windowed_layers(self) -> int:
        """Number of layers whose attention is limited to a window of an image."""
        return self.tiles.windowed_layers

    @property
    def patches_per_feature(self) -> int:
        """Number of patches per feature of the language model."""
        return self.tiles.patches // self.tiles.features

    def runs(self, name: str) -> bool:
        """Return True, because all layers of a ready model's tower run."""
        return True

    def image_options(self, args: Arguments) -> ReadyImageOptions:
        """Return options that prepare images like the model's own processor, limited by the flags."""
        images, data = self.images, args.data
        return ReadyImageOptions(
            images.size,
            images.patch_size,
            images.mean,
            max_pixels=data.max_image_pixels,
            tiling=_within(self.tiles.tiling, data),
            video=_video_within(self.video, data),
            no_videos=self.no_videos,
            **frames_options(self.video, args),
            value_range=data.image_value_range or self.value_range,
            resample=self.resample,
            has_image_blocks=self.has_image_blocks,
            blocks_need_windows=self.blocks_need_windows,
            boxes=self.architecture.family.boxes,
        )

    def build(self, mean: torch.Tensor, std: torch.Tensor) -> "ReadyTower":
        """Build the vision model, uninitialised."""
        return ReadyTower(self, mean, std)

    def build_projector(self, args: ModelArguments, hidden_size: int) -> "Connector":
        """Build the connector, uninitialised."""
        return Connector(self.architecture)

    def patch_embedding(self, tower: nn.Module) -> nn.Module:
        """Return the first layer of a vision model."""
        return self.architecture.family.patch_embedding(tower)


def _within(tiling: Tiling, data: DataArguments) -> Tiling:
    """Return a tiling limited by --min_pixels and --max_pixels. Raises ConfigError for impossible limits."""
    given = {name: value for name in PIXEL_FLAGS if (value := getattr(data, name)) is not None}
    flags = ", ".join(f"--{name} {value}" for name, value in given.items())
    if given and not isinstance(tiling, CellTiling):
        raise ConfigError(f"{flags}: this model's processor alone decides the sizes of images: leave it out")
    if not isinstance(tiling, CellTiling):
        return tiling
    least, most = given.get("min_pixels", tiling.least), given.get("max_pixels", tiling.most)
    flags = ", ".join(f"--{name} {given[name]}" for name in PIXEL_FLAGS[:2] if name in given)
    if not tiling.side**2 <= most or least > most:
        raise ConfigError(
            f"{flags}: an image would have {least} to {most} pixels: give --max_pixels of at least {tiling.side**2}, a "
            "single feature, and --min_pixels below it"
        )
    return dataclasses.replace(tiling, least=least, most=most)


def frames_options(rule: VideoRule | None, args: Arguments) -> dict[str, object]:
    """Return the options for choosing a video's frames, from given flags or else from the model's files."""
    names = ("video_fps", "frames_upbound", "force_sample")
    found = {name: getattr(args.data, name) for name in names}
    if rule is not None:
        is_forced = rule.num_frames is not None and "video_fps" not in args.given
        forced = {"frames_upbound": rule.num_frames, "force_sample": True} if is_forced else {}
        own = {"video_fps": rule.fps, "frames_upbound": rule.most_frames, **forced}
        found |= {name: value for name, value in own.items() if value is not None and name not in args.given}
    return found


def _video_within(rule: VideoRule | None, data: DataArguments) -> VideoRule | None:
    """Return a VideoRule limited by --video_min_pixels and --video_max_pixels. Raises ConfigError like _within."""
    given = data.video_min_pixels, data.video_max_pixels
    if given == (None, None):
        return rule
    names = zip(PIXEL_FLAGS[2:], given)
    flags = ", ".join(f"--{name} {value}" for name, value in names if value is not None)
    if rule is None:
        raise ConfigError(f"{flags}: this model has no videos: leave it out")
    cells = rule.frame
    least, most = (cells.least if given[0] is None else given[0]), (cells.most if given[1] is None else given[1])
    if not cells.side**2 <= most or least > most:
        whose = "all frames of a video" if cells.in_all else "a frame of a video"
        raise ConfigError(
            f"{flags}: {whose} would have {least} to {most} pixels: give --video_max_pixels of at least "
            f"{cells.side**2}, a single feature, and --video_min_pixels below it"
        )
    return dataclasses.replace(rule, frame=dataclasses.replace(cells, least=least, most=most))


def plan_vision(
    ready: ReadyModel, images: dict, processor: dict, tokenizer: PreTrainedTokenizerBase, where: str
) -> ReadyVision:
    """Plan a ready model's images from its configuration and its processors' settings. Raises ConfigError."""
    try:
        tiles = ready.family.tiles(ready.config, images, processor, tokenizer)
    except ValueError as error:
        raise ConfigError(f"{where}: {ready.config.model_type} in this form can't be trained here: {error}") from error
    mean, std = (tuple(images[name]) for name in ("image_mean", "image_std"))
    resample = images.get("resample", ready.family.resample)
    if type(resample) is not int or not 0 <= resample <= 5:
        raise ConfigError(f"{where}: its image processor says resample {resample!r}, expected one of Pillow's filters")
    side = tiles.tiling.side
    per_row = round(tiles.features**0.5)
    if side // (side // per_row) != per_row:
        raise ConfigError(f"{where}: {per_row} x {per_row} features don't divide its tiles of {side} pixels")
    spec = ImageSpec(side, side // per_row, mean, std)
    value_range = images.get(VALUE_RANGE)
    try:
        if value_range is not None:
            range_of_values(value_range)
    except ConfigError as error:
        raise ConfigError(f"{where}: its image processor says {VALUE_RANGE} {error}") from None
    rule, no_videos = plan_videos(ready, tiles.tiling, images, processor, tokenizer)
    return ReadyVision(ready, spec, tiles, resample, rule, no_videos, value_range=value_range)


def plan_videos(
    ready: ReadyModel, tiling: Tiling, images: dict, processor: dict, tokenizer: PreTrainedTokenizerBase
) -> tuple[VideoRule | None, str]:
    """Return the VideoRule from a model's processor settings, or None and the reason. Arguments as in plan_vision."""
    settings = processor.get("video_processor") or {}
    try:
        return ready.family.videos(ready.config, tiling, images, settings, tokenizer), ""
    except ValueError as error:
        return None, str(error)


class ReadyTower(nn.Module):
    """A ready model's vision model, applied to uint8 tiles."""

    def __init__(self, plan: ReadyVision, mean: torch.Tensor, std: torch.Tensor) -> None:
        """mean and std: as in VisionTower."""
        super().__init__()
        self.plan = plan
        self.tower = plan.architecture.family.build_tower(copy.deepcopy(plan.config))
        self.register_buffer("mean", mean.view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", std.view(1, 3, 1, 1), persistent=False)

    def forward(self, pixel_values: torch.Tensor, tower_inputs: dict) -> torch.Tensor:
        """Encode (N, 3, S, S) uint8, with Batch.tower, to (N, patches, C)."""
        family = self.plan.architecture.family
        pixels = (pixel_values.float() / 255 - self.mean) / self.std
        if family.casts_pixels:
            pixels = pixels.to(family.patch_embedding(self.tower).weight.dtype)
        return family.features(self.tower, pixels, tower_inputs)

    def deeper_options(self, positions: torch.Tensor, deeper: list[torch.Tensor]) -> dict[str, object]:
        """Return arguments of a language model that adds features (M, D) at positions (M,) after its first layers."""
        return {"visual_pos_masks": positions, "deepstack_visual_embeds": deeper}

    def prompt_mask(
        self, config: PreTrainedConfig, embeds: torch.Tensor, mask: torch.Tensor, is_image: torch.Tensor
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Return the language model's attention mask for prompts. mask (B, L): 0 at padding. is_image (B, L) bool."""
        return self.plan.architecture.family.prompt_mask(config, embeds, mask, is_image)


class Connector(nn.Module):
    """The connector between a ready model's vision model and its language model."""

    def __init__(self, ready: ReadyModel) -> None:
        super().__init__()
        self.ready = ready
        self.connector = ready.family.build_connector(copy.deepcopy(ready.config))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Project (N, patches, C) to (N, P, D)."""
        return self.ready.family.connect(self.connector, self.ready.config, features)
