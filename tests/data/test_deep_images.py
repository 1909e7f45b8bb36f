"""Images of 16 and 32 bits and of floats: their 8 bits, the line about those that lose them, and a range of values."""

import dataclasses
import itertools
import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
import toys
from PIL import Image

from llava_ds.config.bounds import range_of_values
from llava_ds.config.parsing import parse_arguments
from llava_ds.constants import ConfigError, DataError
from llava_ds.data.fingerprint import options_part
from llava_ds.data.images.decode import load_image, load_media
from llava_ds.data.images.deep_images import deep_images_line
from llava_ds.data.images.headers import probe
from llava_ds.data.sample import FileRef, Media
from llava_ds.geometry import ImageOptions, media_layout

SIZE = 24
OPTIONS = ImageOptions(SIZE, 8, (0.5, 0.5, 0.5))


def ramp(low: float, high: float, dtype) -> np.ndarray:
    return np.tile(np.linspace(low, high, 48), (32, 1)).astype(dtype)


def write(kind: str, folder):
    """An image file of a kind, and the least and the most of its values."""
    file = folder / f"{kind.replace(' ', '_')}.tif"
    if kind == "10 bits in 16":
        file = file.with_suffix(".png")
        Image.fromarray(ramp(0, 1023, np.uint16)).save(file)
        return file, 0, 1023
    if kind == "14 bits in a grey map":
        file = file.with_suffix(".pgm")
        Image.fromarray(ramp(100, 1100, np.uint16)).save(file)
        return file, 100, 1100
    if kind == "tomography, signed 16 bits":
        Image.fromarray(ramp(-1024, 3071, np.int16).view(np.uint16)).save(file, tiffinfo={339: 2})
        return file, -1024, 3071
    if kind == "depth in metres":
        Image.fromarray(ramp(0.4, 9.6, np.float32)).save(file)
        return file, np.float32(0.4), np.float32(9.6)
    if kind == "counts of 32 bits":
        Image.fromarray(ramp(70_000, 900_000, np.int32)).save(file)
        return file, 70_000, 900_000
    if kind == "heights below the sea":
        Image.fromarray(ramp(-4000, -10, np.float32)).save(file)
        return file, -4000, -10
    raise KeyError(kind)


KINDS = [
    "10 bits in 16", "14 bits in a grey map", "tomography, signed 16 bits", "depth in metres", "counts of 32 bits",
    "heights below the sea",
]  # fmt: skip


def notes_of(file, options=OPTIONS) -> list[str]:
    notes: list[str] = []
    probe(Media("image", (FileRef(str(file)),)), options, notes)
    return notes


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_that_loses_its_range_is_named_and_a_range_shows_it(kind, tmp_path):
    file, low, high = write(kind, tmp_path)
    [note] = notes_of(file)
    assert note.startswith(f"{file}, ") and f"from {low:g} to {high:g}, black to white 0 to " in note
    expected = np.rint(np.linspace(0, 255, 48))
    for value_range in ("image", f"{low:.9g},{high:.9g}"):
        row = np.asarray(load_image(file, value_range=value_range))[0]
        assert (row[:, 0] == row[:, 2]).all() and np.abs(row[:, 0].astype(int) - expected).max() <= 1
        assert notes_of(file, dataclasses.replace(OPTIONS, value_range=value_range)) == []
    options = dataclasses.replace(OPTIONS, value_range="image")
    media, sizes = Media("image", (FileRef(str(file)),)), ((48, 32),)
    tile = load_media(media, sizes, media_layout("image", sizes, 1, options), options)
    assert tile.max() - tile.min() > 100


@pytest.mark.parametrize(
    ("array", "value_range"),
    [
        (np.arange(65536, dtype=np.uint16).reshape(256, 256), "0,65535"),
        (ramp(-20, 300, np.float32), "0,255"),
        (ramp(0, 255, np.int32), "0,255"),
    ],
)
def test_the_default_is_a_range_of_its_own(array, value_range, tmp_path):
    Image.fromarray(array).save(tmp_path / "a.tif")
    before, now = (np.asarray(load_image(tmp_path / "a.tif", value_range=each)) for each in (None, value_range))
    assert (before == now).all()
    if array.dtype == np.uint16:
        assert (before[..., 0] == (array.astype(int) + 128) // 257).all()


def test_images_that_use_their_range_are_not_named(tmp_path):
    arrays = {
        "whole": ramp(0, 65535, np.uint16), "night": ramp(0, 5000, np.uint16), "float": ramp(0, 255, np.float32),
        "mask": ramp(0, 3, np.uint8), "one": ramp(0, 1, bool),
    }  # fmt: skip
    for name, array in arrays.items():
        Image.fromarray(array).save(tmp_path / f"{name}.png" if array.dtype != np.float32 else tmp_path / f"{name}.tif")
    assert [note for file in sorted(tmp_path.iterdir()) for note in notes_of(file)] == []
    Image.fromarray(ramp(-30, 270, np.float32)).save(tmp_path / "clipped.tif")  # 15 % lie outside
    assert len(notes_of(tmp_path / "clipped.tif")) == 1


@pytest.mark.parametrize(("most", "is_named"), [(4095, True), (4096, False)])
def test_twelve_bits_are_just_less_than_a_sixteenth(most, is_named, tmp_path):
    Image.fromarray(ramp(0, most, np.uint16)).save(tmp_path / "a.png")
    assert bool(notes_of(tmp_path / "a.png")) == is_named


def test_an_image_of_one_value_is_black_with_its_own_range(tmp_path):
    for number, array in enumerate([np.full((8, 8), 700, np.uint16), np.full((8, 8), 0.5, np.float32)]):
        Image.fromarray(array).save(tmp_path / f"{number}.tif")
        assert np.asarray(load_image(tmp_path / f"{number}.tif", value_range="image")).max() == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_floats_that_are_no_numbers_are_refused_by_name(value, tmp_path):
    array = ramp(0, 255, np.float32)
    array[3, 4] = value
    Image.fromarray(array).save(tmp_path / "a.tif")
    for act in (load_image, notes_of):
        with pytest.raises(DataError, match=r"a\.tif .* not finite \(NaN or infinity\)"):
            act(tmp_path / "a.tif")


def test_unsigned_integers_of_32_bits_are_taken_as_such(tmp_path):
    """Pillow reads them as signed ones."""
    values = ramp(0, 2**32 - 1, np.uint32)
    Image.fromarray(values.view(np.int32)).save(tmp_path / "a.tif")
    signed, unsigned = (struct.pack("<HHIHH", 339, 3, 1, kind, 0) for kind in (2, 1))  # SampleFormat
    content = (tmp_path / "a.tif").read_bytes()
    assert content.count(signed) == 1
    (tmp_path / "a.tif").write_bytes(content.replace(signed, unsigned))
    row = np.asarray(load_image(tmp_path / "a.tif", value_range="0,4294967295"))[0, :, 0]
    assert np.abs(row.astype(int) - np.linspace(0, 255, 48)).max() <= 1
    assert "integers from 0 to 4.29497e+09, black to white 0 to 65535" in str(notes_of(tmp_path / "a.tif"))


def test_colours_of_16_bits_that_pillow_reads_with_8_are_named(tmp_path):
    rows = np.repeat(ramp(0, 4000, np.uint16)[..., None], 3, -1).astype(">u2")
    packed = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", 48, 32, 16, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + parts)
    [note] = notes_of(tmp_path / "a.png")
    assert note.endswith("a.png, 16 bits per channel, up to 4095 of 65535, read as 8 bits")


@pytest.mark.parametrize("text", ["", "0", "5,5", "9,1", "0,nan", "-inf,3", "a,b", "0,1,2", "own"])
def test_what_is_no_range_is_refused(text):
    with pytest.raises(ConfigError, match=r"is not a range of values: give the values for black and white"):
        range_of_values(text)
    with pytest.raises(ConfigError, match="--image_value_range"):
        parse_arguments([f"--image_value_range={text}"], to_train=False)


@pytest.mark.parametrize("given", [["--image_value_range", "-1024,3071"], ["--image-value-range", "-1024,3071"]])
def test_a_range_may_begin_with_a_minus(given):
    assert parse_arguments(given, to_train=False)[0].data.image_value_range == "-1024,3071"


def test_the_fingerprint_is_another_one_with_a_range_and_the_old_one_without():
    assert "value_range" not in options_part(OPTIONS)
    texts = [options_part(dataclasses.replace(OPTIONS, value_range=each)) for each in (None, "image", "0,4095")]
    assert all(one != other for one, other in itertools.combinations(texts, 2))


def test_the_line_counts_and_names_the_first():
    line = deep_images_line(1200, ["a.tif, floats", "b.tif, floats"])
    assert line.startswith("1,200 images use less than 1/16 of their range, or exceed it: a.tif, floats; b.tif")
    assert "and 1,198 more: --image_value_range scales" in line
    assert deep_images_line(1, ["a.tif, floats"]).startswith("1 image uses less")


def test_a_data_set_says_so_at_every_start(tmp_path, tokenizer):
    """Each image once, also from the cache and of its parts; images of rejected records are not counted."""
    data = toys.write_data(tmp_path / "data", "iiiit")
    folder, path = Path(data["image_folder"]), Path(data["data_path"])
    records = json.loads(path.read_text())
    assert toys.encoded(**data, tokenizer=tokenizer, cache_dir=tmp_path / "c").index.facts["deep"]["number"] == 0
    for record, kind in zip(records[:4], KINDS):
        record["image"] = write(kind, folder)[0].name
    records[1]["image"] = records[0]["image"]
    records[3]["conversations"] = 3
    path.write_text(json.dumps(records))
    options = {"tokenizer": tokenizer, "cache_dir": tmp_path / "c", "max_bad_fraction": 1.0}
    for _ in range(2):  # the second one is from the cache
        dataset = toys.encoded(**data, **options)
        [line] = [line for line in dataset.summary() if "of their range" in line]
        assert line.startswith("2 images use less than 1/16 of their range, or exceed it: ")
        assert records[0]["image"] in line and records[2]["image"] in line and "--image_value_range" in line
    rest, held_out = dataset.without_part(0.5, 0)
    counts = [part.index.facts["deep"]["number"] for part in (rest, held_out)]
    assert 2 <= sum(counts) <= 3 and max(counts) <= 2
    images = toys.image_options(value_range="image")
    scaled = toys.encoded(**data, **options, images=images)
    assert scaled.fingerprint != dataset.fingerprint
    assert not any("of their range" in line for line in scaled.summary())
    assert not torch.equal(scaled[0].media[0][0], dataset[0].media[0][0])
