"""Boxes and points of records: in the model's coordinates, on the right image, or refused with the reason."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import toys
from launching import ROOT
from PIL import Image, ImageDraw
from read_data import read_samples
from ready_models import FAMILIES, image_processor_of, write_ready

from llava_ds.boxes import THOUSANDTHS, BoxFormat
from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX, ConfigError
from llava_ds.data.dataset import ALONE, EncodedDataset, PreflightOptions, open_encoded
from llava_ds.data.encoded_rows import media_from_text
from llava_ds.data.images.decode import load_media
from llava_ds.data.sources import SourceOptions, open_sources
from llava_ds.extensions.ready.ready_images import ReadyImageOptions
from llava_ds.extensions.ready.ready_tilings import CellTiling
from llava_ds.geometry import coordinate_frame, media_layout
from llava_ds.model.open.model_plan import read_parts
from llava_ds.template_variables import set_variables

SIZES = [(40, 70), (70, 40), (64, 64), (200, 90), (97, 131), (300, 300)]
QUESTION, ANSWER = "<image>\nFind the <ref-object>.", "It is at <bbox>, its middle <bbox>."
# What each family's models write: a box from 0.25, 0.1 to 0.75, 0.9 of an image, and its middle.
EXPECTED = {
    **dict.fromkeys(("gemma4", "gemma4_e", "gemma4_moe"), "[100, 250, 900, 750], its middle [500, 500]"),
    "qwen2_vl": "<|box_start|>(250,100),(750,900)<|box_end|>, its middle <|box_start|>(500,500)<|box_end|>",
    "internvl": "<box>[[250, 100, 750, 900]]</box>, its middle <box>[[500, 500]]</box>",
    **dict.fromkeys(
        ("idefics3", "smolvlm", "gemma3", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
        "[250, 100, 750, 900], its middle [500, 500]",
    ),
}
NAMES = {"qwen2_vl": "<|object_ref_start|>red cat<|object_ref_end|>", "internvl": "<ref>red cat</ref>"}


def write(folder: Path, records: list[dict], sizes=SIZES) -> str:
    """Records, and grey images 0.png, 1.png, … of these sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, size in enumerate(sizes):
        Image.new("RGB", size, "grey").save(folder / f"{i}.png")
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(folder / "data.jsonl")


def record(image="0.png", question=QUESTION, answer=ANSWER, **objects) -> dict:
    talk = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return {"image": image, "conversations": talk, "objects": objects}


def opened(path: str, tokenizer, images, encoding=None, **options) -> EncodedDataset:
    cache = str(Path(path).parent / "cache")
    sources = open_sources(path, SourceOptions(image_folder=str(Path(path).parent), cache_dir=cache, **options))
    preflight = PreflightOptions(cache_dir=cache, num_workers=1, on_bad_sample="list")
    return open_encoded(sources, tokenizer, encoding or toys.encoding_options(), images, preflight, ALONE)


def texts(dataset: EncodedDataset, tokenizer) -> list[tuple[str, str]]:
    """All text of each sample, and the supervised part of it."""
    found = []
    for i in range(len(dataset)):
        row = dataset.row(int(dataset.rows[i]))
        ids = [token for token in row["input_ids"] if token != IMAGE_TOKEN_INDEX]
        labels = [label for label in row["labels"] if label != IGNORE_INDEX]
        found.append(tuple(tokenizer.decode(each, clean_up_tokenization_spaces=False) for each in (ids, labels)))
    return found


def reasons(dataset: EncodedDataset) -> list[str]:
    return [row["reason"] for row in dataset.rejections()]


def ready_parts(folder: Path, family: str, **flags):
    """Tokenizer and image options of a random ready model."""
    model = ModelArguments(**write_ready(folder, family))
    parts = read_parts(model)
    args = Arguments(ModelArguments(), DataArguments(**flags), TrainingArguments(), frozenset())
    tokenizer = parts.open_tokenizer()
    set_variables(tokenizer, model.chat_template_kwargs, "processor")
    return tokenizer, parts.tower.image_options(args)


@pytest.mark.parametrize("family", FAMILIES)
def test_boxes_are_in_the_familys_coordinates(family, tmp_path):
    """Those of Qwen2.5-VL are pixels of the image as transformers' own processor resizes it."""
    tokenizer, options = ready_parts(tmp_path / "model", family)
    records, resized = [], []
    for i, (width, height) in enumerate(SIZES):
        box = [0.25 * width, 0.1 * height, 0.75 * width, 0.9 * height]
        middle = [0.5 * width, 0.5 * height]
        records.append(record(f"{i}.png", ref=["red cat"], bbox=[box, middle]))
        if family == "qwen2_5_vl":
            images = image_processor_of(family)
            [(_, rows, columns)] = images(Image.new("RGB", (width, height)), return_tensors="pt")["image_grid_thw"]
            resized.append((int(columns) * images.patch_size, int(rows) * images.patch_size))
    dataset = opened(
        write(tmp_path / "data", records),
        tokenizer,
        options,
        toys.encoding_options(template="processor", max_length=4096),
    )
    assert reasons(dataset) == []
    for i, (whole, supervised) in enumerate(texts(dataset, tokenizer)):
        expected = EXPECTED.get(family)
        if family == "qwen2_5_vl":
            w, h = resized[i]
            box = [round(0.25 * w), round(0.1 * h), round(0.75 * w), round(0.9 * h)]
            expected = f"{box}, its middle {[round(w / 2), round(h / 2)]}"
        assert f"It is at {expected}." in supervised and "<bbox>" not in whole
        assert f"Find the {NAMES.get(family, 'red cat')}." in whole
    if family == "qwen2_5_vl":
        assert all(size != (w, h) for size, (w, h) in zip(SIZES[:2], resized)) and len(set(resized)) > 3
    assert any(line.startswith("boxes are written as ") for line in dataset.summary())


def test_bounds_of_pixels_move_qwens_boxes(tmp_path):
    """--max_pixels makes the image smaller, and Qwen2.5-VL's numbers with it."""
    path = write(tmp_path / "data", [record("5.png", ref=["cat"], bbox=[[0, 0, 300, 300], [150, 150]])])
    encoding = toys.encoding_options(template="processor", max_length=4096)
    found = []
    for i, flags in enumerate(({}, {"max_pixels": 48 * 48})):
        tokenizer, options = ready_parts(tmp_path / str(i), "qwen2_5_vl", **flags)
        dataset = opened(path, tokenizer, options, encoding)
        found.append((texts(dataset, tokenizer)[0][1], dataset.fingerprint))
    assert "[0, 0, 128, 128]" in found[0][0] and "[0, 0, 48, 48]" in found[1][0]
    assert found[0][1] != found[1][1]


@pytest.mark.parametrize(
    ("ratio", "stretch", "size"),
    [("pad", False, (96, 48)), ("pad", False, (40, 120)), ("square", True, (96, 48)), ("square", False, (80, 80))],
)
def test_llavas_fractions_are_of_the_tile_that_the_tower_sees(ratio, stretch, size, tmp_path, tokenizer):
    """A coloured object lies in the tile where its fractions say."""
    options = toys.image_options(size=96, patch_size=8, aspect_ratio=ratio, stretch=stretch)
    box = (size[0] // 4, size[1] // 2, size[0] * 3 // 4, size[1] * 7 // 8)
    path = write(tmp_path, [record(ref=["cat"], bbox=[box, [box[0], box[1]]])], [size])
    image = Image.new("RGB", size, "white")
    ImageDraw.Draw(image).rectangle((*box[:2], box[2] - 1, box[3] - 1), fill="blue")
    image.save(tmp_path / "0.png")
    dataset = opened(path, tokenizer, options)
    row = dataset.row(0)
    [one] = media_from_text(row["media"])
    [numbers, point] = one.boxes
    assert point == numbers[:2] and all(round(number, 2) == number and 0 <= number <= 1 for number in numbers)
    assert f"It is at {list(numbers)}, its middle {list(point)}." in texts(dataset, tokenizer)[0][1]
    [tile] = load_media(one.media, one.sizes, media_layout("image", one.sizes, 1, options), options).numpy()
    is_blue = (tile[2] > 200) & (tile[0] < 60)  # (96, 96)
    rows, columns = np.nonzero(is_blue)
    seen = np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]) / 96
    assert np.abs(seen - numbers).max() < 0.02  # a pixel of the tile is 0.0104


def test_an_image_that_is_cropped_has_no_boxes(tmp_path, tokenizer):
    path = write(tmp_path, [record(bbox=[[1, 2, 30, 40], [5, 5]], ref=["cat"])])
    [reason] = reasons(opened(path, tokenizer, toys.image_options()))
    assert (
        "40 x 70 pixels, but --image_aspect_ratio square crops it to its centre: give --image_aspect_ratio pad"
        in reason
    )


def test_anyres_takes_the_image_and_with_several_images_the_padded_square():
    options = toys.image_options(aspect_ratio="anyres", merge_type="spatial_unpad")
    assert coordinate_frame((100, 50), 1, options).numbers((50, 25, 100, 50)) == (0.5, 0.5, 1.0, 1.0)
    assert coordinate_frame((100, 50), 2, options).numbers((50, 25, 100, 50)) == (0.5, 0.5, 1.0, 0.75)


def test_numbers_and_pixels_are_inverse():
    rng = np.random.default_rng(0)
    tiling = CellTiling(28, 2, 56 * 56, 28 * 28 * 64, "<i>")
    for kind, tolerance in (("real", 0.5), ("norm1000", 0.5), ("norm1", 0.005)):
        ready = ReadyImageOptions(28, 28, (0.5,) * 3, tiling=tiling, boxes=BoxFormat(kind))
        for options in (ready, toys.image_options(aspect_ratio="pad")):
            size = tuple(rng.integers(30, 900, 2).tolist())
            frame = coordinate_frame(size, 1, options)
            pixels = np.sort(rng.random((2, 2)), 0).reshape(-1) * np.tile(size, 2)
            unit = (0.005 if options is not ready else tolerance) * np.tile(frame.size, 2) / np.tile(frame.units, 2)
            assert (np.abs(frame.pixels(frame.numbers(pixels)) - pixels) <= unit + 1e-9).all()


def test_boxes_are_on_the_image_that_the_record_says(tmp_path, tokenizer):
    talk = [
        {"role": "user", "content": "<image><image>\nWhich is larger, <bbox> or <bbox>?"},
        {"role": "assistant", "content": "The second, <bbox>."},
    ]
    objects = {"bbox": [[0, 0, 20, 35], [0, 0, 70, 40], [35, 20]], "image_id": [0, 1, 1]}
    records = [{"images": ["0.png", "1.png"], "messages": talk, "objects": {**objects, "ref": []}}]
    options = toys.image_options(aspect_ratio="pad")
    dataset = opened(write(tmp_path, records), tokenizer, options)
    # 40 x 70, padded by 15 left and right; 70 x 40, by 15 above and below.
    [(whole, supervised)] = texts(dataset, tokenizer)
    assert "[0.21, 0.0, 0.5, 0.5] or [0.0, 0.21, 1.0, 0.79]?" in whole and "The second, [0.5, 0.5]." in supervised
    assert [one.boxes for one in media_from_text(dataset.row(0)["media"])] == [
        ((0.21, 0.0, 0.5, 0.5),),
        ((0.0, 0.21, 1.0, 0.79), (0.5, 0.5)),
    ]


def test_the_option_and_the_record_say_the_coordinates(tmp_path, tokenizer):
    """The record wins; each coordinates give the same text, and other data than another option."""
    options = toys.image_options(aspect_ratio="pad")
    same = {"real": [10, 35, 30, 70], "norm1": [0.25, 0.5, 0.75, 1], "norm1000": [250, 500, 750, 1000]}
    answer = "At <bbox>."
    prints = set()
    for kind, box in same.items():
        path = write(tmp_path / kind, [record(answer=answer, ref=["cat"], bbox=[box])])
        [(_, supervised)] = texts(opened(path, tokenizer, options, bbox_type=kind), tokenizer)
        assert "At [0.36, 0.5, 0.64, 1.0]." in supervised
    path = write(tmp_path / "said", [record(answer=answer, ref=["cat"], bbox=[same["norm1"]], bbox_type="norm1")])
    for other in same:
        dataset = opened(path, tokenizer, options, bbox_type=other)
        assert texts(dataset, tokenizer)[0][1] == supervised
        prints.add(dataset.fingerprint)
    assert len(prints) == 3


def test_a_mixtures_entries_have_coordinates_of_their_own(tmp_path, tokenizer):
    for name, box in (("a", [10, 35, 30, 70]), ("b", [0.25, 0.5, 0.75, 1])):
        write(tmp_path / name, [record(answer="At <bbox>.", ref=["cat"], bbox=[box])])
    mixture = tmp_path / "mixture.yaml"
    entry = "- {{path: {0}/data.jsonl, image_folder: {0}{1}}}\n"
    mixture.write_text("datasets:\n" + entry.format("a", "") + entry.format("b", ", bbox_type: norm1"))
    dataset = opened(str(mixture), tokenizer, toys.image_options(aspect_ratio="pad"))
    first, second = texts(dataset, tokenizer)
    assert first == second and "[0.36, 0.5, 0.64, 1.0]" in first[1]
    mixture.write_text("datasets:\n" + entry.format("a", ", bbox_type: norm"))
    with pytest.raises(ConfigError, match="entry 0: bbox_type is 'norm', expected real or norm1 or norm1000"):
        opened(str(mixture), tokenizer, toys.image_options(aspect_ratio="pad"))


def test_parquet_has_objects_too(tmp_path, tokenizer):
    write(tmp_path, [])
    rows = [record(ref=["cat"], bbox=[[10.0, 35.0, 30.0, 70.0], [20.0, 35.0]]), {**record(), "objects": None}]
    rows[1]["conversations"] = [{"from": "human", "value": "What is it?"}, {"from": "gpt", "value": "two"}]
    pa.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "data.parquet")
    dataset = opened(str(tmp_path / "data.parquet"), tokenizer, toys.image_options(aspect_ratio="pad"))
    assert "It is at [0.36, 0.5, 0.64, 1.0], its middle [0.5, 0.5]." in texts(dataset, tokenizer)[0][1]


def test_the_pages_program_turns_llavas_data_into_objects(tmp_path, tokenizer, monkeypatch):
    """A LLaVA that pads is told the same afterwards, but for rounding at the image's edges."""
    [program] = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "grounding.md").read_text(), re.S | re.M)
    boxes = ["[0.21, 0.0, 0.5, 0.5]", "[0.3, 0.25, 0.79, 1.0]"]
    talk = [f"<image>\nWhat is in {boxes[0]}?", "A cat.", "And what else?", f"A dog: {boxes[1]}, not [1, 2, 3, 4]."]
    turns = [{"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(talk)]
    before = {"image": "0.png", "conversations": turns}
    write(tmp_path / "images", [])
    (tmp_path / "llava.json").write_text(json.dumps([before]))
    monkeypatch.chdir(tmp_path)
    exec(program, {})
    [after] = json.loads(Path("boxes.json").read_text())
    assert after["objects"]["bbox"] == [
        pytest.approx([0, 0, 20, 35], abs=0.5),
        pytest.approx([6, 17.5, 40, 70], abs=0.5),
    ]
    options = toys.image_options(aspect_ratio="pad")
    found = [
        texts(opened(write(tmp_path / "images" / name, [each]), tokenizer, options), tokenizer)
        for name, each in (("before", before), ("after", after))
    ]
    assert found[0] == found[1] and boxes[1] in found[1][0][1]


def test_without_marks_the_field_may_be_anything(tmp_path, tokenizer):
    plain = record(question="<image>\nWhat is it?", answer="A cat.")
    records = [{**plain, "objects": each} for each in ([{"label": "cat"}], {"bbox": "x", "area": 3}, None)]
    del plain["objects"]
    options = toys.image_options(aspect_ratio="pad")
    dataset = opened(write(tmp_path / "a", [*records, plain]), tokenizer, options)
    assert reasons(dataset) == [] and len(set(texts(dataset, tokenizer))) == 1
    assert not any("boxes" in line for line in dataset.summary())


def test_other_words_for_boxes_are_other_data_where_there_are_any(tmp_path):
    """Models of families that differ in them alone, so that also the samples' lengths are the same."""
    tokenizer, own = ready_parts(tmp_path / "model", "qwen2_vl")
    kinds = [replace(own, boxes=boxes) for boxes in (THOUSANDTHS, replace(THOUSANDTHS, box="({}, {}, {}, {})"))]
    encoding = toys.encoding_options(template="processor", max_length=4096)
    with_boxes = write(tmp_path / "a", [record(ref=["cat"], bbox=[[1, 2, 30, 40], [5, 5]])])
    without = write(tmp_path / "b", [record(question="<image>\nWhat is it?", answer="A cat.")])
    for path, same in ((with_boxes, False), (without, True)):
        one, other = (opened(path, tokenizer, each, encoding) for each in kinds)
        assert one.lengths.tolist() == other.lengths.tolist()
        assert (one.fingerprint == other.fingerprint) == same


GOOD = [[1, 2, 30, 9], [5, 5]]
# What is under objects, and a part of the reason.
BAD = [
    (
        {"bbox": [[1, 2, 43, 9], [5, 5]]},
        "[1, 2, 43, 9] (real) on an image of 40 x 70 pixels, outside the image",
    ),
    ({"bbox": [[1, -3, 30, 9], [5, 5]]}, "outside the image: check --bbox_type"),
    ({"bbox": [[1, 2, 30, 9], [5, 72]]}, "[5, 72] (real)"),
    ({"bbox": [[30, 2, 1, 9], [5, 5]]}, "expected left, top, right, bottom, with left < right and top < bottom"),
    ({"bbox": [[1, 9, 30, 2], [5, 5]]}, "with left < right and top < bottom"),
    ({"bbox": [[-0.8, 2, -0.1, 9], [5, 5]]}, "with left < right and top < bottom"),
    ({"bbox": [[1, 2, 1, 9], [5, 5]]}, "with left < right and top < bottom"),
    ({"bbox": [[0.1, 0.2, 0.5, 0.6], [5, 5]]}, "smaller than a pixel: for fractions, give --bbox_type norm1"),
    ({"bbox": GOOD, "bbox_type": "norm1"}, "check --bbox_type"),
    ({"bbox": [[1, 2, 3], [5, 5]]}, "has the box [1, 2, 3], expected left, top, right and bottom, or x and y"),
    ({"bbox": [["1", 2, 3, 4], [5, 5]]}, "has the box ['1', 2, 3, 4], expected"),
    ({"bbox": [[True, 2, 3, 4], [5, 5]]}, "has the box [True, 2, 3, 4], expected"),
    ({"bbox": [[float("nan"), 2, 3, 4], [5, 5]]}, "has the box [nan, 2, 3, 4], expected"),
    ({"bbox": [[1, 2, 10**400, 4], [5, 5]]}, "has the box [1, 2, 1000"),
    ({"bbox": {"a": 1}}, "under 'bbox' of 'objects', expected {"),
    ({"bbox": GOOD[:1]}, "has 1 under 'bbox' of 'objects', but its text has 2 <bbox> marks: make them equal"),
    ({"bbox": GOOD, "ref": []}, "has 0 under 'ref' of 'objects', but its text has 1 <ref-object> marks"),
    ({"bbox": GOOD, "ref": ["<image>"]}, "has '<image>' under 'ref' of 'objects', expected a name without marks"),
    ({"bbox": GOOD, "ref": ["a\nb"]}, "expected a name without marks"),
    ({"bbox": GOOD, "ref": [3]}, "expected a name without marks"),
    ({"bbox": GOOD, "bbox_type": "xywh"}, "has the bbox_type 'xywh' in 'objects', expected real or norm1 or norm1000"),
    ({"bbox": GOOD, "image_ids": [0, 0]}, "has the key 'image_ids' in 'objects': did you mean image_id?"),
    ({"bbox": GOOD, "image_id": [0, 1]}, "expected one of its 1 images, from 0, for each of its 2 boxes"),
    ({"bbox": GOOD, "image_id": [0]}, "expected one of its 1 images, from 0, for each of its 2 boxes"),
]


def test_what_is_no_box_is_a_bad_record(tmp_path, tokenizer):
    """Each with its reason, and none of them ends the reading."""
    records = [record(**{"ref": ["cat"], **objects}) for objects, _ in BAD]
    dataset = opened(write(tmp_path, records), tokenizer, toys.image_options(aspect_ratio="pad"))
    for (_, expected), reason in zip(BAD, reasons(dataset), strict=True):
        assert expected in reason


def test_marks_need_their_field_and_several_images_their_numbers(tmp_path, tokenizer):
    missing = record()
    del missing["objects"]
    two = record(["0.png", "1.png"], f"<image>{QUESTION}", ref=["cat"], bbox=[[1, 2, 30, 9], [5, 5]])
    video = {**record(ref=["cat"], bbox=[[1, 2, 30, 9], [5, 5]]), "video": ["0.png", "1.png"]}
    del video["image"]
    dataset = opened(
        write(tmp_path, [missing, {**missing, "objects": [1]}, two, video]),
        tokenizer,
        toys.image_options(aspect_ratio="pad"),
    )
    first, second, third, fourth = reasons(dataset)
    assert first.startswith("has nothing under 'objects' for the marks in its text, expected {") and "has [1]" in second
    assert "has 2 images, and does not say which one its boxes are on" in third
    assert "one of its 0 images" in fourth


def test_rounding_may_put_a_box_a_pixel_outside(tmp_path, tokenizer):
    path = write(tmp_path, [record(ref=["cat"], bbox=[[-0.4, 0, 40.9, 70.01], [40.5, 70]])])
    [(_, supervised)] = texts(opened(path, tokenizer, toys.image_options(aspect_ratio="pad")), tokenizer)
    assert "It is at [0.21, 0.0, 0.79, 1.0], its middle [0.79, 1.0]." in supervised


def test_both_answers_of_a_preference_may_have_them_in_their_question(tmp_path):
    preference = {**record(ref=["cat"], bbox=[[10, 35, 30, 70]]), "chosen": "yes", "rejected": "two"}
    preference["conversations"] = [{"from": "human", "value": "<image>\nIs <bbox> the <ref-object>?"}]
    path = write(tmp_path, [preference])
    options = SourceOptions(image_folder=str(tmp_path), are_preferences=True)
    [sample] = read_samples(path, None, options)
    assert sample.boxes and sample.messages[0] == sample.rejected[0] and sample.rejected[-1].text == "two"
