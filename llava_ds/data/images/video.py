"""Frames of video files, decoded with PyAV from the extra "video"."""

import contextlib
from collections.abc import Iterator
from fractions import Fraction

from PIL import Image

from llava_ds.constants import ConfigError, DataError, FileChanged
from llava_ds.data.file_slices import opened_file
from llava_ds.data.sample import FileRef
from llava_ds.geometry import ImageOptions, Size
from llava_ds.videos import Footage, video_frames

# Containers that hold the frames themselves. Playlists are excluded: they refer to other files and addresses.
_CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,flv,asf,mpeg,mpegts,m4v,ogg"
LONGEST_S = 1e6  # longest video, eleven days: a list of more frames could fill the memory
UNEVEN = 0.05  # relative difference of rates, above that from rounding times to Matroska's milliseconds
NO_RATE = 24.0  # frames a second if a file doesn't give a rate, as in transformers
_QUARTER_TURNS = {90: Image.Transpose.ROTATE_90, 180: Image.Transpose.ROTATE_180, 270: Image.Transpose.ROTATE_270}


def probe(ref: FileRef, options: ImageOptions) -> tuple[Size, ...]:
    """Read (width, height) of every frame to use from the container, without decoding.

    Raises DataError for files that are not videos, and ConfigError if PyAV is missing.
    """
    with _opened(ref) as (_, stream):
        size = _bounded(ref, stream.codec_context.width, stream.codec_context.height, options.max_pixels)
        return (size,) * len(_indices(ref, options))


def footage(ref: FileRef, options: ImageOptions) -> tuple[Footage, Size]:
    """Read the number of frames, the frame rate, and the frames' upright size. Decodes the first frame to find its
    rotation."""
    count, rate = _count_and_rate(ref)
    with _opened(ref) as (container, stream):
        _bounded(ref, stream.codec_context.width, stream.codec_context.height, options.max_pixels)
        first = next(container.decode(stream), None)
    if first is None:
        raise DataError(f"{ref.path} is a video without frames: replace it or leave it out")
    width, height = _bounded(ref, first.width, first.height, options.max_pixels)
    return Footage(count, rate), (height, width) if round(first.rotation) % 180 == 90 else (width, height)


def frames(ref: FileRef, sizes: tuple[Size, ...], options: ImageOptions) -> Iterator[Image.Image]:
    """Yield the frames to use, in RGB and upright, one at a time. Raises DataError if they differ from those
    that probe found."""
    wanted = _indices(ref, options)
    if len(wanted) != len(sizes):
        raise FileChanged(
            f"{ref.path} has {len(wanted)} frames to use, but had {len(sizes)} when the data was checked: it was "
            "changed since; start again to have it checked"
        )
    left = iter(wanted)
    due = next(left, None)
    with _opened(ref) as (container, stream):
        for number, frame in enumerate(container.decode(stream)):
            if number == due:
                _bounded(ref, frame.width, frame.height, options.max_pixels)
                image = frame.to_image()
                turn = _QUARTER_TURNS.get(round(frame.rotation) % 360)
                image = image if turn is None else image.transpose(turn)
                while number == due:  # --force_sample may use a frame more than once
                    yield image
                    due = next(left, None)
            if due is None:
                return
    raise DataError(
        f"{ref.path} ends before its frame {due}, although its header announces it: replace it or leave it out"
    )


def _indices(ref: FileRef, options: ImageOptions) -> list[int]:
    """Indices of the frames to use, without decoding."""
    return video_frames(*_count_and_rate(ref), options.frame_choice)


def _count_and_rate(ref: FileRef) -> tuple[int, float]:
    """Read the number of frames and the average frame rate (NO_RATE if unknown), without decoding.

    If the header has no number of frames, packets are counted. If the header's rate then differs from the average in
    the packets' times, as in Matroska videos with a variable frame rate, the average is used. torchcodec, transformers'
    first choice, also uses the times. Raises DataError for a video longer than LONGEST_S.
    """
    with _opened(ref) as (container, stream):
        count, rate = stream.frames, float(stream.average_rate or stream.base_rate or NO_RATE)
        if not count:
            times = [packet.pts for packet in container.demux(stream) if packet.size > 0]
            count, measured = len(times), _rate_of(times, stream.time_base)
            if measured is not None and abs(measured / rate - 1) > UNEVEN:
                rate = measured
    if count < 1:
        raise DataError(f"{ref.path} is a video without frames: replace it or leave it out")
    if count / rate > LONGEST_S:
        raise DataError(
            f"{ref.path} would last {count / rate:.0f} seconds ({count} frames, {rate:g} a second): replace it or "
            "leave it out"
        )
    return count, rate


def _rate_of(times: list[int | None], time_base: Fraction) -> float | None:
    """Return the frames per second between the first and the last time; None if times are missing. times: in
    time_base units."""
    if len(times) < 2 or None in times or max(times) == min(times):
        return None
    return (len(times) - 1) / float((max(times) - min(times)) * time_base)


def _bounded(ref: FileRef, width: int, height: int, max_pixels: int) -> Size:
    if not 0 < width * height <= max_pixels:
        raise DataError(
            f"{ref.path} has frames of {width} x {height} pixels, expected 1 to {max_pixels}: scale it down or leave "
            "it out (--max_image_pixels raises the bound)"
        )
    return width, height


@contextlib.contextmanager
def _opened(ref: FileRef) -> Iterator[tuple]:
    """Yield (container, its first video stream)."""
    try:
        import av
    except ImportError as error:
        raise ConfigError(
            f"{ref.path} is a video file and needs PyAV: install the extra llava_ds[video], or give videos as lists "
            "of images"
        ) from error
    try:
        only = {"format_whitelist": _CONTAINERS, "protocol_whitelist": ""}
        with opened_file(ref) as file, av.open(file, options=only, metadata_errors="ignore") as container:
            if not container.streams.video:
                raise DataError(f"{ref.path} holds no video: replace it or leave it out")
            stream = container.streams.video[0]
            stream.codec_context.thread_count = 1  # the loader's processes already run in parallel
            yield container, stream
    except DataError:
        raise
    except Exception as error:  # PyAV and the libraries it uses raise many types of errors
        raise DataError(
            f"{ref.path} can't be read as a video ({type(error).__name__}: {error}): replace it or leave it out"
        ) from error
