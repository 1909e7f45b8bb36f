"""Compute how ready models' processors prepare a video (tiles, times and text) without reading pixels."""

import math
from dataclasses import dataclass, field
from datetime import timedelta

import numpy as np

from llava_ds.extensions.ready.ready_tilings import BudgetTiling, CanvasTiling, FrameCells, SplitTiling
from llava_ds.tilings import Cut, Size
from llava_ds.videos import Footage, Timing

_SMALL = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


@dataclass(frozen=True)
class VideoRule:
    """How a ready model prepares the frames of a video, and the text that replaces the video.

    token: the token that the chat template writes for a video. frame: tiling of a frame. moment: number of consecutive
    frames that share tiles and text. stamp: text before every moment, with {number}, {seconds} and {timestamp}; None if
    all moments share one text. between: text between moments. intro: text at the beginning, with {frame_count} (in
    words) and {video_duration}. outro: text at the end. tokens_per_second: positions in the language model per second
    of video; None for one per moment. template: chat template of conversations with videos; None for the tokenizer's.
    processor: name of transformers' class. bound: key of most_frames in its settings. fps, most_frames, num_frames:
    frames per second, maximum and exact number of frames, each None if not set.
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
        """Return the tiles of each frame of a video. Raises DataError for one that the processor refuses."""
        return self.frame.cut(size, num_frames) if isinstance(self.frame, FrameCells) else self.frame.cut(size)

    def timing(self, cut: Cut, indices: list[int], footage: Footage, span: int) -> Timing:
        """Return a video's moments and the text that replaces the video.

        indices: the frames used. span: number of frames from the first usable one to the last.
        """
        moments, interval = math.ceil(len(indices) / self.moment), 1.0
        seconds = self.moment / (len(indices) / span * footage.rate)
        if self.tokens_per_second is not None:
            interval = float(np.float32(self.tokens_per_second) * np.float32(seconds))
        text = self.text(cut, moment_times(indices, footage.rate, self.moment), span / footage.rate)
        return Timing(moments, seconds, interval, text, self.frame.image_token)

    def text(self, cut: Cut, times: list[float], duration: float) -> str:
        """Return the text that replaces a video. times: of each moment in s. duration: of the video in s."""
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
    """Spell a number below a million in English, like SmolVLM's processor, without its rare package num2words."""
    if number < 20:
        return _SMALL[number]
    if number < 100:
        tens, rest = divmod(number, 10)
        return _TENS[tens - 2] + (f"-{_SMALL[rest]}" if rest else "")
    size, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    whole, rest = divmod(number, size)
    joint = " and " if rest < 100 else ", "
    return f"{in_words(whole)} {name}" + (joint + in_words(rest) if rest else "")


def moment_times(indices: list[int], rate: float, step: int) -> list[float]:
    """Return the time of each moment of `step` frames: the mean of its first and last frame, in seconds from the start.

    An incomplete last moment repeats the last frame. rate: frames per second.
    Source: transformers' Qwen3VLProcessor.
    """
    indices = indices + [indices[-1]] * (-len(indices) % step)
    times = [index / rate for index in indices]
    return [(times[i] + times[i + step - 1]) / 2 for i in range(0, len(times), step)]
