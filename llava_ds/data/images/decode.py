# Shapes: n tiles of one image or video, S pixels per side of the tower's input
"""Decode images and videos to uint8 tiles. They are normalised on the device, in the tower."""

import contextlib
import functools
import io
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType

import torch
from PIL import Image, UnidentifiedImageError

from llava_ds import geometry
from llava_ds.constants import MAX_IMAGE_PIXELS, DataError, FileChanged
from llava_ds.data.file_slices import opened_file
from llava_ds.data.images.resize import bands, cut_by, cut_tiles, to_tile, too_narrow
from llava_ds.data.sample import FileRef, Media
from llava_ds.geometry import ImageOptions, Size, TiledImageOptions
from llava_ds.layouts import MediaLayout
from llava_ds.tilings import Cut

# Raster formats whose decoders run no program and open no other file. ICO is excluded: it may hold larger images.
FORMATS = (
    "JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "AVIF", "JPEG2000", "PPM", "PCX", "TGA",
)  # fmt: skip

_PADDED_TIMES = 8  # a padded image may have this many times max_pixels: resizing it takes some seconds
_HEADER_BYTES = 8 << 20  # allowance for data before the pixels: profiles, thumbnails, other metadata
_BYTES_PER_PIXEL = 16  # upper bound: four floats; compressed formats need fewer
_ORIENTATION = 0x0112  # the EXIF tag
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def _videos() -> ModuleType:
    """Import the reader of video files, only if the data has videos."""
    from llava_ds.data.images import video

    return video


def load_media(
    media: Media,
    sizes: tuple[Size, ...],
    layout: MediaLayout,
    options: ImageOptions,
    wanted: Sequence[int] | None = None,
) -> torch.Tensor:
    """Load the tiles of an image or the frames of a video, (n, 3, S, S) uint8. sizes: from probe; wanted: ascending
    indices of the tiles to return (default: all).

    Raises DataError for a broken file, and FileChanged if the layout depends on a size that has changed.
    Source: LLaVA-NeXT's process_image and process_anyres_image, up to rescaling and normalisation.
    """
    options = media.apply_settings(options)
    if options.tiling is not None:
        tiles = _tiles_by(media, sizes, options)
        return tiles if wanted is None else tiles[list(wanted)]
    if media.kind == "video":
        frames = _videos().frames(media.refs[0], sizes, options)
        ratio = aspect_ratio_of(media, options)
        shown = [frame for i, frame in enumerate(frames) if wanted is None or i in wanted]
        return torch.stack([to_tile(frame, ratio, options) for frame in shown])
    tiles = []
    aspect_ratio = aspect_ratio_of(media, options)
    tiled = media.kind == "image" and layout.num_tiles > 1
    for i, (ref, expected) in enumerate(zip(used_files(media, options), sizes, strict=True)):
        if not tiled and wanted is not None and i not in wanted:
            continue
        image = _load(ref, options, expected if tiled else None)
        if tiled:
            from llava_ds.anyres import best_pinpoint

            pinpoint = best_pinpoint(expected, options.anyres_sizes)
            tiles += cut_tiles(image, expected, pinpoint, options.size, options.fast_decoding)
        else:
            check_resized(ref, image.size, aspect_ratio, options)  # the file may have changed since probe read it
            tiles.append(to_tile(image, aspect_ratio, options))
    return torch.stack(tiles if wanted is None or not tiled else [tiles[i] for i in wanted])


def _tiles_by(media: Media, sizes: tuple[Size, ...], options: TiledImageOptions) -> torch.Tensor:
    """Cut an image or video into tiles as its tower's own processor does. sizes: from probe."""
    cut = geometry.tiled_cut(media.kind, sizes, options)
    if media.kind == "image":
        return cut_by(_load(media.refs[0], options, sizes[0]), cut, options.size, options.resample)
    return stack_moments(_frames(media, sizes, options), cut, options)


def _frames(media: Media, sizes: tuple[Size, ...], options: ImageOptions) -> Iterator[Image.Image]:
    """Yield the frames to use. Raises DataError if a frame's size differs from `sizes`."""
    if media.kind == "frames":
        for ref, size in zip(used_files(media, options), sizes, strict=True):
            yield _load(ref, options, size)
        return
    for frame in _videos().frames(media.refs[0], sizes, options):
        if frame.size != sizes[0]:
            raise DataError(
                f"{media.refs[0].path} has frames of {sizes[0][0]} x {sizes[0][1]} and of {frame.width} x "
                f"{frame.height} pixels, but this model needs one size: replace it or leave it out"
            )
        yield frame


def stack_moments(frames: Iterable[Image.Image], cut: Cut, options: TiledImageOptions) -> torch.Tensor:
    """Return a video's tiles, (n, 3, T * S, S) uint8. The T frames of a moment are stacked vertically. The last frame
    is repeated to fill the last moment."""
    tiles = [cut_by(frame, cut, options.size, options.resample) for frame in frames]  # (tiles, 3, S, S) each
    step = options.video.moment
    tiles += [tiles[-1]] * (-len(tiles) % step)
    return torch.cat([torch.cat(tiles[i : i + step], 2) for i in range(0, len(tiles), step)])


def load_images(media: Media, sizes: tuple[Size, ...], options: ImageOptions) -> Iterator[Image.Image]:
    """Yield the image, or the used frames of a video, in RGB, upright and in full size."""
    if media.kind == "video":
        yield from _videos().frames(media.refs[0], sizes, media.apply_settings(options))
    else:
        yield from (_load(ref, options) for ref in used_files(media, options))


def load_image(
    source: str | os.PathLike | FileRef, max_pixels: int = MAX_IMAGE_PIXELS, value_range: str | None = None
) -> Image.Image:
    """Load an image in RGB, upright by its EXIF data, with white for transparent parts.

    value_range: as in ImageOptions. The size is checked before decoding. Raises DataError with the path.
    """
    return _decoded(source if isinstance(source, FileRef) else FileRef(str(source)), max_pixels, value_range)


def is_deep(image: Image.Image) -> bool:
    """True if the image's header declares one channel of 16 or 32 bits."""
    return image.mode.startswith(("I", "F"))


def to_rgb(image: Image.Image, value_range: str | None = None) -> Image.Image:
    """Convert an image to RGB, with white for transparent parts. value_range: as in ImageOptions."""
    if is_deep(image):
        from llava_ds.data.images.deep_images import to_eight_bits

        image = to_eight_bits(image, value_range)
    if image.mode not in ("RGBA", "LA", "PA") and "transparency" not in image.info:
        return image if image.mode == "RGB" else image.convert("RGB")  # convert would copy an RGB image
    whole = Image.new("RGB", image.size)
    for top, bottom in bands(*image.size):
        part = image.crop((0, top, image.width, bottom)).convert("RGBA")
        ground = Image.new("RGBA", part.size, "white")
        whole.paste(Image.alpha_composite(ground, part).convert("RGB"), (0, top))
    return whole


@contextlib.contextmanager
def opened_image(ref: FileRef, max_pixels: int) -> Iterator[tuple[Image.Image, int, Size]]:
    """Open an image and read its header. Yields the image, its EXIF orientation, and its upright size.

    Any error with the image, also inside the block, becomes a DataError with its path.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # max_pixels limits the size, and broken images raise
            with (
                opened_file(ref, _HEADER_BYTES) as file,
                _open_header(file, max_pixels) as image,
            ):
                width, height = image.size
                if width * height > max_pixels:
                    raise DataError(
                        f"{ref.path} has {width} x {height} pixels, more than the bound of {max_pixels}: "
                        "scale it down or leave it out (training has --max_image_pixels to raise the bound)"
                    )
                _check_tiff_tiles(ref, image, max_pixels)
                turn = _orientation(image)
                file.raw.max_bytes = _HEADER_BYTES + _BYTES_PER_PIXEL * width * height
                yield image, turn, (height, width) if turn >= 5 else (width, height)
    except DataError:
        raise
    except Image.DecompressionBombError as error:
        raise DataError(f"{ref.path}: {error} Scale it down or leave it out") from error
    except UnidentifiedImageError as error:
        known = ", ".join(_known_formats())
        raise DataError(
            f"{ref.path} can't be read as an image (its format is not {known}, or is an unsupported "
            "variant, such as 5 channels or float colours): replace it or leave it out"
        ) from error
    except Exception as error:  # Pillow's decoders raise almost any type on broken files
        raise DataError(
            f"{ref.path} can't be read as an image ({type(error).__name__}: {_first_line(error)}): "
            "replace it or leave it out"
        ) from error


def _open_header(file: io.BufferedReader, max_pixels: int) -> Image.Image:
    """Open an image and limit the bytes read, because a header can declare parts of any length."""
    start = file.peek(16)
    if start.startswith(b"RIFF") or start[4:8] == b"ftyp":
        file.raw.max_bytes = max(_HEADER_BYTES, max_pixels)  # WebP and AVIF files are read whole
    elif start.startswith((b"GIF", b"P")):
        file.raw.max_bytes = _HEADER_BYTES // 16  # Pillow reads these headers byte by byte
    return Image.open(file, formats=_known_formats())


def _load(ref: FileRef, options: ImageOptions, expected: Size | None = None) -> Image.Image:
    """Load an image in RGB and upright. expected: its size when the data was checked."""
    return _decoded(ref, options.max_pixels, options.value_range, expected)


def _decoded(ref: FileRef, max_pixels: int, value_range: str | None, expected: Size | None = None) -> Image.Image:
    with opened_image(ref, max_pixels) as (image, turn, size):
        if expected is not None and size != expected:
            raise FileChanged(
                f"{ref.path} has {size[0]} x {size[1]} pixels, but had {expected[0]} x {expected[1]} when the data "
                "was checked: it was changed since; start again to have it checked"
            )
        decode_pixels(ref, image)
        shown = to_rgb(image, value_range)
        return shown.transpose(_TURNS[turn]) if turn in _TURNS else shown


def decode_pixels(ref: FileRef, image: Image.Image) -> None:
    """Decode an image from opened_image. Raises DataError if its size differs from the header's."""
    stored = image.size
    image.load()
    if image.size != stored:
        raise DataError(f"{ref.path} differs in size from its header: replace it or leave it out")


def _orientation(image: Image.Image) -> int:
    """Read the EXIF orientation, 1 to 8, from the header, so that it does not depend on decoding.

    EXIF data after the pixels of a PNG is ignored, because reading it requires decoding. Pillow rotates TIFFs itself.
    Damaged EXIF data is ignored, as in any viewer.
    """
    if image.format == "TIFF":
        return 1
    try:
        turn = Image.Image.getexif(image).get(_ORIENTATION, 1)  # the PNG plugin's getexif would decode the image
    except Exception:  # its parser raises almost any type on broken data
        return 1
    return turn if turn in _TURNS else 1


def _check_tiff_tiles(ref: FileRef, image: Image.Image, max_pixels: int) -> None:
    """Refuse a TIFF with huge tiles: its decoder would allocate memory for them."""
    if image.format == "TIFF":
        tile = image.tag_v2.get(322, 0), image.tag_v2.get(323, 0)
        if tile[0] * tile[1] > max_pixels:
            raise DataError(f"{ref.path} is stored in tiles of {tile[0]} x {tile[1]} pixels: save it in smaller ones")


def used_files(media: Media, options: ImageOptions) -> list[FileRef]:
    """The files to load: all, or at most --frames_upbound frames."""
    if media.kind != "frames":
        return list(media.refs)
    from llava_ds.videos import even_frames

    return [media.refs[i] for i in even_frames(len(media.refs), options.frames_upbound)]


def aspect_ratio_of(media: Media, options: ImageOptions) -> str:
    """Return how an image becomes one tile: "pad", "stretch" or "square". Frames are never padded, as in LLaVA-NeXT."""
    if media.kind == "image" and (options.is_anyres or options.aspect_ratio == "pad"):
        return "pad"
    return "stretch" if options.stretch else "square"


def check_resized(ref: FileRef, size: Size, aspect_ratio: str, options: ImageOptions) -> None:
    """Raise DataError for an image so narrow that an intermediate size would far exceed max_pixels."""
    if aspect_ratio == "pad":
        padded = max(size) * size[1]  # resizing in bands takes time, but little memory
        if padded > _PADDED_TIMES * options.max_pixels or max(size) * options.size > options.max_pixels:
            raise DataError(f"{ref.path}: an image of {size[0]} x {size[1]} is too narrow to be padded: leave it out")
        return
    stretched = options.size, size[1]  # intermediate size, see resize.resized
    resized = stretched if aspect_ratio == "stretch" else geometry.resized_size(*size, options.scaled_side)
    if resized[0] * resized[1] > options.max_pixels:
        raise DataError(f"{ref.path}: {too_narrow(size, resized)}")


@functools.cache
def _known_formats() -> tuple[str, ...]:
    """Return the formats of FORMATS that this build of Pillow supports."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200]
