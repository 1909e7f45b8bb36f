"""Frames of videos: which of them are used, and when they are. No pixels, no files."""

from typing import Literal, NamedTuple

import numpy as np


class Footage(NamedTuple):
    """Frames that a video has, and how many of them are a second."""

    num_frames: int
    rate: float


class FrameChoice(NamedTuple):
    """Frames to use of a video: --video_fps, --frames_upbound (0: no bound) and --force_sample."""

    fps: int
    most: int
    forced: bool


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
