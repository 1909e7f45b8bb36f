"""Ready models: ids, labels and pixels are those of transformers' own processors."""

import dataclasses
import importlib.util
import json
from functools import cache, partial
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import ready_models
import torch
from PIL import Image
from ready_models import FAMILIES, open_processor, write_ready
from toys import encoding_options
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.video_utils import VideoMetadata

from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.constants import IGNORE_INDEX, IMAGE_TOKEN, IMAGE_TOKEN_INDEX, DataError
from llava_ds.data import encoded_rows as rows_module
from llava_ds.data.encode import encoder_of
from llava_ds.data.encoded_rows import SizedMedia, media_from_text, media_to_text
from llava_ds.data.end_markers import end_markers
from llava_ds.data.images.decode import load_images, load_media
from llava_ds.data.images.headers import probe
from llava_ds.data.sample import FileRef, Media, Message
from llava_ds.extensions.ready.axes import axis_positions
from llava_ds.extensions.ready.family import media_ids
from llava_ds.extensions.ready.known_families import family_of
from llava_ds.extensions.ready.ready_tilings import CellTiling, FrameCells
from llava_ds.geometry import ImageOptions, media_layout
from llava_ds.layouts import MediaLayout
from llava_ds.model.open.model_plan import read_parts
from llava_ds.videos import Footage, video_frames

SIZES = [(40, 70), (70, 40), (32, 32), (33, 31), (200, 20), (20, 200), (1, 1), (97, 96), (5, 90), (300, 300)]
WORDS = ["It is a red cat.", "two", "yes no", "  spaces  inside ", "日本。", "a\nline", "What?", "<b>it's</b>"]


@pytest.fixture(scope="module", params=FAMILIES)
def ready(request, tmp_path_factory):
    """A family's name, its folder, its processor and its own template's twin with marked answers."""
    folder = tmp_path_factory.mktemp(request.param)
    write_ready(folder, request.param)
    return request.param, folder, open_processor(folder, request.param)


@cache
def image(size) -> Image.Image:
    return Image.fromarray(np.random.default_rng(size).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def opened(folder):
    """The encoder and the image options of a folder."""
    parts = read_parts(ModelArguments(model_name_or_path=str(folder)))
    args = Arguments(ModelArguments(), DataArguments(), TrainingArguments(), frozenset())
    options = dataclasses.replace(parts.tower.image_options(args), video_fps=2)
    tokenizer = parts.open_tokenizer()
    return encoder_of(tokenizer, encoding_options(template="processor", max_length=10**6), options), options, tokenizer


class Video(NamedTuple):
    """A video of which frames are to be chosen."""

    size: tuple[int, int]
    footage: Footage


FOOTAGE = [Footage(7, 3.5), Footage(60, 29.97), Footage(100, 2.0), Footage(2, 1.0), Footage(90, 30.0)]


def used(one: Video, options: ImageOptions) -> list[int]:
    """The indices of its frames."""
    return video_frames(*one.footage, options.frame_choice)


def layout_of(one, options: ImageOptions) -> MediaLayout:
    """The layout of an image of a size, or of a video."""
    if not isinstance(one, Video):
        return media_layout("image", (one,), 1, options)
    sizes = (one.size,) * len(used(one, options))
    return media_layout("video", sizes, 1, options, one.footage)


def show(one, options: ImageOptions) -> dict:
    """The same as a part of a message for the processor."""
    if not isinstance(one, Video):
        return {"type": "image", "image": image(one)}
    return {"type": "video", "video": np.stack([frame(one.size, i) for i in used(one, options)])}


def tell_of(media, processor, options: ImageOptions) -> None:
    """Let the processor's stand-in for videos know of their times."""
    if not hasattr(processor, "video_processor"):
        return
    videos = [one for one in media if isinstance(one, Video)]
    processor.video_processor.metadata = [
        VideoMetadata(
            *one.footage, duration=one.footage.num_frames / one.footage.rate, frames_indices=used(one, options)
        )
        for one in videos
    ]


@cache
def frame(size, number: int) -> np.ndarray:
    return np.random.default_rng((*size, number)).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)


def conversations(number: int, options: ImageOptions):
    """Generated conversations: our messages, the processor's, and their images (sizes) and videos, where a model has
    them."""
    rng = np.random.default_rng(0)
    # Tensors of all videos of a conversation hold videos of one length alone in these processors.
    of_one_length = options.video is not None and options.video.processor in (
        "SmolVLMVideoProcessor",
        "InternVLVideoProcessor",
    )
    for _ in range(number):
        ours, theirs, media = [], [], []
        footage = FOOTAGE[rng.integers(len(FOOTAGE))]
        if rng.random() < 0.3:
            text = WORDS[rng.integers(len(WORDS))]
            ours.append(Message("system", text))
            theirs.append({"role": "system", "content": [{"type": "text", "text": text}]})
        for _ in range(rng.integers(1, 4)):
            texts, parts = [], []
            for _ in range(rng.integers(0, 3)):
                one = SIZES[rng.integers(len(SIZES))]
                if options.video is not None and rng.random() < 0.3:
                    one = Video(one, footage if of_one_length else FOOTAGE[rng.integers(len(FOOTAGE))])
                media.append(one)
                word = WORDS[rng.integers(len(WORDS))].strip()
                texts += [IMAGE_TOKEN, "\n" if rng.random() < 0.5 else " ", word]
                parts += [show(one, options), {"type": "text", "text": word}]
            if not parts:
                texts = [WORDS[rng.integers(len(WORDS))]]
                parts = [{"type": "text", "text": texts[0]}]
            answer = WORDS[rng.integers(len(WORDS))]
            ours += [Message("human", "".join(texts)), Message("gpt", answer)]
            theirs.append({"role": "user", "content": parts})
            theirs.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
        yield ours, theirs, media


@pytest.mark.parametrize("number", [25, pytest.param(200, marks=pytest.mark.long)])
def test_ids_and_labels_are_the_processors(ready, number):
    """Of conversations with several images and videos, one, or none, and system turns; and positions of three axes."""
    family, folder, processor = ready
    encoder, options, _ = opened(folder)
    marked = ready_models.MARKED[family]
    talks = list(conversations(number, options))
    layouts = [[layout_of(one, options) for one in media] for _, _, media in talks]
    marks = [[layout.mark for layout in each] for each in layouts]
    found = encoder.encode_batch([(ours, each) for (ours, _, _), each in zip(talks, marks)])
    config = AutoConfig.from_pretrained(folder)
    for (_, theirs, media), coded, shown in zip(talks, found, layouts):
        tell_of(media, processor, options)
        # The twin writes the same text, and says which of it is an answer.
        settings = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
        expected = processor.apply_chat_template(theirs, **settings)["input_ids"][0].tolist()
        twin = processor.apply_chat_template(
            theirs, chat_template=marked, return_assistant_tokens_mask=True, **settings
        )
        assert twin["input_ids"][0].tolist() == expected
        assert with_media_ids(coded.input_ids, shown, config).tolist() == expected
        if family in ready_models.QWEN_PROCESSORS:
            check_grids(config, coded.input_ids, shown, twin)
        learned = torch.as_tensor(twin["assistant_masks"])[0].bool().numpy()
        if family in ("smolvlm", "idefics3"):  # the space behind "Assistant:" is the answer's: nothing else writes it
            learned |= np.append(learned[1:], False) & (coded.labels != IGNORE_INDEX)
        assert np.array_equal(coded.labels != IGNORE_INDEX, learned)
        assert np.array_equal(coded.labels[learned], coded.input_ids[learned])


def test_limits_of_pixels_do_not_tell_models_apart(ready):
    """As where a second model's folder has its own limits, and a flag gives the run's."""
    _, options, _ = opened(ready[1])
    if not isinstance(options.tiling, CellTiling):
        assert options.without_limits() == options
        return
    fewer = dataclasses.replace(options, tiling=dataclasses.replace(options.tiling, most=options.tiling.most // 2))
    assert fewer != options and fewer.without_limits() == options.without_limits()


def with_media_ids(ids: np.ndarray, layouts: list[MediaLayout], config) -> np.ndarray:
    """Ids with the token of an image or a video at every feature."""
    ids = ids.copy()
    ids[ids == IMAGE_TOKEN_INDEX] = media_ids(config, layouts)
    return ids


def check_grids(config, ids: np.ndarray, layouts: list[MediaLayout], theirs) -> None:
    """Positions are get_rope_index's with the processor's grids and times."""
    given = {name: theirs[name] for name in ("image_grid_thw", "video_grid_thw") if name in theirs}
    if "second_per_grid_ts" in theirs:
        given["second_per_grid_ts"] = torch.as_tensor(theirs["second_per_grid_ts"], dtype=torch.float32)
    merge = config.vision_config.spatial_merge_size
    for name, is_video in (("image_grid_thw", False), ("video_grid_thw", True)):
        mine = [layout for layout in layouts if layout.is_video == is_video]
        expected = [[one.moments, one.cells[1] * merge, one.cells[0] * merge] for one in mine]
        assert given.get(name, torch.zeros(0, 3)).tolist() == expected
    grids = [grid for layout in layouts for grid in layout.grids]
    model = SimpleNamespace(config=config)
    with torch.device("meta"):
        kind = type(AutoModelForImageTextToText.from_config(config).model)
    model.get_vision_position_ids = partial(kind.get_vision_position_ids, model)
    types = torch.as_tensor(theirs["mm_token_type_ids"])
    expected, _ = kind.get_rope_index(model, torch.as_tensor(theirs["input_ids"]), mm_token_type_ids=types, **given)
    assert torch.equal(axis_positions(torch.from_numpy(ids.astype(np.int64)), grids), expected[:, 0])


def test_prompts_are_the_processors(ready):
    family, folder, processor = ready
    encoder, options, tokenizer = opened(folder)
    config = AutoConfig.from_pretrained(folder)
    for ours, theirs, media in conversations(10, options):
        layouts = [layout_of(one, options) for one in media]
        tell_of(media, processor, options)
        ids = np.array(encoder.prompt_ids(ours[:-1], [layout.mark for layout in layouts]))
        ids = with_media_ids(ids, layouts, config)
        expected = processor.apply_chat_template(
            theirs[:-1], tokenize=True, return_dict=True, add_generation_prompt=True, return_tensors="pt"
        )
        assert ids.tolist() == expected["input_ids"][0].tolist()
    ends = {tokenizer.eos_token, ready_models.ENDS.get(family, tokenizer.eos_token)}
    assert set(tokenizer.convert_ids_to_tokens(end_markers("processor", tokenizer))) == ends


def test_pixels_are_the_processors(ready, tmp_path):
    """They are equal bit for bit, and layouts have their number without decoding."""
    _, folder, processor = ready
    _, options, _ = opened(folder)
    config = AutoConfig.from_pretrained(folder)
    kind = config.model_type
    images = processor.image_processor
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (images.image_mean, images.image_std))

    def as_tiles(found) -> torch.Tensor:
        pixels = found["pixel_values"]
        if "image_position_ids" in found:
            pixels = pixels[found["image_position_ids"].amin(-1) >= 0]
        return (pixels if pixels.ndim == 2 else pixels.reshape(-1, *pixels.shape[-3:])).float()

    for i, size in enumerate(SIZES):
        path = tmp_path / f"{i}.png"
        image(size).save(path)
        media = Media("image", (FileRef(str(path)),))
        sizes = probe(media, options)
        layout = media_layout("image", sizes, 1, options)
        tiles = load_media(media, sizes, layout, options)
        crops = {"crop_to_patches": True} if hasattr(processor.image_processor, "crop_to_patches") else {}
        plain = {"do_rescale": False, "do_normalize": False, **crops}
        expected = processor.image_processor(image(size), return_tensors="pt", **plain)
        assert torch.equal(family_of(kind).processed(config, tiles.float(), [layout]), as_tiles(expected))
        normalised = (tiles.float() / 255 - mean) / std
        expected = processor.image_processor(image(size), return_tensors="pt", **crops)
        assert torch.equal(family_of(kind).processed(config, normalised, [layout]), as_tiles(expected))
        assert layout.num_tiles == len(tiles)
        assert torch.equal(load_media(media, sizes, layout, options, [0]), tiles[:1])


@pytest.mark.parametrize("ready", ready_models.WITH_VIDEOS, indirect=True)
def test_pixels_of_videos_are_the_processors(ready, tmp_path):
    """Of a list of frames, and of a file, which may be turned; an odd last frame counts twice."""
    _, folder, processor = ready
    _, options, _ = opened(folder)
    config = AutoConfig.from_pretrained(folder)
    images = processor.image_processor
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (images.image_mean, images.image_std))
    for i in range(5):
        Image.fromarray(frame((40, 70), i)).save(tmp_path / f"{i}.png")
    shown = [Media("frames", tuple(FileRef(str(tmp_path / f"{i}.png")) for i in range(5)))]
    if importlib.util.find_spec("av") is not None:
        shown += [write_turned(tmp_path / f"{degrees}.mp4", degrees) for degrees in (0, 90)]
    for media in shown:
        sized = SizedMedia.of(media, options)
        assert media_from_text(media_to_text((sized,))) == (sized,)
        layout = rows_module.layout_of(sized, 1, options)
        frames = [np.array(each) for each in load_images(media, sized.sizes, options)]
        assert {each.shape[:2] for each in frames} == {sized.sizes[0][::-1]}
        tiles = load_media(media, sized.sizes, layout, options)
        moments = -(-len(frames) // options.video.moment)
        assert layout.moments == moments > 1 and len(tiles) == layout.num_tiles
        found = processor.video_processor([np.stack(frames)])
        expected = found["pixel_values" if "pixel_values" in found else "pixel_values_videos"]
        if "video_position_ids" in found:
            expected = expected[found["video_position_ids"].amin(-1) >= 0]
        own = family_of(config.model_type).processed(config, (tiles.float() / 255 - mean) / std, [layout])
        assert torch.equal(own, expected[0] if expected.ndim == 5 else expected)
    assert len({SizedMedia.of(media, options).sizes for media in shown[1:]}) == len(shown[1:])


def write_turned(path, degrees: int) -> Media:
    """A video file of 5 frames of 64 x 48, to be shown turned."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=2)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.set_display_rotation(degrees)
        for i in range(5):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame((64, 48), i), format="rgb24")))
        container.mux(stream.encode())
    return Media("video", (FileRef(str(path)),))


def test_what_cannot_be_written_is_refused(ready):
    _, folder, _ = ready
    encoder, options, _ = opened(folder)
    mark = media_layout("image", ((40, 40),), 1, options).mark
    spelled = [Message("human", f"look: {options.tiling.image_token}"), Message("gpt", "a")]
    if options.tiling.image_token == IMAGE_TOKEN:
        spelled = [Message("human", f"<image> {IMAGE_TOKEN}"), Message("gpt", "a")]
    shown = [Message("human", "<image> what?"), Message("gpt", "<image>")]
    errors = encoder.encode_batch(
        [(spelled, [mark] * (options.tiling.image_token == IMAGE_TOKEN)), (shown, [mark] * 2)]
    )
    assert "image token" in str(errors[0])
    assert "images belong to questions" in str(errors[1])
    if options.video is None:
        with pytest.raises(
            DataError, match="videos of this ready model can't be read, as its processor has none: take"
        ):
            media_layout("video", ((40, 40),), 1, options)
        return
    two = Footage(2, 1.0)
    spelled = [Message("human", f"look: {options.video.token}"), Message("gpt", "a")]
    assert "video token" in str(encoder.encode_batch([(spelled, [])])[0])
    with pytest.raises(DataError, match="frames of 40 x 40 and of 40 x 41 pixels"):
        media_layout("frames", ((40, 40), (40, 41)), 1, options, two)
    if isinstance(options.video.frame, FrameCells):
        with pytest.raises(DataError, match="more than 200 times longer than wide"):
            media_layout("frames", ((1000, 2),) * 2, 1, options, two)
    if getattr(options.video.frame, "in_all", False):
        with pytest.raises(DataError, match="has 1 frames to use, and the model's processor refuses fewer than 2"):
            media_layout("frames", ((40, 40),), 1, options, Footage(1, 1.0))
    without = dataclasses.replace(options, video=None, no_videos="it is blind")
    with pytest.raises(DataError, match="videos of this ready model can't be read, as it is blind: take"):
        media_layout("video", ((40, 40),) * 2, 1, without, two)


@pytest.mark.parametrize(
    ("family", "change", "why"),
    [
        ("smolvlm", {"max_image_size": {"longest_edge": 16}}, "makes frames of 16 pixels, but tiles have 32"),
        ("internvl", {"size": {"height": 16, "width": 16}}, "makes frames of 16 pixels, but tiles have 32"),
        (
            "internvl",
            {"do_center_crop": True, "crop_size": {"height": 16, "width": 16}},
            "makes frames of 16 pixels, but tiles have 32",
        ),
        ("gemma4", {"pooling_kernel_size": 3}, "its processor says pooling_kernel_size 3, expected 2"),
        ("gemma4", {"max_soft_tokens": 151}, "max_soft_tokens 151, for which its tower has no positions"),
        ("qwen2_vl", {"do_resize": False}, "its processor says do_resize False, expected True"),
        ("qwen3_vl", {"fps": 0}, "its processor says fps 0, expected a number of 1 or more"),
        ("smolvlm", {"video_sampling": {"max_frames": 8.5}}, "says max_frames 8.5, expected a whole number"),
        ("internvl", None, "its chat template writes no <video> for one"),
    ],
)
def test_videos_that_do_not_fit_are_left_out_alone(tmp_path, family, change, why):
    """Images are read as before."""
    template = ready_models.TEMPLATES[family].replace("{{ '<video>\n' }}", "") if change is None else None
    write_ready(tmp_path, family, template=template)
    file = tmp_path / "processor_config.json"
    whole = json.loads(file.read_text())
    settings = whole.get("video_processor") or json.loads((tmp_path / "preprocessor_config.json").read_text())
    file.write_text(json.dumps({**whole, "video_processor": {**settings, **(change or {})}}))
    _, options, _ = opened(tmp_path)
    assert media_layout("image", ((40, 40),), 1, options).num_tokens
    with pytest.raises(DataError, match=f"videos of this ready model can't be read, as .*{why}: take the record out"):
        media_layout("video", ((40, 40),) * 2, 1, options, Footage(2, 1.0))
