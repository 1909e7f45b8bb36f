"""Pictures as a person sees them, and pixels as transformers makes them."""

import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPImageProcessorPil, LlavaImageProcessorPil

from llava_ds.constants import DataError
from llava_ds.data.images import load_image, to_pixels

SIZE = 24
MEAN = (0.48145466, 0.4578275, 0.40821073)
MANY = 10**9


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def sizes() -> list[tuple[int, int]]:
    rng = np.random.default_rng(0)
    special = [(24, 24), (1, 1), (1, 60), (60, 1), (23, 24), (25, 24), (24, 25), (48, 48), (49, 97), (200, 3), (5, 23)]
    return special + [tuple(map(int, rng.integers(2, 120, 2))) for _ in range(80)]


@pytest.mark.parametrize("aspect_ratio", ["square", "pad"])
def test_pixels_equal_transformers_bit_for_bit(aspect_ratio):
    settings = {
        "size": {"shortest_edge": SIZE},
        "crop_size": {"height": SIZE, "width": SIZE},
        "image_mean": MEAN,
        "do_rescale": False,
        "do_normalize": False,
    }
    processor = CLIPImageProcessorPil(**settings)
    if aspect_ratio == "pad":
        processor = LlavaImageProcessorPil(do_pad=True, **settings)
    for i, (width, height) in enumerate(sizes()):
        picture = noise(width, height, i)
        ours = to_pixels(picture, SIZE, aspect_ratio, MEAN)
        assert ours.dtype == torch.uint8 and ours.shape == (3, SIZE, SIZE) and ours.is_contiguous()
        theirs = torch.as_tensor(np.asarray(processor(picture)["pixel_values"][0]))
        assert torch.equal(ours.to(theirs.dtype), theirs), (width, height)


def test_pad_keeps_everything_and_square_cuts_the_sides():
    picture = Image.new("RGB", (72, 24), "red")
    picture.paste((0, 0, 255), (0, 0, 12, 24))
    assert (to_pixels(picture, SIZE, "square", MEAN)[2] == 0).all()
    padded = to_pixels(picture, SIZE, "pad", MEAN)
    assert padded[:, 12, 1].tolist() == [0, 0, 255]
    assert padded[:, 0, 0].tolist() == [int(value * 255) for value in MEAN]


def pixel(path, x: int = 0, y: int = 0) -> tuple[int, ...]:
    image = load_image(str(path), MANY)
    assert image.mode == "RGB"
    return image.getpixel((x, y))


@pytest.mark.parametrize(
    ("orientation", "corner"),
    [(1, "top left"), (2, "top right"), (3, "bottom right"), (4, "bottom left"),
     (5, "top left"), (6, "top right"), (7, "bottom right"), (8, "bottom left")],
)  # fmt: skip
def test_a_picture_is_turned_as_its_exif_says(tmp_path, orientation, corner):
    stored = Image.new("RGB", (30, 20), "white")
    stored.paste((255, 0, 0), (0, 0, 4, 4))  # where the stored picture begins
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / "a.png", exif=exif)
    image = load_image(str(tmp_path / "a.png"), MANY)
    assert image.size == ((30, 20) if orientation < 5 else (20, 30))
    x = 0 if "left" in corner else image.width - 1
    y = 0 if "top" in corner else image.height - 1
    assert image.getpixel((x, y)) == (255, 0, 0)
    assert image.getpixel((image.width - 1 - x, image.height - 1 - y)) == (255, 255, 255)


def test_transparent_parts_are_white(tmp_path):
    rgba = Image.new("RGBA", (2, 1), (200, 0, 0, 0))
    rgba.putpixel((1, 0), (0, 100, 0, 255))
    rgba.save(tmp_path / "rgba.png")
    assert pixel(tmp_path / "rgba.png") == (255, 255, 255) and pixel(tmp_path / "rgba.png", 1) == (0, 100, 0)

    Image.new("RGBA", (1, 1), (0, 0, 0, 128)).save(tmp_path / "half.png")
    assert all(abs(value - 127) <= 1 for value in pixel(tmp_path / "half.png"))

    Image.new("LA", (1, 1), (0, 0)).save(tmp_path / "la.png")
    assert pixel(tmp_path / "la.png") == (255, 255, 255)

    palette = Image.new("P", (2, 1), 0)
    palette.putpalette([10, 20, 30, 200, 0, 0])
    palette.putpixel((1, 0), 1)
    palette.save(tmp_path / "palette.png", transparency=0)
    assert pixel(tmp_path / "palette.png") == (255, 255, 255) and pixel(tmp_path / "palette.png", 1) == (200, 0, 0)
    palette.save(tmp_path / "palette.gif", transparency=0)
    assert pixel(tmp_path / "palette.gif") == (255, 255, 255) and pixel(tmp_path / "palette.gif", 1) == (200, 0, 0)

    Image.new("RGB", (1, 1), (9, 9, 9)).save(tmp_path / "key.png", transparency=(9, 9, 9))
    assert pixel(tmp_path / "key.png") == (255, 255, 255)


def test_palette_grey_and_bilevel_pictures_keep_their_colours(tmp_path):
    palette = Image.new("P", (1, 1), 1)
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.save(tmp_path / "palette.png")
    assert pixel(tmp_path / "palette.png") == (40, 50, 60)
    Image.new("L", (1, 1), 77).save(tmp_path / "grey.png")
    assert pixel(tmp_path / "grey.png") == (77, 77, 77)
    Image.new("1", (1, 1), 1).save(tmp_path / "bilevel.png")
    assert pixel(tmp_path / "bilevel.png") == (255, 255, 255)


@pytest.mark.parametrize("suffix", ["jpg", "tif"])
def test_cmyk_comes_out_in_its_colours(tmp_path, suffix):
    Image.new("RGB", (16, 16), (250, 40, 10)).convert("CMYK").save(tmp_path / f"a.{suffix}")
    assert all(abs(a - b) < 12 for a, b in zip(pixel(tmp_path / f"a.{suffix}", 8, 8), (250, 40, 10)))


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_sixteen_bits_are_scaled_and_not_cut_off(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    values = np.linspace(0, 65535, 256).astype(np.uint16)[None]
    Image.fromarray(values).save(path)
    got = np.asarray(load_image(str(path), MANY))[0, :, 0]
    assert np.abs(got.astype(int) - np.arange(256)).max() <= 1


def test_a_dark_picture_of_sixteen_bits_stays_dark(tmp_path):
    Image.fromarray(np.full((4, 4), 200, np.uint16)).save(tmp_path / "night.png")
    assert max(pixel(tmp_path / "night.png")) <= 1


def png_header_only(width: int, height: int) -> bytes:
    """A PNG that announces a size and holds no pixels: whoever decodes it fails."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


@pytest.mark.parametrize(("width", "height"), [(101, 100), (12_000, 12_000)])
def test_a_picture_over_the_bound_is_refused_without_decoding(tmp_path, width, height):
    path = tmp_path / "bomb.png"
    path.write_bytes(png_header_only(width, height))
    with pytest.raises(DataError) as caught:
        load_image(str(path), 10_000)
    assert f"{path} has {width} x {height} pixels, more than the bound of 10000" in str(caught.value)


def test_a_picture_that_pillow_itself_finds_too_large_is_named(tmp_path):
    path = tmp_path / "bomb.png"
    path.write_bytes(png_header_only(40_000, 40_000))
    with pytest.raises(DataError) as caught:
        load_image(str(path), 10_000)
    assert str(caught.value).startswith(str(path)) and "1600000000 pixels" in str(caught.value)


def test_a_picture_at_the_bound_is_taken(tmp_path):
    noise(100, 100).save(tmp_path / "a.png")
    assert load_image(str(tmp_path / "a.png"), 10_000).size == (100, 100)


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp"])
def test_a_broken_file_is_named(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    noise(64, 64).save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    for content in (path.read_bytes(), b"no picture", b""):
        path.write_bytes(content)
        with pytest.raises(DataError) as caught:
            load_image(str(path), MANY)
        assert str(caught.value).startswith(f"{path} can't be read as a picture (")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"gone\.png can't be read as a picture \(FileNotFoundError"):
        load_image(str(tmp_path / "gone.png"), MANY)
