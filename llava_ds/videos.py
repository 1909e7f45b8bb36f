"""Videos: which frames of them are used, and when these are; a ready model's tiles and text. No pixels, no files."""

import math
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal, NamedTuple

import numpy as np

from llava_ds.constants import DataError
from llava_ds.tilings import BudgetTiling, CanvasTiling, Cut, FrameCells, Size, SplitTiling

_SMALL = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


LEAST_FRAMES = {2: 4}  # by Clip.factor, of a video whose part asks for no number of them. Source: qwen-vl-utils


class Footage(NamedTuple):
    """Frames that a video has, and how many of them are a second."""

    num_frames: int
    rate: float


@dataclass(frozen=True)
class Clip:
    """Settings of one video, from its part of a message. None: the run's.

    rate: frames of a second, where they are given as images; fps: frames of a second to choose; num_frames: in all;
    least, most: bounds of their number where it is not given; start, end: seconds; factor: the number is a multiple of
    it; chooses: False if the frames are the run's choice.
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
        """The first and the last frame between start and end. Raises DataError where there are no two.

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
                f"asks for a video from {self.start or 0:g} s to "
                f"{length if self.end is None else self.end:g} s, of one that lasts {length:g} s ({footage.num_frames} "
                f"frames, {footage.rate:g} a second): there are no two frames between"
            )
        return first, final

    def frames(self, footage: Footage, choice: "FrameChoice") -> list[int]:
        """Rising indices of the frames to use of a video file. Raises DataError for a number that it can't have.

        Source: qwen-vl-utils' smart_nframes, with the bounds of the run in the place of its own.
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
                f"asks for {count} frames of a video that has {total}"
                + (f", expected a multiple of {factor} up to that" if factor > 1 else "")
            )
        return _rounded_spread(first, last, count)


class FrameChoice(NamedTuple):
    """Frames to use of a video: --video_fps, --frames_upbound (0: no bound) and --force_sample; clip: settings of its
    part of a message."""

    fps: int
    most: int
    forced: bool
    clip: Clip | None = None


@dataclass(frozen=True)
class VideoRule:
    """A ready model's videos: what its processor makes of frames, and writes in a video's place.

    token: what the chat template writes for a video; frame: the tiles of a frame, and the text in its place; moment:
    frames that share these; stamp: before the text of every moment, with its {number}, and its time in {seconds} and as
    a {timestamp}, or None if one text is for all moments; between: moments; intro: before all, with {frame_count}, in
    words, and {video_duration}; outro: behind all; tokens_per_second: positions in the language model for a
    second of video, None where it is one for every moment; template: the chat template of conversations with videos,
    None for the tokenizer's; processor: transformers' class; bound: the name that its settings have for most_frames;
    fps, most_frames, num_frames: frames of a second, most of a video, and of every video, that they say to choose, None
    where they don't.
    """

    token: str
    frame: FrameCells | SplitTiling | CanvasTiling | BudgetTiling
    processor: str = field(repr=False)
    moment: int = 1
    stamp: str | None = ""
    between: str = ""
    intro: str = ""
    outro: str = ""
    tokens_per_second: float | None = None
    template: str | None = None
    bound: str = field(default="max_frames", repr=False)
    fps: float | None = field(default=None, repr=False, compare=False)
    most_frames: int | None = field(default=None, repr=False, compare=False)
    num_frames: int | None = field(default=None, repr=False, compare=False)

    def cut(self, size: Size, num_frames: int) -> Cut:
        """The tiles of each frame of a video. Raises DataError for one that the processor refuses."""
        return self.frame.cut(size, num_frames) if isinstance(self.frame, FrameCells) else self.frame.cut(size)

    def text(self, cut: Cut, times: list[float], duration: float) -> str:
        """The text in a video's place. times: of its moments; duration: of the video; in seconds."""
        shown = self.frame.text(cut)
        if self.stamp is None:
            return shown
        moments = [
            self.stamp.format(number=i, seconds=time, timestamp=f"{int(time // 60):02d}:{int(time % 60):02d}") + shown
            for i, time in enumerate(times, 1)
        ]
        said = {"frame_count": in_words(len(times)), "video_duration": timedelta(seconds=int(duration))}
        intro = self.intro.format(**said)
        return f"{intro}{self.between.join(moments)}{self.outro}"


def in_words(number: int) -> str:
    """A number below a million in English words, as SmolVLM's processor takes them from num2words, which few have."""
    if number < 20:
        return _SMALL[number]
    if number < 100:
        tens, rest = divmod(number, 10)
        return _TENS[tens - 2] + (f"-{_SMALL[rest]}" if rest else "")
    size, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    whole, rest = divmod(number, size)
    joint = " and " if rest < 100 else ", "
    return f"{in_words(whole)} {name}" + (joint + in_words(rest) if rest else "")


def even_frames(num_frames: int, most: int) -> list[int]:
    """Indices of at most `most` frames (0: all), evenly spread from the first to the last. Source: LLaVA-NeXT."""
    return _spread(num_frames, most) if 0 < most < num_frames else list(range(num_frames))


def video_frames(num_frames: int, frame_rate: float, choice: FrameChoice) -> list[int]:
    """Rising indices of the frames to use of a video file: so many per second, evenly spread if too many.

    A forced choice has always as many, some repeated if the video has fewer.
    Source: LLaVA-NeXT's process_video_with_decord.
    """
    if choice.clip is not None and choice.clip.chooses:
        return choice.clip.frames(Footage(num_frames, frame_rate), choice)
    taken = list(range(0, num_frames, max(1, round(frame_rate / choice.fps))))
    too_many = len(taken) > choice.most or choice.forced
    return _spread(num_frames, choice.most) if choice.most > 0 and too_many else taken


def used_frames(kind: Literal["frames", "video"], footage: Footage, choice: FrameChoice) -> list[int]:
    """Rising indices of the frames to use of a list of frames, or of a video file."""
    if kind == "frames":
        return even_frames(footage.num_frames, choice.most)
    return video_frames(*footage, choice)


def moment_times(indices: list[int], rate: float, step: int) -> list[float]:
    """Seconds from a video's start to each of its moments of `step` frames: the middle between the first and the last
    of them. Of too few the last one counts again. rate: frames of a second.

    Source: transformers' Qwen3VLProcessor.
    """
    indices = indices + [indices[-1]] * (-len(indices) % step)
    times = [index / rate for index in indices]
    return [(times[i] + times[i + step - 1]) / 2 for i in range(0, len(times), step)]


def _rounded_spread(first: int, last: int, count: int) -> list[int]:
    """Indices from first to last, evenly spread, to the nearest. Source: torch.linspace in single precision."""
    step = np.float32(last - first) / np.float32(max(1, count - 1))
    numbers = np.arange(count, dtype=np.float32)
    from_first, from_last = first + step * numbers, last - step * (count - 1 - numbers)
    return np.where(numbers < count // 2, from_first, from_last).round().astype(int).tolist() if count > 1 else [first]


def _spread(num_frames: int, count: int) -> list[int]:
    return np.linspace(0, num_frames - 1, count, dtype=int).tolist()
