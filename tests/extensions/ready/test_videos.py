"""Videos: the frames that are used, and what ready models write in their place."""

import contextlib
from types import SimpleNamespace

import pytest
import toys

from llava_ds.constants import DataError
from llava_ds.data.images import video
from llava_ds.data.sample import FileRef
from llava_ds.extensions.ready.family import chosen_frames, media_ids
from llava_ds.extensions.ready.ready_tilings import SplitTiling
from llava_ds.extensions.ready.ready_videos import VideoRule, in_words, moment_times
from llava_ds.videos import FrameChoice, even_frames, video_frames


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


@pytest.mark.parametrize(
    "settings", [{"max_frames": 8.5}, {"num_frames": True}, {"num_frames": 0}, {"fps": float("nan")}, {"fps": "2"}]
)
def test_settings_that_choose_no_frames_are_refused(settings):
    [name] = settings
    with pytest.raises(ValueError, match=f"its processor says {name} "):
        chosen_frames(settings)


def test_whole_numbers_of_frames_may_be_written_with_a_point():
    chosen = chosen_frames({"num_frames": 8.0, "fps": 1.5})
    assert chosen == {"fps": 1.5, "most_frames": None, "num_frames": 8} and isinstance(chosen["num_frames"], int)


def test_images_need_no_id_of_videos():
    image = SimpleNamespace(num_tokens=2, is_video=False)
    for config in (SimpleNamespace(image_token_id=7), SimpleNamespace(image_token_id=7, video_token_id=None)):
        assert media_ids(config, [image]).tolist() == [7, 7]


def test_a_header_that_says_an_absurd_length_is_refused(monkeypatch):
    stream = SimpleNamespace(frames=10**14, average_rate=0.5, base_rate=None)
    monkeypatch.setattr(video, "_opened", lambda ref: contextlib.nullcontext((None, stream)))
    with pytest.raises(DataError, match=r"a\.mp4 would last 200000000000000 seconds"):
        video.footage(FileRef("a.mp4"), toys.image_options())
