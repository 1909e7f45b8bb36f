"""What ready models' processors make of videos: tiles, times and text. No pixels, no files."""

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

    def timing(self, cut: Cut, indices: list[int], footage: Footage, span: int) -> Timing:
        """Return moments and text of a video. indices: of the frames used; span: those of the video between the first
        and the last that may be used."""
        moments, interval = math.ceil(len(indices) / self.moment), 1.0
        seconds = self.moment / (len(indices) / span * footage.rate)
        if self.tokens_per_second is not None:
            interval = float(np.float32(self.tokens_per_second) * np.float32(seconds))
        text = self.text(cut, moment_times(indices, footage.rate, self.moment), span / footage.rate)
        return Timing(moments, seconds, interval, text, self.frame.image_token)

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


def moment_times(indices: list[int], rate: float, step: int) -> list[float]:
    """Seconds from a video's start to each of its moments of `step` frames: the middle between the first and the last
    of them. Of too few the last one counts again. rate: frames of a second.

    Source: transformers' Qwen3VLProcessor.
    """
    indices = indices + [indices[-1]] * (-len(indices) % step)
    times = [index / rate for index in indices]
    return [(times[i] + times[i + step - 1]) / 2 for i in range(0, len(times), step)]
