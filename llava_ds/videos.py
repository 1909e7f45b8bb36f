"""Videos: which frames of them are used, and when these are; a ready model's tiles and text. No pixels, no files."""

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal, NamedTuple

import numpy as np

from llava_ds.tilings import BudgetTiling, CanvasTiling, Cut, FrameCells, Size, SplitTiling

_SMALL = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


class Footage(NamedTuple):
    """Frames that a video has, and how many of them are a second."""

    num_frames: int
    rate: float


class FrameChoice(NamedTuple):
    """Frames to use of a video: --video_fps, --frames_upbound (0: no bound) and --force_sample."""

    fps: int
    most: int
    forced: bool


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


def _spread(num_frames: int, count: int) -> list[int]:
    return np.linspace(0, num_frames - 1, count, dtype=int).tolist()
