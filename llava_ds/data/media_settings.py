"""Settings of one image or video, such as max_pixels and fps, applied to the options of a run."""

from dataclasses import replace
from functools import lru_cache

from llava_ds.constants import DataError
from llava_ds.geometry import ImageOptions
from llava_ds.tilings import RequestedSize
from llava_ds.videos import Clip

SIZES = ("min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width")
CHOICE = ("nframes", "min_frames", "max_frames", "video_start", "video_end")  # select a video file's frames

_MOST_OPTIONS = 1024  # results in memory; most data sets have a handful of settings


@lru_cache(maxsize=_MOST_OPTIONS)
def with_settings(options: ImageOptions, kind: str, settings: tuple[tuple[str, float], ...]) -> ImageOptions:
    """Apply the settings of one image or video to the options. kind, settings: as in Media.

    Raises DataError for a setting that can't be honoured. Source: qwen-vl-utils defines these settings.
    """
    asked = dict(settings)
    if kind != "image":
        options = replace(options, clip=_clip(kind, asked, options))
    if not any(name in asked for name in SIZES):
        return options
    if (sized := options.asking(kind, _size(asked))) is not None:
        return sized
    name, those = next(name for name in SIZES if name in asked), "images" if kind == "image" else "videos"
    raise _refused(name, f"this model's {those}: {options.size_reason}, so leave it out")


def _clip(kind: str, asked: dict[str, float], options: ImageOptions) -> Clip:
    """Select the frames that a video's settings name."""
    rates = [asked[name] for name in ("fps", "sample_fps") if name in asked]
    if kind == "frames":
        if name := next((name for name in CHOICE if name in asked), None):
            raise _refused(name, "a list of frames: they are all used, and it selects frames of video files only")
        if len(set(rates)) > 1:
            raise _refused("fps", f"a list of frames whose 'sample_fps' is {rates[1]:g}")
        return Clip(rate=rates[0] if rates else None)
    if "sample_fps" in asked:
        raise _refused("sample_fps", "a video file with its own rate: choose the frames per second with 'fps'")
    if "fps" in asked and "nframes" in asked:
        raise _refused("nframes", "a video with 'fps': both set the number of frames, leave one out")
    start, end = asked.get("video_start"), asked.get("video_end")
    if start is not None and end is not None and start >= end:
        raise _refused("video_end", f"a video that starts at {start:g} s: it ends at {end:g} s")
    least, most = asked.get("min_frames"), asked.get("max_frames")
    if least is not None and most is not None and least > most:
        raise _refused("min_frames", f"a video of at most {most} frames: it is {least}")
    if not any(name in asked for name in ("fps", *CHOICE)):
        return Clip()
    factor = 1 if options.video is None else options.video.moment
    return Clip(None, asked.get("fps"), asked.get("nframes"), least, most, start, end, factor, chooses=True)


def _size(asked: dict[str, float]) -> RequestedSize:
    given = [asked.get(name) for name in ("resized_width", "resized_height")]
    if given.count(None) == 1:
        name = ("resized_width", "resized_height")[given.index(None) - 1]
        raise _refused(name, "an image without both 'resized_height' and 'resized_width'")
    least, most = asked.get("min_pixels"), asked.get("max_pixels")
    if least is not None and most is not None and least > most:
        raise _refused("min_pixels", f"an image of at most {most} pixels: it is {least}")
    return RequestedSize(least, most, asked.get("total_pixels"), None if None in given else tuple(given))


def _refused(name: str, why: str) -> DataError:
    return DataError(f"part key {name!r} can't be honoured for {why}")
