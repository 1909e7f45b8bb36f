"""Frames of video files; without PyAV only the refusals."""

import builtins
import dataclasses
import importlib.util
from fractions import Fraction

import numpy as np
import pytest

from llava_ds.constants import ConfigError, DataError
from llava_ds.data.images import video
from llava_ds.data.images.decode import load_media
from llava_ds.data.images.headers import probe
from llava_ds.data.sample import FileRef, Media
from llava_ds.geometry import ImageOptions, media_layout
from llava_ds.videos import video_frames

OPTIONS = ImageOptions(24, 8, (0.5, 0.5, 0.5), video_fps=5, frames_upbound=8)
needs_av = pytest.mark.skipif(importlib.util.find_spec("av") is None, reason="PyAV is not installed")


def write_video(path, num_frames: int, rate: int = 10) -> Media:
    """A video of 48 x 32 whose frames are grey, 4 brighter each."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt, stream.bit_rate = 48, 32, "yuv420p", 10**6
        for i in range(num_frames):
            pixels = np.full((32, 48, 3), 20 + 4 * i, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return Media("video", (FileRef(str(path)),))


def brightness(media: Media, options: ImageOptions) -> list[float]:
    sizes = probe(media, options)
    layout = media_layout("video", sizes, 1, options)
    tiles = load_media(media, sizes, layout, options)
    assert tiles.shape == (len(sizes), 3, 24, 24) == (layout.num_tiles, 3, 24, 24) and set(sizes) == {(48, 32)}
    return [(tile.float().mean().item() - 20) / 4 for tile in tiles]


@needs_av
@pytest.mark.parametrize("suffix", ["mp4", "avi", "mkv"])
def test_frames_are_taken_by_the_second_and_evenly_when_there_are_too_many(tmp_path, suffix):
    media = write_video(tmp_path / f"a.{suffix}", 12)
    assert np.allclose(brightness(media, OPTIONS), [0, 2, 4, 6, 8, 10], atol=0.8)
    few = dataclasses.replace(OPTIONS, frames_upbound=4)
    assert np.allclose(brightness(media, few), [0, 3, 7, 11], atol=0.8)


@needs_av
def test_a_forced_number_of_frames_is_decoded_also_of_a_short_video(tmp_path):
    forced = dataclasses.replace(OPTIONS, force_sample=True)
    assert np.allclose(brightness(write_video(tmp_path / "a.mp4", 12), forced), [0, 1, 3, 4, 6, 7, 9, 11], atol=0.8)
    assert np.allclose(brightness(write_video(tmp_path / "b.mp4", 4), forced), [0, 0, 0, 1, 1, 2, 2, 3], atol=0.8)


@needs_av
def test_what_is_no_video_or_another_one_is_named(tmp_path):
    media = write_video(tmp_path / "a.mp4", 12)
    sizes = probe(media, OPTIONS)
    layout = media_layout("video", sizes, 1, OPTIONS)
    write_video(tmp_path / "a.mp4", 6)
    with pytest.raises(DataError, match=r"a.mp4 has 3 frames to use, but had 6 when the data was checked"):
        load_media(media, sizes, layout, OPTIONS)
    with pytest.raises(DataError, match=r"a.mp4 has frames of 48 x 32 pixels, expected 1 to 100: scale it down"):
        probe(media, dataclasses.replace(OPTIONS, max_pixels=100))
    content = (tmp_path / "a.mp4").read_bytes()
    playlist = f"#EXTM3U\n#EXTINF:1,\nfile://{tmp_path}/a.mp4\n#EXT-X-ENDLIST\n".encode()
    for broken in (b"", b"no video", content[: len(content) // 2], playlist):
        (tmp_path / "b.mp4").write_bytes(broken)
        with pytest.raises(DataError, match=r"b.mp4 (can't be read as a video \(.*|holds no video): replace it or"):
            probe(Media("video", (FileRef(str(tmp_path / "b.mp4")),)), OPTIONS)


def test_without_the_extra_the_error_names_it(tmp_path, monkeypatch):
    real = builtins.__import__

    def without_av(name, *args, **kwargs):
        if name == "av":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_av)
    with pytest.raises(ConfigError, match=r"install the extra llava_ds\[video\], or give videos as lists of images"):
        probe(Media("video", (FileRef(str(tmp_path / "a.mp4")),)), OPTIONS)


def write_uneven(path) -> Media:
    """A video of ten frames in its first second, and then one a second for five seconds."""
    import av

    times = [i / 10 for i in range(10)] + [1.0 + i for i in range(5)]
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=30)
        stream.width, stream.height, stream.pix_fmt, stream.bit_rate = 48, 32, "yuv420p", 10**6
        stream.codec_context.time_base = Fraction(1, 1000)
        for i, time in enumerate(times):
            frame = av.VideoFrame.from_ndarray(np.full((32, 48, 3), 20 + 4 * i, np.uint8), format="rgb24")
            frame.pts, frame.time_base = round(1000 * time), Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return Media("video", (FileRef(str(path)),))


@needs_av
@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
def test_times_of_an_uneven_video_are_transformers(tmp_path, suffix):
    """Which divides a frame's number by the average rate, whatever the container says of the frame; LLaVA-NeXT chooses
    frames by that rate, too."""
    from transformers.video_utils import load_video

    media = write_uneven(tmp_path / f"a.{suffix}")
    found, _ = video.footage(media.refs[0], OPTIONS)
    indices = video_frames(*found, OPTIONS.frame_choice)
    _, metadata = load_video(media.refs[0].path, backend="pyav", sample_indices_fn=lambda *_, **__: np.array(indices))
    assert found.num_frames == 15 and found.rate == pytest.approx(15 / 5.9, rel=0.2)
    if suffix == "mkv":  # of which transformers' PyAV knows no number of frames, and a rate that is none
        assert (metadata.total_num_frames, metadata.fps) == (0, 30)
        return
    assert found.rate == pytest.approx(metadata.fps)
    assert [index / found.rate for index in indices] == pytest.approx(metadata.timestamps)
    assert len(indices) / found.num_frames * found.rate == pytest.approx(metadata.sampled_fps)
