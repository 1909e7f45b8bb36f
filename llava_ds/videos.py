"""Selection of video frames. No pixels, no files."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np

from llava_ds.constants import DataError
from llava_ds.tilings import Cut, Size

LEAST_FRAMES = {2: 4}  # by Clip.factor, if the message part gives no number of frames. Source: qwen-vl-utils


class Footage(NamedTuple):
    """Number of frames of a video, and frames per second."""

    num_frames: int
    rate: float


@dataclass(frozen=True)
class Clip:
    """Settings of one video, from its part of a message. None: the run's.

    rate: frames per second, if they are given as images; fps: frames per second to choose; num_frames: total; least,
    most: bounds of num_frames if it is None; start, end: seconds; factor: the number is a multiple of it; chooses:
    False if the run's flags choose the frames.
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
        """Return the first and last frame between start and end. Raises DataError if fewer than two frames are in
        between.

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
        """Return ascending indices of the frames to use from a video file. Raises DataError for an impossible number.

        Source: qwen-vl-utils' smart_nframes, with the run's bounds instead of its own.
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
    """Which frames of a video to use: --video_fps, --frames_upbound (0: no bound) and --force_sample. clip: settings of
    its part of a message."""

    fps: int
    most: int
    forced: bool
    clip: Clip | None = None


class Timing(NamedTuple):
    """A video in a sequence. moments: groups of frames with separate features; seconds: time between moments; interval:
    the same in positions of the language model; text: placeholder text, with image_token for features."""

    moments: int
    seconds: float
    interval: float
    text: str
    image_token: str


class VideoRule(Protocol):
    """Rule for an architecture's own videos. moment: frames that share tiles."""

    moment: int

    def cut(self, size: Size, num_frames: int) -> Cut:
        """Compute the tiles of each frame of a video. Raises DataError for one that the model can't read."""

    def timing(self, cut: Cut, indices: list[int], footage: Footage, span: int) -> Timing:
        """Compute moments and text of a video's frames. indices: of the frames; span: number of frames of the video
        from the first to the last usable one."""


def even_frames(num_frames: int, most: int) -> list[int]:
    """Indices of at most `most` frames (0: all), evenly spread from the first to the last. Source: LLaVA-NeXT."""
    return _spread(num_frames, most) if 0 < most < num_frames else list(range(num_frames))


def video_frames(num_frames: int, frame_rate: float, choice: FrameChoice) -> list[int]:
    """Ascending indices of the frames to use from a video file: choice.fps per second, evenly spread if too many.

    A forced choice always has the same number, with repetitions if the video has fewer. Source: LLaVA-NeXT's
    process_video_with_decord.
    """
    if choice.clip is not None and choice.clip.chooses:
        return choice.clip.frames(Footage(num_frames, frame_rate), choice)
    taken = list(range(0, num_frames, max(1, round(frame_rate / choice.fps))))
    too_many = len(taken) > choice.most or choice.forced
    return _spread(num_frames, choice.most) if choice.most > 0 and too_many else taken


def used_frames(kind: Literal["frames", "video"], footage: Footage, choice: FrameChoice) -> list[int]:
    """Ascending indices of the frames to use from a list of frames or a video file."""
    if kind == "frames":
        return even_frames(footage.num_frames, choice.most)
    return video_frames(*footage, choice)


def _rounded_spread(first: int, last: int, count: int) -> list[int]:
    """Indices from first to last, evenly spread and rounded. Source: torch.linspace in single precision."""
    step = np.float32(last - first) / np.float32(max(1, count - 1))
    numbers = np.arange(count, dtype=np.float32)
    from_first, from_last = first + step * numbers, last - step * (count - 1 - numbers)
    return np.where(numbers < count // 2, from_first, from_last).round().astype(int).tolist() if count > 1 else [first]


def _spread(num_frames: int, count: int) -> list[int]:
    return np.linspace(0, num_frames - 1, count, dtype=int).tolist()
