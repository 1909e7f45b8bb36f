"""Select the frames of videos, without reading pixels or files."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np

from llava_ds.constants import DataError
from llava_ds.tilings import Cut, Size

LEAST_FRAMES = {2: 4}  # minimum frames by Clip.factor, if the message gives none. Source: qwen-vl-utils


class Footage(NamedTuple):
    """The number of frames of a video, and its frames per second (rate)."""

    num_frames: int
    rate: float


@dataclass(frozen=True)
class Clip:
    """Settings of one video, from its part of a message. If a setting is None, the run's setting applies.

    rate: frames per second of a video given as images. fps: frames to use per second. num_frames: number of frames to
    use. least, most: bounds of that number if num_frames is None. start, end: in seconds. factor: the number of frames
    is a multiple of it. chooses: False if the run's flags choose the frames.
    """

    rate: float | None = None
    fps: float | None = None
    num_frames: int | None = None
    least: int | None = None
    most: int | None = None
    start: float | None = None
    end: float | None = None
    factor: int = 1
    chooses: bool = False

    def span(self, footage: Footage) -> tuple[int, int]:
        """Return the indices of the first and last frame between start and end. Raises DataError if these are fewer
        than two frames.

        Source: qwen-vl-utils' calculate_video_frame_range.
        """
        last = footage.num_frames - 1
        if self.start is None and self.end is None:
            return 0, last
        length = footage.num_frames / footage.rate
        first = 0 if self.start is None else math.ceil(min(self.start, length) * footage.rate)
        final = last if self.end is None else min(math.floor(min(self.end, length) * footage.rate), last)
        if first >= final:
            raise DataError(
                f"names a video from {self.start or 0:g} s to "
                f"{length if self.end is None else self.end:g} s, of one that lasts {length:g} s ({footage.num_frames} "
                f"frames, {footage.rate:g} a second): that includes fewer than two frames"
            )
        return first, final

    def frames(self, footage: Footage, choice: "FrameChoice") -> list[int]:
        """Return ascending indices of the frames to use from a video file. Raises DataError if their number is invalid.

        Source: qwen-vl-utils' smart_nframes, but with the run's bounds.
        """
        first, last = self.span(footage)
        total, factor = last - first + 1, self.factor
        if self.num_frames is not None:
            count = round(self.num_frames / factor) * factor
        else:
            fps = choice.fps if self.fps is None else self.fps
            bound = self.most or min(choice.most or total, total)
            least = math.ceil((self.least or LEAST_FRAMES.get(factor, 1)) / factor) * factor
            count = min(max(total / footage.rate * fps, least), bound // factor * factor, total)
            if choice.forced and self.fps is None and self.least is None and self.most is None:
                count = min(choice.most, total)
            count = math.floor(count / factor) * factor
        if not factor <= count <= total:
            raise DataError(
                f"names {count} frames of a video that has {total}"
                + (f", expected a multiple of {factor} up to that" if factor > 1 else "")
            )
        return _rounded_spread(first, last, count)


class FrameChoice(NamedTuple):
    """Settings that choose a video's frames: --video_fps, --frames_upbound (0: no bound) and --force_sample. clip:
    settings in the video's part of a message."""

    fps: int
    most: int
    forced: bool
    clip: Clip | None = None


class Timing(NamedTuple):
    """Timing and text of a video in a sequence. moments: number of groups of frames; seconds: time between two moments;
    interval: distance of their position ids; text: placeholder text, with image_token for features."""

    moments: int
    seconds: float
    interval: float
    text: str
    image_token: str


class VideoRule(Protocol):
    """Rule for videos of an architecture. moment: number of frames that share tiles."""

    moment: int

    def cut(self, size: Size, num_frames: int) -> Cut:
        """Compute the tiles of each frame of a video. Raises DataError if the model can't read the video."""

    def timing(self, cut: Cut, indices: list[int], footage: Footage, span: int) -> Timing:
        """Return timing and text for the chosen frames. indices: their indices; span: number of frames in the video
        between its start and end settings."""


def even_frames(num_frames: int, most: int) -> list[int]:
    """Return indices of at most `most` frames (0: all), evenly spread over the video. Source: LLaVA-NeXT."""
    return _spread(num_frames, most) if 0 < most < num_frames else list(range(num_frames))


def video_frames(num_frames: int, frame_rate: float, choice: FrameChoice) -> list[int]:
    """Return ascending indices of the frames to use from a video file: choice.fps per second, or if these are more than
    choice.most, that many frames evenly spread.

    If choice.forced, always choice.most frames, repeated if necessary. Source: LLaVA-NeXT's process_video_with_decord.
    """
    if choice.clip is not None and choice.clip.chooses:
        return choice.clip.frames(Footage(num_frames, frame_rate), choice)
    taken = list(range(0, num_frames, max(1, round(frame_rate / choice.fps))))
    too_many = len(taken) > choice.most or choice.forced
    return _spread(num_frames, choice.most) if choice.most > 0 and too_many else taken


def used_frames(kind: Literal["frames", "video"], footage: Footage, choice: FrameChoice) -> list[int]:
    """Return ascending indices of the frames to use from a list of frames or a video file."""
    if kind == "frames":
        return even_frames(footage.num_frames, choice.most)
    return video_frames(*footage, choice)


def _rounded_spread(first: int, last: int, count: int) -> list[int]:
    """Return `count` indices from first to last, evenly spread and rounded like torch.linspace in single precision."""
    step = np.float32(last - first) / np.float32(max(1, count - 1))
    numbers = np.arange(count, dtype=np.float32)
    from_first, from_last = first + step * numbers, last - step * (count - 1 - numbers)
    return np.where(numbers < count // 2, from_first, from_last).round().astype(int).tolist() if count > 1 else [first]


def _spread(num_frames: int, count: int) -> list[int]:
    return np.linspace(0, num_frames - 1, count, dtype=int).tolist()
