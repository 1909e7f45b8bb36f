"""Prepare images and videos as a ready model's own processor does."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from llava_ds.boxes import THOUSANDTHS, BoxFormat
from llava_ds.extensions.ready.ready_tilings import CellTiling, FrameCells
from llava_ds.extensions.ready.ready_videos import VideoRule
from llava_ds.geometry import ImageOptions, TiledImageOptions
from llava_ds.layouts import MediaLayout
from llava_ds.tilings import Grid, RequestedSize

if TYPE_CHECKING:
    import torch

    from llava_ds.extensions.ready.ready_encode import ReadyEncoder


@dataclass(frozen=True)
class ReadyImageOptions(TiledImageOptions):
    """Image options of a ready model.

    has_image_blocks: True if tokens of an image attend to each other. blocks_need_windows: True if they do so only in
    layers with a window. boxes: format of boxes and points. video: preparation of videos. Neither changes the
    fingerprint of data without boxes or videos. no_videos: why videos are not supported.
    """

    has_image_blocks: bool = False
    blocks_need_windows: bool = False
    boxes: BoxFormat = dataclasses.field(default=THOUSANDTHS, repr=False)
    video: VideoRule | None = dataclasses.field(default=None, repr=False)
    no_videos: str = dataclasses.field(default="", repr=False, compare=False)

    @property
    def no_video_reason(self) -> str:
        """Return why this model can't read videos."""
        return f"this ready model can't be read, as {self.no_videos}"

    @property
    def size_reason(self) -> str:
        """Return why a single image or video can't have its own size."""
        return "only its processor decides sizes"

    def asking(self, kind: Literal["image", "frames", "video"], size: RequestedSize) -> ImageOptions | None:
        """Return options that use the size requested by a record; None if tiles have a fixed size."""
        if kind == "image" and isinstance(self.tiling, CellTiling):
            return replace(self, tiling=replace(self.tiling, asked=size))
        if kind != "image" and self.video is not None and isinstance(self.video.frame, FrameCells):
            return replace(self, video=replace(self.video, frame=replace(self.video.frame, asked=size)))
        return None

    def without_limits(self) -> ImageOptions:
        """Return the options without limits on the pixels of images and frames."""
        tiling, video = self.tiling, self.video
        if isinstance(tiling, CellTiling):
            tiling = replace(tiling, least=0, most=0)
        if video is not None and isinstance(video.frame, FrameCells):
            video = replace(video, frame=replace(video.frame, least=0, most=0))
        return replace(self, tiling=tiling, video=video)

    def encoder(self) -> "type[ReadyEncoder]":
        """Return the class that encodes conversations in the processor's format."""
        from llava_ds.extensions.ready.ready_encode import ReadyEncoder

        return ReadyEncoder

    def position_ids(self, input_ids: "torch.Tensor", layouts: Sequence[MediaLayout]) -> "torch.Tensor | None":
        """Return positions on the axes time, height and width (3, T), for Qwen-VL's cells; None for other models."""
        if not isinstance(self.tiling, CellTiling):
            return None
        from llava_ds.extensions.ready import axes

        return axes.axis_positions(input_ids, [grid for layout in layouts for grid in layout.grids])

    def tower_inputs(self, layouts: Sequence[MediaLayout]) -> dict[str, object]:
        """Return the arguments of a tower that takes complete images."""
        if not self.tiling.takes_whole_images:
            return {}
        from llava_ds.extensions.ready import axes

        return axes.tower_inputs([grid for layout in layouts for grid in layout.grids] or [Grid(1, 1)], self.tiling)

    def trunk_inputs(self, is_image: "torch.Tensor", cu_seqlens: "torch.Tensor") -> dict[str, object]:
        """Return the language model's argument for blocks of image tokens that attend to each other."""
        from llava_ds.batch import ImageBlocks

        blocks = ImageBlocks.of(is_image, cu_seqlens) if self.has_image_blocks else None
        return {} if blocks is None else {"image_blocks": blocks._replace(need_windows=self.blocks_need_windows)}
