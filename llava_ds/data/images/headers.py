"""Sizes of images and videos from the headers of their files, checked before anything is decoded."""

from PIL import Image

from llava_ds import geometry
from llava_ds.constants import MAX_IMAGE_PIXELS, DataError
from llava_ds.data.images.decode import (
    aspect_ratio_of,
    check_resized,
    decode_pixels,
    is_deep,
    opened_image,
    used_files,
)
from llava_ds.data.sample import FileRef, Media
from llava_ds.geometry import ImageOptions, Size
from llava_ds.videos import Footage, video_frames

_WIDE_FORMATS = ("PNG", "TIFF", "PPM")  # may have 16 bits per colour channel


def probe(media: Media, options: ImageOptions, notes: list[str] | None = None) -> tuple[Size, ...]:
    """Read upright (width, height) of an image, or of every used frame of a video, from headers only.

    notes: list that collects lines about images that use little of their range (images with more than 8 bits per value
    are decoded to check it); None skips the check.

    Raises DataError for files that are not images or are too large, as stored or resized, and ConfigError for a video
    file if the extra that decodes it is missing.
    """
    options = media.apply_settings(options)
    if media.kind == "video":
        from llava_ds.data.images import video

        return video.probe(media.refs[0], options)
    sizes = []
    for ref in used_files(media, options):
        with opened_image(ref, options.max_pixels) as (image, _, size):
            sizes.append(size)
            if notes is not None and _is_wide(image):
                from llava_ds.data.images.deep_images import described

                decode_pixels(ref, image)
                if text := described(image, options.value_range):
                    part = f" (at byte {ref.offset:,})" if ref.num_bytes >= 0 else ""
                    notes.append(f"{ref.path}{part}, {text}")
        if options.tiling is None:
            check_resized(ref, size, aspect_ratio_of(media, options), options)
        elif media.kind == "image":
            _check_steps(ref, size, options.tiling.cut(size).steps, options)
    return tuple(sizes)


def footage(
    media: Media, options: ImageOptions, notes: list[str] | None = None
) -> tuple[Footage | None, tuple[Size, ...]]:
    """Return the footage of a video if the options have a frame rule (otherwise None), and sizes as probe does. notes:
    as in probe.

    Frames given as images have the rate --video_fps, unless their part of a message names one.
    """
    if media.kind == "image" or options.video is None:
        return None, probe(media, options, notes)
    options = media.apply_settings(options)
    if media.kind == "frames":
        rate = None if options.clip is None else options.clip.rate
        found, sizes = Footage(len(media.refs), rate or options.video_fps), probe(media, options, notes)
    else:
        from llava_ds.data.images import video

        found, size = video.footage(media.refs[0], options)
        sizes = (size,) * len(video_frames(*found, options.frame_choice))
    _check_steps(media.refs[0], sizes[0], geometry.tiled_cut(media.kind, sizes, options).steps, options)
    return found, sizes


def image_size(ref: FileRef) -> Size:
    """Read upright (width, height) of an image from its header. Raises DataError for a file that is not an image."""
    with opened_image(ref, MAX_IMAGE_PIXELS) as (_, _, size):
        return size


def _is_wide(image: Image.Image) -> bool:
    """True for an undecoded image of more than 8 bits per value: a deep image, or one of 16 bits per channel (of which
    Pillow reads only the upper 8)."""
    if is_deep(image):
        return True
    if image.format not in _WIDE_FORMATS or not image.tile:
        return False
    raw = image.tile[0][3]
    return ";16" in (raw if isinstance(raw, str) else str(raw and raw[0]))


def _check_steps(ref: FileRef, size: Size, steps: tuple[Size, ...], options: ImageOptions) -> None:
    """Raise DataError if an image exceeds max_pixels at a resizing step, or after resizing only its width."""
    before = (size, *steps)
    if any(max(width * h, width * height) > options.max_pixels for (_, h), (width, height) in zip(before, steps)):
        raise DataError(
            f"{ref.path}: an image of {size[0]} x {size[1]} would be resized to too many pixels: leave it out"
        )
