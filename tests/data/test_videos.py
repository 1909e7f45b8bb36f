"""Videos: the frames that are used, and what ready models write in their place."""

from llava_ds.tilings import SplitTiling
from llava_ds.videos import FrameChoice, VideoRule, even_frames, in_words, moment_times, video_frames


def test_frames_are_taken_evenly():
    assert even_frames(3, 5) == [0, 1, 2]
    assert even_frames(10, 4) == [0, 3, 6, 9]
    assert even_frames(40, 0) == list(range(40))
    by_second, by_fifth = FrameChoice(1, 32, False), FrameChoice(5, 32, False)
    assert video_frames(100, 25.0, by_second) == [0, 25, 50, 75]
    assert video_frames(100, 24.6, by_fifth) == list(range(0, 100, 5))
    assert video_frames(100, 25.0, by_fifth._replace(most=4)) == [0, 33, 66, 99]
    assert video_frames(3, 0.2, by_second) == [0, 1, 2]  # slower than one a second: all of them
    assert len(video_frames(10_000, 25.0, by_fifth._replace(most=0))) == 2000


def test_a_forced_number_of_frames_is_taken_also_of_a_short_video():
    forced = FrameChoice(1, 5, True)
    assert video_frames(100, 25.0, forced) == [0, 24, 49, 74, 99]  # 4 by the second
    assert video_frames(3, 25.0, forced) == [0, 0, 1, 1, 2]
    assert video_frames(100, 25.0, forced._replace(most=0)) == [0, 25, 50, 75]  # LLaVA-NeXT's, too


def test_times_of_moments():
    assert moment_times([0, 2, 4, 6, 8], 4.0, 1) == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert moment_times([0, 2, 4, 6, 8], 4.0, 2) == [0.25, 1.25, 2.0]  # the last one counts twice


def test_numbers_are_num2words():
    """What its version 0.5.14 gives."""
    expected = {
        0: "zero", 1: "one", 13: "thirteen", 20: "twenty", 21: "twenty-one", 99: "ninety-nine", 100: "one hundred",
        101: "one hundred and one", 128: "one hundred and twenty-eight", 999: "nine hundred and ninety-nine",
        1000: "one thousand", 1001: "one thousand and one", 1100: "one thousand, one hundred",
        12345: "twelve thousand, three hundred and forty-five", 100_000: "one hundred thousand",
    }  # fmt: skip
    assert {number: in_words(number) for number in expected} == expected


def test_a_time_is_written_before_every_frame():
    frame = SplitTiling(32, 64, splits=False)
    rule = VideoRule(
        "<video>",
        frame,
        "SmolVLMVideoProcessor",
        stamp="\nFrame from {timestamp}:",
        intro="{frame_count} of {video_duration}",
        outro=".",
    )
    cut = rule.cut((40, 30), 2)
    shown = "<fake_token_around_image><global-img><image><fake_token_around_image>"
    text = rule.text(cut, [59.99, 3600.0], 3725.5)
    assert text == f"two of 1:02:05\nFrame from 00:59:{shown}\nFrame from 60:00:{shown}."
    assert (cut.steps, cut.num_tiles) == (((64, 48), (32, 32)), 1)
