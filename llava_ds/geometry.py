"""Compute layouts of images and videos from their sizes, without reading files."""

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from llava_ds.boxes import LLAVA_BOXES, BoxFormat, CoordinateFrame, coordinate_units
from llava_ds.config.arguments import DataArguments, ModelArguments
from llava_ds.constants import MAX_IMAGE_PIXELS, ConfigError, DataError
from llava_ds.layouts import ImageText, MediaLayout
from llava_ds.tilings import Cut, RequestedSize, Tiling

if TYPE_CHECKING:
    import torch

    from llava_ds.videos import Clip, Footage, FrameChoice, VideoRule

Size = tuple[int, int]  # width, height

BILINEAR, BICUBIC = 2, 3  # Pillow's filter numbers
FILTERS = (BILINEAR, BICUBIC)

PIXEL_FLAGS = ("min_pixels", "max_pixels", "video_min_pixels", "video_max_pixels")  # for models with images of any size

_MAX_LAYOUTS = 4096  # maximum number of cached layouts


@dataclass(frozen=True)
class ImageSpec:
    """The input images of a tower, and their number of features.

    size: side of the square in pixels. patch_size: side of one projected feature in pixels. mean, std: per channel, in
    [0, 1]. stretch: True if the tower's processor stretches images to the square, False if it crops the centre.
    class_token: True if a feature of the whole image precedes the patch features. short_side: length to which the
    processor scales the shorter side before cropping, None for `size`. resample: Pillow's filter number.
    """

    size: int
    patch_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    stretch: bool = False
    class_token: bool = False
    short_side: int | None = None
    resample: int = BICUBIC

    @property
    def num_tokens(self) -> int:
        """Features per image."""
        return (self.size // self.patch_size) ** 2 + self.class_token


@dataclass(frozen=True)
class ImageOptions:
    """Everything that determines an image's or video's pixels and the order of its features.

    size: side of the tower's square in pixels. patch_size: side of one feature's patch. mean: per channel, in [0, 1].
    pinpoints: (width, height) in pixels that an anyres image may take, () for LLaVA-NeXT's five. stretch: True if the
    tower's processor stretches images to the square, False if it crops the centre. class_token: True if the first
    feature of a tile is of the whole tile. short_side: length to which the shorter side is scaled before the centre is
    cropped, None for size. square_resample: Pillow's filter number for images that become one tile. value_range: values
    that become black and white in images of more than 8 bits: LOW,HIGH, "image" for the image's own range, or None for
    its type's range. clip: settings of one video from its part of a message. Other fields are flags of similar names.
    """

    size: int
    patch_size: int
    mean: tuple[float, ...]
    aspect_ratio: str = "square"
    pinpoints: tuple[Size, ...] = ()
    merge_type: str = "flat"  # a value of --mm_patch_merge_type
    max_pixels: int = MAX_IMAGE_PIXELS
    fast_decoding: bool = False
    video_fps: int = 1
    frames_upbound: int = 32
    pool_stride: int = 2
    pool_mode: Literal["average", "max", "bilinear"] = "bilinear"
    newline_position: Literal["grid", "frame", "one_token", "no_token"] = "grid"
    force_sample: bool = False
    stretch: bool = False
    class_token: bool = False
    short_side: int | None = None
    square_resample: int = BICUBIC
    value_range: str | None = None
    clip: "Clip | None" = dataclasses.field(default=None, repr=False)

    @property
    def tiling(self) -> Tiling | None:
        """Rule that cuts images into tiles; None for LLaVA's rules."""
        return None

    @property
    def video(self) -> "VideoRule | None":
        """Rule for videos of an architecture; None for LLaVA's rules, and for models without videos."""
        return None

    @property
    def no_video_reason(self) -> str:
        """Completion of a message that begins with "videos of", for a tiling that has no videos."""
        return "a tower that sees images in their shape are not supported yet"

    @property
    def size_reason(self) -> str:
        """Reason why one image or video can't have its own size."""
        return "a flag decides their size"

    def asking(self, kind: Literal["image", "frames", "video"], size: RequestedSize) -> "ImageOptions | None":
        """Return the options for an image or video whose record sets its size; None if that is unsupported."""
        return None

    def without_limits(self) -> "ImageOptions":
        """Return the options without limits on pixels: they affect an image's size but not its processing."""
        return self

    def encoder(self) -> "type | None":
        """Class that encodes conversations for these images; None for the template encoder."""
        return None

    def position_ids(self, input_ids: "torch.Tensor", layouts: Sequence[MediaLayout]) -> "torch.Tensor | None":
        """Compute a sample's token positions (3, T) int64 for models with three axes; None for other models.

        input_ids (T,): with IMAGE_TOKEN_INDEX at features; layouts: of the sample's images and videos. The last one's
        features may be truncated.
        """
        return None

    def tower_inputs(self, layouts: Sequence[MediaLayout]) -> dict[str, object]:
        """Build Batch.tower for the images and videos of a batch, or for one blank tile."""
        return {}

    def trunk_inputs(self, is_image: "torch.Tensor", cu_seqlens: "torch.Tensor") -> dict[str, object]:
        """Build Batch.trunk. is_image (T,) bool, cu_seqlens as in Batch."""
        return {}

    @property
    def frame_choice(self) -> "FrameChoice":
        """Rule that selects the frames of a video."""
        from llava_ds.videos import FrameChoice

        return FrameChoice(self.video_fps, self.frames_upbound, self.force_sample, self.clip)

    @property
    def scaled_side(self) -> int:
        """Pixels of a square image's shorter side before its centre is cropped."""
        return self.size if self.short_side is None else self.short_side

    @property
    def boxes(self) -> BoxFormat:
        """Format of boxes and points."""
        return LLAVA_BOXES

    @property
    def side(self) -> int:
        """Features along a side of a tile."""
        return self.size // self.patch_size

    @property
    def tokens_per_tile(self) -> int:
        """Number of features of a tile, P."""
        return self.side**2 + self.class_token

    @property
    def has_newline(self) -> bool:
        """True if the model has a learned newline."""
        return "unpad" in self.merge_type

    @property
    def has_overview(self) -> bool:
        """True if an anyres image has an overview before its tiles."""
        return "nobase" not in self.merge_type

    @property
    def pools_tiles(self) -> bool:
        """True if 2 x 2 features of an anyres image's tiles are max-pooled."""
        return "maxpool2x2" in self.merge_type

    @property
    def is_anyres(self) -> bool:
        """True if a sample's only image is cut into tiles."""
        return self.aspect_ratio.startswith("anyres")

    @property
    def anyres_sizes(self) -> tuple[Size, ...]:
        """Sizes that an anyres image may take."""
        from llava_ds.anyres import parse_pinpoints

        return self.pinpoints or parse_pinpoints(None, self.size)

    @property
    def max_tiles(self) -> int | None:
        """The N of anyres_max_N, or None."""
        found = re.fullmatch(r"anyres_max_(\d+)", self.aspect_ratio)
        return None if found is None else int(found[1])


@dataclass(frozen=True)
class TiledImageOptions(ImageOptions):
    """Options of images that a tiling cuts. size: side of a tile in pixels; patch_size: side in pixels of one feature
    in the language model; tiling: the rule; resample: Pillow's filter number."""

    tiling: Tiling | None = None
    resample: int = BICUBIC


def image_options(model: ModelArguments, data: DataArguments, spec: ImageSpec) -> ImageOptions:
    """Build image options from checked flags and the tower's spec. Raises ConfigError if they don't fit together."""
    size, patch_size = spec.size, spec.patch_size
    ratio, stride = data.image_aspect_ratio, data.mm_spatial_pool_stride
    if given := [f"--{name} {value}" for name in PIXEL_FLAGS if (value := getattr(data, name))]:
        raise ConfigError(f"{', '.join(given)}: this model's images have one size, so leave it out")
    if spec.class_token and model.mm_patch_merge_type != "flat":
        raise ConfigError(
            "--mm_vision_select_feature cls_patch gives every tile a feature outside its grid: give "
            f"--mm_patch_merge_type flat, not {model.mm_patch_merge_type}"
        )
    if not 1 <= stride <= size // patch_size:
        raise ConfigError(
            f"--mm_spatial_pool_stride is {stride}: give a value from 1 to {size // patch_size}, the features in a row"
        )
    pinpoints: tuple[Size, ...] = ()
    if ratio.startswith("anyres"):
        from llava_ds.anyres import parse_pinpoints

        pinpoints = parse_pinpoints(data.image_grid_pinpoints, size)
    return ImageOptions(
        size=size,
        patch_size=patch_size,
        mean=spec.mean,
        aspect_ratio=ratio,
        pinpoints=pinpoints,
        merge_type=model.mm_patch_merge_type,
        max_pixels=data.max_image_pixels,
        fast_decoding=data.fast_image_decoding,
        video_fps=data.video_fps,
        frames_upbound=data.frames_upbound,
        pool_stride=stride,
        pool_mode=data.mm_spatial_pool_mode,
        newline_position=data.mm_newline_position,
        force_sample=data.force_sample,
        stretch=spec.stretch,
        class_token=spec.class_token,
        short_side=spec.short_side,
        square_resample=spec.resample,
        value_range=data.image_value_range,
    )


def resized_size(width: int, height: int, short_side: int) -> Size:
    """Compute (width, height) after scaling the shorter side to short_side.

    Source: transformers' get_resize_output_image_size with default_to_square=False. It rounds the long side down.
    """
    if width <= height:
        return short_side, int(short_side * height / width)
    return int(short_side * width / height), short_side


def centre_box(width: int, height: int, size: int) -> tuple[int, int, int, int]:
    """Compute (left, top, right, bottom) of the size x size square in the centre of an image at least that large.

    Source: transformers' center_crop. It rounds the margins down.
    """
    left, top = (width - size) // 2, (height - size) // 2
    return left, top, left + size, top + size


def square_padding(width: int, height: int) -> tuple[int, int, int]:
    """Compute (side, left, top): the side of the padded square, and the position of the image's corner in it.

    Source: LLaVA's expand2square.
    """
    side = max(width, height)
    return side, (side - width) // 2, (side - height) // 2


def coordinate_frame(size: Size, num_media: int, options: ImageOptions) -> CoordinateFrame:
    """Return the frame of an image's coordinates: the image, or LLaVA's padded square around it.

    num_media: number of images and videos in the sample. Raises DataError if the image is cropped, because boxes could
    then be outside the visible part.
    """
    corner, whole, resized = (0, 0), size, size
    if options.tiling is not None:
        resized = options.tiling.cut(size).steps[-1]
    elif options.aspect_ratio == "pad" or (options.is_anyres and num_media > 1):
        side, left, top = square_padding(*size)
        corner, whole = (-left, -top), (side, side)
    elif not (options.is_anyres or options.stretch or (size[0] == size[1] and options.scaled_side == options.size)):
        raise DataError(
            f"has a box on an image of {size[0]} x {size[1]} pixels, but --image_aspect_ratio {options.aspect_ratio} "
            "crops it to its centre: give --image_aspect_ratio pad"
        )
    return CoordinateFrame(corner, whole, coordinate_units(options.boxes.bbox_type, resized), options.boxes.decimals)


@lru_cache(maxsize=_MAX_LAYOUTS)
def media_layout(
    kind: Literal["image", "frames", "video"],
    sizes: tuple[Size, ...],
    num_media: int,
    options: ImageOptions,
    footage: "Footage | None" = None,
) -> MediaLayout:
    """Compute the layout of an image (sizes has its size) or of a video (sizes has a size per frame).

    num_media: number of images and videos in the sample; anyres cuts an image into tiles only if it is the only one.
    footage: needed if the options have a rule for videos. Source: LLaVA-NeXT's prepare_inputs_labels_for_multimodal.
    """
    side, newline, class_token = options.side, options.has_newline, options.class_token
    whole = (0, 0, side, side)
    if options.tiling is not None:
        return _tiled_layout(kind, sizes, options, footage)
    if kind != "image":
        n, stride = len(sizes), options.pool_stride
        if class_token and stride > 1:
            raise ConfigError(
                "--mm_vision_select_feature cls_patch gives every frame a feature that can't be pooled: give "
                f"--mm_spatial_pool_stride 1, not {stride}"
            )
        by_stride, by_max = options.pool_mode != "bilinear", options.pool_mode == "max"
        short = side // stride if by_stride else math.ceil(side / stride)
        pooled = (short, short) if stride > 1 else None
        behind = {"grid": "row", "frame": "block", "one_token": "end", "no_token": "none"}[options.newline_position]
        behind = behind if newline else "none"
        tokens = n * (short * short + class_token) + {"row": n * short, "block": n, "end": 1, "none": 0}[behind]
        stride = stride if by_stride else None
        return MediaLayout(
            n, tokens, side, None, whole, pooled, stride, behind, class_token, sizes, pools_by_max=by_max
        )
    if not options.is_anyres or num_media > 1:
        tokens, behind = options.tokens_per_tile + newline, "end" if newline else "none"
        return MediaLayout(1, tokens, side, None, whole, None, None, behind, class_token, sizes)
    from llava_ds.anyres import best_pinpoint, scaled_down, unpadded_box

    grid = tuple(length // options.size for length in best_pinpoint(sizes[0], options.anyres_sizes))
    n = 1 + grid[0] * grid[1]
    if options.merge_type == "flat":
        return MediaLayout(n, n * options.tokens_per_tile, side, None, whole, None, None, "none", class_token, sizes)
    across, down = grid[0] * side, grid[1] * side
    overview = options.has_overview
    if options.pools_tiles:
        pooled, box = (across // 2, down // 2), (0, 0, across, down)
        tokens = overview * side * side + pooled[0] * pooled[1]
        return MediaLayout(n, tokens, side, grid, box, pooled, 2, "none", class_token, sizes, overview, True)
    box = unpadded_box(sizes[0], across, down) if newline else (0, 0, across, down)
    width, height = box[2] - box[0], box[3] - box[1]
    pooled = scaled_down(width, height, options.max_tiles, side) if newline else None
    width, height = pooled or (width, height)
    tokens = overview * side * side + height * (width + newline)
    behind = "row" if newline else "none"
    return MediaLayout(n, tokens, side, grid, box, pooled, None, behind, class_token, sizes, overview)


def tiled_cut(kind: str, sizes: tuple[Size, ...], options: ImageOptions) -> Cut:
    """Compute the tiles of an image, or of each video frame. Raises DataError if the model does not support videos, or
    if frames differ in size."""
    if kind == "image":
        return options.tiling.cut(sizes[0])
    if options.video is None:
        raise DataError(f"videos of {options.no_video_reason}: take the record out, or give its frames as images")
    if other := next((size for size in sizes if size != sizes[0]), None):
        raise DataError(
            f"a video has frames of {sizes[0][0]} x {sizes[0][1]} and of {other[0]} x {other[1]} pixels, but this "
            "model needs one size: give it frames of one size"
        )
    return options.video.cut(sizes[0], len(sizes))


def _tiled_layout(kind: str, sizes: tuple[Size, ...], options: ImageOptions, footage: "Footage | None") -> MediaLayout:
    """Compute the layout of an image or video that a tiling cuts. It has all features of the tiles, in order."""
    tiling = options.tiling
    cut, written = tiled_cut(kind, sizes, options), None
    n, side, moments = cut.num_tiles, options.side, 1
    seconds, interval = 0.0, 1.0
    if kind != "image":
        from llava_ds.videos import used_frames

        first, last = (0, footage.num_frames - 1) if options.clip is None else options.clip.span(footage)
        indices = used_frames(kind, footage, options.frame_choice)
        assert len(indices) == len(sizes)
        moments, seconds, interval, text, token = options.video.timing(cut, indices, footage, last - first + 1)
        n *= moments
        written = ImageText(text, n * options.tokens_per_tile // text.count(token), True)
    elif tiling.image_token is not None:
        text = tiling.text(cut)
        written = ImageText(text, n * options.tokens_per_tile // text.count(tiling.image_token))
    cells, box = cut.grid if tiling.takes_whole_images else None, (0, 0, side, side)
    return MediaLayout(
        n, n * options.tokens_per_tile, side, None, box, None, None, "none", False, sizes, text=written, cells=cells,
        moments=moments, seconds=seconds, interval=interval,
    )  # fmt: skip
