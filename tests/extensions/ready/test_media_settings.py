"""Settings of an image's or video's part: frames, times and sizes are those that its author asks for, or a refusal."""

import base64
import dataclasses
import importlib.util
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import toys
from PIL import Image
from ready_models import PATCH, open_processor, write_ready
from transformers import AutoConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.video_utils import VideoMetadata

from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.constants import IMAGE_TOKEN_INDEX, DataError
from llava_ds.data.collate import collate
from llava_ds.data.dataset import ALONE, PreflightOptions, open_encoded
from llava_ds.data.encoded_rows import SizedMedia, layout_of
from llava_ds.data.images.decode import load_images, load_media
from llava_ds.data.sample import FileRef, Media
from llava_ds.data.sources import SourceOptions, open_sources, to_sample
from llava_ds.extensions.infer.generate import Prompt, media_of
from llava_ds.extensions.ready.family import media_ids
from llava_ds.extensions.ready.ready_tilings import cut_to_requested_size
from llava_ds.model.open.model_plan import read_parts
from llava_ds.tilings import RequestedSize
from llava_ds.videos import Clip, Footage, FrameChoice

CELL = 2 * PATCH  # pixels along a cell of a tiny Qwen
needs_av = pytest.mark.skipif(importlib.util.find_spec("av") is None, reason="PyAV is not installed")
LLAVA = toys.image_options()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Eight frames of 64 x 48, an image of 200 x 120, and a video of 40 frames, 10 a second."""
    folder = tmp_path_factory.mktemp("media")
    for i in range(8):
        noise((64, 48), i).save(folder / f"{i}.png")
    noise((200, 120), 8).save(folder / "large.png")
    if importlib.util.find_spec("av") is not None:
        import av

        with av.open(str(folder / "a.mp4"), "w") as container:
            stream = container.add_stream("mpeg4", rate=10)
            stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
            for i in range(40):
                pixels = np.full((48, 64, 3), 20 + 4 * i, np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
            container.mux(stream.encode())
    return folder


def noise(size, seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A function from a family's name to its folder, its tokenizer and its image options."""
    made = {}

    def get(family: str):
        if family not in made:
            path = tmp_path_factory.mktemp(family)
            write_ready(path, family)
            parts = read_parts(ModelArguments(model_name_or_path=str(path)))
            args = Arguments(ModelArguments(), DataArguments(), TrainingArguments(), frozenset())
            made[family] = path, parts.open_tokenizer(), parts.tower.image_options(args)
        return made[family]

    return get


def source_of(folder, records: list[dict], tmp_path):
    path = tmp_path / "data.json"
    path.write_text(json.dumps(records))
    options = SourceOptions(image_folder=str(folder), video_folder=str(folder), cache_dir=str(tmp_path / "cache"))
    return open_sources(str(path), options)


def record_of(*parts: dict, **fields) -> dict:
    content = [*parts, {"type": "text", "text": "What?"}]
    return {
        "messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "A cat."}],
        **fields,
    }


def media_in(record: dict, folder, tmp_path) -> Media:
    (media,) = to_sample(json.dumps(record), source_of(folder, [record], tmp_path)[0], 0).media
    return media


def refusal(record: dict, folder, tmp_path) -> str:
    with pytest.raises(DataError) as caught:
        media_in(record, folder, tmp_path)
    return str(caught.value)


FRAMES = [f"{i}.png" for i in range(8)]
FOUR_A_SECOND = {
    "fps of a list": record_of({"type": "video", "video": FRAMES, "fps": 4}),
    "sample_fps as a text": record_of({"type": "video", "video": FRAMES, "sample_fps": "4"}),
    "an object in the record's list": record_of({"type": "video"}, videos=[{"video": FRAMES, "sample_fps": 4.0}]),
    "the part of the record's video": record_of({"type": "video", "fps": 4.0}, videos=[FRAMES]),
    "a part and an object that agree": record_of(
        {"type": "video", "fps": 4}, videos=[{"type": "video", "video": FRAMES, "fps": 4}]
    ),
    "LLaVA's form": {
        "videos": [{"video": FRAMES, "fps": 4}],
        "conversations": [{"from": "human", "value": "<video>\nWhat?"}, {"from": "gpt", "value": "A cat."}],
    },
}


@pytest.mark.parametrize("name", FOUR_A_SECOND)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "smolvlm", "gemma4_e"])
def test_eight_frames_at_four_a_second_take_two_seconds(family, name, model, folder, tmp_path):
    """The ids, with the times in them, are those of transformers' processor that is told so, and so are positions."""
    path, tokenizer, options = model(family)
    options = dataclasses.replace(options, frames_upbound=8)
    dataset = opened(source_of(folder, [FOUR_A_SECOND[name]], tmp_path), tokenizer, options, tmp_path)
    assert list(dataset.rejections()) == []
    [(tiles, layout)] = dataset[0].media
    assert layout.seconds == options.video.moment / 4 and len(tiles) == layout.num_tiles
    if family == "qwen2_5_vl":
        assert layout.interval == options.video.tokens_per_second * 0.5
    processor, frames = open_processor(path, family), [np.asarray(Image.open(folder / name)) for name in FRAMES]
    processor.video_processor.metadata = [
        VideoMetadata(total_num_frames=8, fps=4.0, duration=2.0, frames_indices=list(range(8)))
    ]
    chat = [
        {"role": "user", "content": [{"type": "video", "video": np.stack(frames)}, {"type": "text", "text": "What?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]},
    ]
    expected = processor.apply_chat_template(chat, tokenize=True, return_dict=True, return_tensors="pt")["input_ids"]
    ids = dataset[0].input_ids.clone()
    ids[ids == IMAGE_TOKEN_INDEX] = media_ids(AutoConfig.from_pretrained(path), [layout]).to(ids.dtype)
    assert ids.tolist() == expected[0].tolist()


def opened(sources, tokenizer, options, tmp_path):
    preflight = PreflightOptions(cache_dir=str(tmp_path / "cache"), num_workers=1, on_bad_sample="list")
    encoding = toys.encoding_options(template="processor", max_length=10**5)
    return open_encoded(sources, tokenizer, encoding, options, preflight, ALONE)


@pytest.mark.parametrize(
    ("settings", "footage", "expected"),
    [  # of qwen-vl-utils 0.0.14
        ({"fps": 2.0}, (100, 25), [0, 14, 28, 42, 57, 71, 85, 99]),
        ({"fps": 0.5}, (60, 30), [0, 20, 39, 59]),
        ({"nframes": 5}, (29, 29.97), [0, 9, 19, 28]),
        ({"nframes": 6}, (29, 29.97), [0, 6, 11, 17, 22, 28]),
        ({"fps": 8, "max_frames": 7}, (90, 30), [0, 18, 36, 53, 71, 89]),
        ({"fps": 0.1, "min_frames": 9}, (90, 30), [0, 10, 20, 30, 40, 49, 59, 69, 79, 89]),
        ({"fps": 4, "video_start": 1.0, "video_end": 2.5}, (100, 25), [25, 32, 40, 47, 55, 62]),
        ({"nframes": 4, "video_start": 0.7}, (12, 10), [7, 8, 10, 11]),
        ({"max_frames": 6}, (100, 10), [0, 20, 40, 59, 79, 99]),
        ({"video_end": 1.01}, (50, 10), [0, 3, 7, 10]),
    ],
)
def test_frames_of_a_file_are_chosen_as_qwens_tool_does(settings, footage, expected, model):
    _, _, options = model("qwen2_vl")
    media = Media("video", (FileRef("a.mp4"),), tuple(sorted(settings.items())))
    asked = dataclasses.replace(media.apply_settings(options), video_fps=2, frames_upbound=768)
    assert asked.clip.frames(Footage(*footage), asked.frame_choice) == expected


def test_the_runs_bounds_hold_for_frames_that_a_part_does_not_count():
    clip = Clip(fps=5.0, chooses=True)
    assert len(clip.frames(Footage(100, 10.0), FrameChoice(1, 12, False))) == 12
    assert len(clip.frames(Footage(100, 10.0), FrameChoice(1, 0, False))) == 50
    forced = dataclasses.replace(clip, fps=None, start=1.0)
    assert len(forced.frames(Footage(100, 10.0), FrameChoice(1, 12, True))) == 12
    assert dataclasses.replace(clip, num_frames=1).frames(Footage(3, 10.0), FrameChoice(1, 12, False)) == [0]


@needs_av
@pytest.mark.parametrize(
    ("settings", "indices"),
    [
        ({"nframes": 4}, [0, 13, 26, 39]),
        ({"num_frames": 4, "video_start": 1, "video_end": 3}, [10, 17, 23, 30]),
        ({"fps": 2, "max_frames": 4}, [0, 13, 26, 39]),
    ],
)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "internvl", "gemma4_e", "llava"])
def test_the_chosen_frames_are_decoded_and_their_times_told(settings, indices, family, model, folder, tmp_path):
    options = LLAVA if family == "llava" else model(family)[2]
    media = media_in(record_of({"type": "video", "video": "a.mp4", **settings}), folder, tmp_path)
    sized = SizedMedia.of(media, options)
    layout = layout_of(sized, 1, options)
    assert len(sized.sizes) == 4
    [(_, _, found)] = media_of(Prompt((), (media,)), options)
    assert found == layout
    shown = [(np.asarray(each).mean() - 20) / 4 for each in load_images(media, sized.sizes, options)]
    assert np.allclose(shown, indices, atol=1.5)
    assert len(load_media(media, sized.sizes, layout, options)) == layout.num_tiles
    if family == "qwen2_5_vl":
        span = indices[-1] - indices[0] + 1
        assert layout.seconds == pytest.approx(2 / (4 / span * 10))
    elif family == "qwen3_vl":
        times = [(indices[i] + indices[i + 1]) / 20 for i in (0, 2)]
        assert [f"<{time:.1f} seconds>" in layout.text.text for time in times] == [True, True]


SIZES = {
    "max_pixels": {"max_pixels": 20 * CELL**2},
    "max_pixels as a text": {"max_pixels": str(20 * CELL**2)},
    "min_pixels": {"min_pixels": 200 * CELL**2},
    "a size": {"resized_height": 90, "resized_width": 50},
}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_qwens_images_have_the_size_that_their_part_asks_for(name, family, model, folder, tmp_path):
    """The tiles of a data set's sample are those of the image that Pillow resizes to it."""
    _, tokenizer, options = model(family)
    settings = SIZES[name]
    records = [
        record_of({"type": "image", "image": "large.png", **settings}),
        record_of({"type": "image", **settings}, images=["large.png"]),
        record_of({"type": "image"}, images=[{"image": "large.png", **settings}]),
        record_of({"type": "image"}, images=["large.png"]),
    ]
    dataset = opened(source_of(folder, records, tmp_path), tokenizer, options, tmp_path)
    assert len(dataset) == 4
    numbers = {key: int(value) for key, value in settings.items()}
    if "resized_width" in numbers:
        height, width = smart_resize(90, 50, CELL, 4 * CELL**2, 16384 * CELL**2)
    else:
        bounds = {"min_pixels": 4 * CELL**2, "max_pixels": 16384 * CELL**2, **numbers}
        height, width = smart_resize(120, 200, CELL, **bounds)
    cells = Image.open(folder / "large.png").resize((width, height), options.resample)
    expected = torch.from_numpy(np.array(cells)).permute(2, 0, 1).unfold(1, CELL, CELL).unfold(2, CELL, CELL)
    expected = expected.permute(1, 2, 0, 3, 4).reshape(-1, 3, CELL, CELL)
    for i in range(3):
        [(tiles, layout)] = dataset[i].media
        assert torch.equal(tiles, expected) and layout.cells == (width // CELL, height // CELL)
    [(tiles, _)] = dataset[3].media
    assert len(tiles) != len(expected)
    batch = collate([dataset[0], dataset[3]], options)
    assert len(batch.pixel_values) == len(tiles) + len(expected)


@pytest.mark.parametrize(
    ("asked", "frames", "expected"),
    [  # of qwen-vl-utils 0.0.14 for frames of 640 x 480 and cells of 28 pixels
        (RequestedSize(most=360 * 420), 8, (448, 336)),
        (RequestedSize(least=128 * 784, total=20480 * 784), 200, (448, 336)),
        (RequestedSize(resized=(420, 280)), 4, (420, 280)),
        (RequestedSize(least=4 * 784), 4, (644, 476)),
    ],
)
def test_frames_have_the_size_that_their_part_asks_for(asked, frames, expected):
    assert cut_to_requested_size(asked, (640, 480), 28, float("inf"), frames).steps == (expected,)


def test_boxes_are_on_the_image_as_its_part_resizes_it(model, folder, tmp_path):
    _, tokenizer, options = model("qwen2_5_vl")
    part = {"type": "image", "image": "large.png", "resized_height": 4 * CELL, "resized_width": 8 * CELL}
    record = record_of(part, objects={"ref": [], "bbox": [[0, 0, 200, 120]]})
    record["messages"][1]["content"] = "At <bbox>."
    dataset = opened(source_of(folder, [record], tmp_path), tokenizer, options, tmp_path)
    labels = [i for i in dataset[0].labels.tolist() if i >= 0]
    assert f"[0, 0, {8 * CELL}, {4 * CELL}]" in tokenizer.decode(labels)


def test_settings_in_tables(folder, tmp_path, model):
    """verl's images with bytes, and parts whose other keys are null."""
    data = (folder / "large.png").read_bytes()
    content = [
        {"type": "image", "max_pixels": 5120, "text": None},
        {"type": "text", "max_pixels": None, "text": "What?"},
    ]
    messages = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": [{"type": "text", "text": "A."}]},
    ]
    rows = {
        "part": {"images": [{"bytes": data, "path": None}], "messages": messages},
        "image": {
            "images": [{"bytes": data, "path": None, "max_pixels": 5120}],
            "messages": [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "A."}],
        },
    }
    _, _, options = model("qwen2_vl")
    for name, row in rows.items():
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / f"{name}.parquet")
        (source,) = open_sources(str(tmp_path / f"{name}.parquet"), SourceOptions(cache_dir=str(tmp_path / "cache")))
        [record] = source.read()
        (media,) = to_sample(record.text, source, 0).media
        assert media.settings == (("max_pixels", 5120),)
        assert layout_of(SizedMedia.of(media, options), 1, options).num_tiles == 15


def test_a_data_uri_keeps_its_settings(folder, tmp_path):
    uri = "data:image/png;base64," + base64.b64encode((folder / "0.png").read_bytes()).decode()
    part = {"type": "image_url", "image_url": {"url": uri, "max_pixels": 4096, "detail": "auto"}}
    (source,) = source_of(folder, [record_of(part)], tmp_path)
    [record] = source.read()
    assert "base64" not in record.text
    assert to_sample(record.text, source, 0).media[0].settings == (("max_pixels", 4096),)


@pytest.mark.parametrize(
    ("family", "part", "expected"),
    [
        ("gemma3", {"type": "image", "image": "0.png", "max_pixels": 9000}, "this model's images: only its processor"),
        (
            "internvl",
            {"type": "image", "image": "0.png", "resized_height": 64, "resized_width": 64},
            "'resized_height'",
        ),
        (
            "smolvlm",
            {"type": "video", "video": FRAMES, "total_pixels": 9000},
            "'total_pixels' can't be honoured for this",
        ),
        ("llava", {"type": "image", "image": "0.png", "min_pixels": 9000}, "this model's images: a flag decides their"),
        ("llava", {"type": "video", "video": FRAMES, "max_pixels": 9000}, "this model's videos: a flag decides their"),
        (
            "qwen2_vl",
            {"type": "video", "video": FRAMES, "nframes": 4},
            "'nframes' can't be honoured for a list of frames",
        ),
        ("qwen3_vl", {"type": "video", "video": FRAMES, "video_end": 4}, "'video_end' can't be honoured for a list of"),
        ("qwen3_vl", {"type": "video", "video": FRAMES, "fps": 4, "sample_fps": 2}, "whose 'sample_fps' is 2"),
        ("qwen2_vl", {"type": "image", "image": "0.png", "resized_width": 64}, "without both 'resized_height' and"),
        (
            "qwen2_vl",
            {"type": "image", "image": "0.png", "min_pixels": 9, "max_pixels": 8},
            "at most 8 pixels: it is 9",
        ),
        ("qwen2_vl", {"type": "video", "video": "a.mp4", "sample_fps": 2}, "a video file with its own rate"),
        ("qwen2_vl", {"type": "video", "video": "a.mp4", "fps": 2, "nframes": 4}, "a video with 'fps': both set"),
        (
            "llava",
            {"type": "video", "video": "a.mp4", "video_start": 3, "video_end": 2},
            "starts at 3 s: it ends at 2 s",
        ),
        ("llava", {"type": "video", "video": "a.mp4", "min_frames": 9, "max_frames": 4}, "at most 4 frames: it is 9"),
    ],
)
def test_a_setting_that_can_not_be_honoured_is_named(family, part, expected, model, folder, tmp_path):
    if "a.mp4" in str(part):
        (folder / "a.mp4").touch()
    _, tokenizer, options = (None, None, LLAVA) if family == "llava" else model(family)
    media = media_in(record_of(part), folder, tmp_path)
    with pytest.raises(DataError, match="part key '") as caught:
        media.apply_settings(options)
    assert expected in str(caught.value)
    if family == "gemma3":
        dataset = opened(source_of(folder, [record_of(part)], tmp_path), tokenizer, options, tmp_path)
        assert expected in next(iter(dataset.rejections()))["reason"]


@needs_av
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"nframes": 98}, "names 98 frames of a video that has 40, expected a multiple of 2 up to that"),
        ({"nframes": 1}, "names 0 frames of a video that has 40"),
        ({"video_start": 7}, "names a video from 7 s to 4 s, of one that lasts 4 s (40 frames, 10 a second)"),
    ],
)
def test_frames_that_a_video_does_not_have_are_refused(settings, expected, model, folder, tmp_path):
    _, _, options = model("qwen2_vl")
    media = media_in(record_of({"type": "video", "video": "a.mp4", **settings}), folder, tmp_path)
    with pytest.raises(DataError) as caught:
        SizedMedia.of(media, options)
    assert expected in str(caught.value)


def test_a_size_that_no_image_can_have_is_refused():
    with pytest.raises(DataError, match="requires a size of at least 10,000,000 and at most 4,194,304 pixels"):
        cut_to_requested_size(RequestedSize(least=10**7), (64, 48), CELL, 4096)


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (
            {"type": "image", "image": "0.png", "max_pixel": 9},
            "key 'max_pixel': it is not read, did you mean max_pixels",
        ),
        ({"type": "video", "video": FRAMES, "frames": 9}, "with the key 'frames': it is not read, did you mean"),
        (
            {"type": "image", "image": "0.png", "text": "A cat"},
            "of type 'image' with the key 'text': it is not read",
        ),
        ({"type": "image", "image": "0.png", "fps": 2}, "with the key 'fps': it is not read"),
        ({"type": "text", "text": "Hi", "cache": {"a": 1}}, "of type 'text' with the key 'cache': it is not read"),
        ({"type": "image", "image": "0.png", "url": "1.png"}, "with 'image' and 'url': it can be only one image"),
        (
            {"type": "image_url", "image_url": {"url": "0.png", "detail": "low"}},
            "with 'detail' 'low': this does not define a size",
        ),
        ({"type": "image_url", "image_url": {"url": "0.png", "scale": 2}}, "with the key 'scale': it is not read"),
        ({"type": "image", "image": "0.png", "max_pixels": "many"}, "'max_pixels' 'many', expected a whole number"),
        (
            {"type": "image", "image": "0.png", "max_pixels": 0.5},
            "'max_pixels' 0.5, expected a whole number of at least",
        ),
        ({"type": "image", "image": "0.png", "max_pixels": True}, "'max_pixels' True, expected a whole number"),
        ({"type": "image", "image": "0.png", "max_pixels": 10**400}, "expected a whole number of at least 1"),
        ({"type": "video", "video": FRAMES, "fps": float("nan")}, "'fps' nan, expected a number above 0"),
        ({"type": "video", "video": FRAMES, "fps": "inf"}, "'fps' 'inf', expected a number above 0"),
        ({"type": "video", "video": FRAMES, "fps": 0}, "'fps' 0, expected a number above 0"),
        ({"type": "video", "video": "a.mp4", "video_start": -1}, "'video_start' -1, expected a number of seconds"),
        ({"type": "video", "video": [{"image": "0.png", "max_pixels": 99}]}, "'max_pixels' for a frame of a video"),
        (
            {"type": "video", "video": {"video": FRAMES, "fps": 2}, "fps": 3},
            "two values for 'fps' of its video, 3 and 2",
        ),
        (
            {"type": "video", "video": "a.mp4", "nframes": 4, "num_frames": 8},
            "two values for 'nframes' of a video, 4 and",
        ),
        ({"type": "input_audio", "input_audio": {"data": "x"}}, "of type 'input_audio': sounds are not supported"),
        ({"type": "audio_url", "audio_url": {"url": "x"}}, "of type 'audio_url': sounds are not supported"),
    ],
)
def test_keys_that_are_not_read_or_make_no_sense_are_named(part, expected, folder, tmp_path):
    (folder / "a.mp4").touch()
    found = refusal(record_of(part), folder, tmp_path)
    assert expected in found and "\n" not in found


def test_absent_values_are_none_at_all(folder, tmp_path):
    nothing = {"fps": None, "text": None, "detail": "", "max_pixels": None, "annotations": [], "url": None, "cache": {}}
    record = record_of({"type": "image", "image": "0.png", **nothing})
    record["messages"][0]["content"][1] |= {"image": None, "max_pixels": None, "index": None}
    assert media_in(record, folder, tmp_path).settings == ()
    described = record_of({"type": "image"}, images=[{"path": "0.png", "width": 64, "height": 48, "id": 3}])
    assert media_in(described, folder, tmp_path).settings == ()


@pytest.mark.parametrize("kind", ["input_image", "image_url", "image", "input_video", "video_url", "video"])
def test_types_of_parts_and_forms_of_their_files(kind, folder, tmp_path):
    is_video = "video" in kind
    name = "a.mp4" if is_video else "0.png"
    (folder / "a.mp4").touch()
    for file in (name, {"url": name}, {"path": name, "bytes": None}, {"type": kind, kind.split("_")[-1]: name}):
        key = kind if kind in ("image", "image_url", "video", "video_url") else f"{kind.removeprefix('input_')}_url"
        if isinstance(file, dict) and "type" in file:
            file = {"video" if is_video else "image": name}
        media = media_in(record_of({"type": kind, key: file}), folder, tmp_path)
        assert media == Media("video" if is_video else "image", (FileRef(str(folder.resolve() / name)),))


def test_an_index_names_the_records_image(folder, tmp_path):
    """As in Hugging Face's H4 data: the second image may be shown first."""

    def shown(*indices) -> list[str]:
        parts = [{"type": "image", "index": index, "text": None} for index in indices]
        record = record_of(*parts, images=[f"{i}.png" for i in range(len(indices))])
        sample = to_sample(json.dumps(record), source_of(folder, [record], tmp_path)[0], 0)
        return [media.refs[0].path[-5:] for media in sample.media]

    assert shown(1, 0) == ["1.png", "0.png"] and shown(2, 0, 1) == ["2.png", "0.png", "1.png"]
    assert shown(0, 1) == shown(None, None) == ["0.png", "1.png"]
    for indices in ((0, 0), (1, 2), (0, None)):
        with pytest.raises(DataError, match=r"has parts with 'index' .* expected each number from 0 once"):
            shown(*indices)
    with pytest.raises(DataError, match="with 'index' 'first', expected a number from 0"):
        shown("first")
    own = record_of({"type": "image", "image": "0.png", "index": 1})
    assert "and a file of its own: leave one of them out" in refusal(own, folder, tmp_path)


def test_videos_with_and_without_settings_in_one_list(folder, tmp_path):
    (folder / "a.mp4").touch()
    videos = [{"video": FRAMES[:2], "fps": 4}, FRAMES[2:4], "a.mp4", {"path": "a.mp4"}]
    record = record_of(*[{"type": "video"}] * 4, videos=videos)
    media = to_sample(json.dumps(record), source_of(folder, [record], tmp_path)[0], 0).media
    assert [(one.kind, len(one.refs), one.settings) for one in media] == [
        ("frames", 2, (("fps", 4.0),)),
        ("frames", 2, ()),
        ("video", 1, ()),
        ("video", 1, ()),
    ]
