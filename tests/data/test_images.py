"""Pictures as a person sees them, and pixels as transformers makes them."""

import dataclasses
import hashlib
import io
import os
import random
import struct
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    CLIPImageProcessorPil,
    LlavaImageProcessorPil,
    LlavaNextImageProcessorPil,
    SiglipImageProcessorPil,
)

from llava_ds.anyres import parse_pinpoints
from llava_ds.constants import DataError
from llava_ds.data.images import decode as images_module
from llava_ds.data.images import resize as resize_module
from llava_ds.data.images.decode import load_image, load_media, to_rgb
from llava_ds.data.images.headers import probe
from llava_ds.data.images.resize import to_tile
from llava_ds.data.sample import FileRef, Media
from llava_ds.geometry import ImageOptions, Size, media_layout

SIZE = 24
MEAN = (0.48145466, 0.4578275, 0.40821073)
MANY = 10**9
SQUARE = ImageOptions(SIZE, 8, MEAN)
PAD = {"aspect_ratio": "pad"}
ANYRES = ImageOptions(SIZE, 8, MEAN, "anyres", merge_type="spatial_unpad")
FORMATS = ["JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM", "TGA", "JPEG2000"]


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def sizes() -> list[tuple[int, int]]:
    rng = np.random.default_rng(0)
    special = [(24, 24), (1, 1), (1, 60), (60, 1), (23, 24), (25, 24), (24, 25), (48, 48), (49, 97), (200, 3), (5, 23)]
    return special + [tuple(map(int, rng.integers(2, 120, 2))) for _ in range(80)]


@pytest.mark.parametrize("aspect_ratio", ["square", "pad", "stretch"])
def test_pixels_equal_transformers_bit_for_bit(aspect_ratio, width_first):
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
    if aspect_ratio == "stretch":
        processor = SiglipImageProcessorPil(size={"height": SIZE, "width": SIZE}, do_rescale=False, do_normalize=False)
    for i, (width, height) in enumerate(sizes()):
        picture = noise(width, height, i)
        ours = to_tile(picture, aspect_ratio, SQUARE)
        assert ours.dtype == torch.uint8 and ours.shape == (3, SIZE, SIZE) and ours.is_contiguous()
        theirs = torch.as_tensor(np.asarray(processor(picture)["pixel_values"][0]))
        assert torch.equal(ours.to(theirs.dtype), theirs), (width, height)


def test_pad_keeps_everything_and_square_cuts_the_sides():
    picture = Image.new("RGB", (72, 24), "red")
    picture.paste((0, 0, 255), (0, 0, 12, 24))
    assert (to_tile(picture, "square", SQUARE)[2] == 0).all()
    padded = to_tile(picture, "pad", SQUARE)
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
def test_an_image_is_turned_as_its_exif_says(tmp_path, orientation, corner):
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


def test_palette_grey_and_bilevel_images_keep_their_colours(tmp_path):
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


def test_a_dark_image_of_sixteen_bits_stays_dark(tmp_path):
    Image.fromarray(np.full((4, 4), 200, np.uint16)).save(tmp_path / "night.png")
    assert max(pixel(tmp_path / "night.png")) <= 1


def png_header_only(width: int, height: int) -> bytes:
    """A PNG that announces a size and holds no pixels: whoever decodes it fails."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


@pytest.mark.parametrize(("width", "height"), [(101, 100), (12_000, 12_000)])
def test_an_image_over_the_bound_is_refused_without_decoding(tmp_path, width, height):
    path = tmp_path / "bomb.png"
    path.write_bytes(png_header_only(width, height))
    with pytest.raises(DataError) as caught:
        load_image(str(path), 10_000)
    assert f"{path} has {width} x {height} pixels, more than the bound of 10000" in str(caught.value)


def test_an_image_that_pillow_itself_finds_too_large_is_named(tmp_path):
    path = tmp_path / "bomb.png"
    path.write_bytes(png_header_only(40_000, 40_000))
    with pytest.raises(DataError) as caught:
        load_image(str(path), 10_000)
    assert str(caught.value).startswith(str(path)) and "1600000000 pixels" in str(caught.value)


def test_an_image_at_the_bound_is_taken(tmp_path):
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
        assert str(caught.value).startswith(f"{path} can't be read as an image (")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"gone\.png can't be read as an image \(FileNotFoundError"):
        load_image(str(tmp_path / "gone.png"), MANY)


def media_of(*paths: Path, kind: str = "image") -> Media:
    return Media(kind, tuple(FileRef(str(path)) for path in paths))


def loaded(media: Media, options: ImageOptions, num_media: int = 1) -> tuple[tuple[Size, ...], torch.Tensor]:
    """The probed sizes and the tiles."""
    sizes = probe(media, options)
    layout = media_layout(media.kind, sizes, num_media, options)
    tiles = load_media(media, sizes, layout, options)
    assert tiles.shape == (layout.num_tiles, 3, SIZE, SIZE) and tiles.dtype == torch.uint8
    return sizes, tiles


def test_tiles_equal_transformers_bit_for_bit(tmp_path, width_first):
    pinpoints = parse_pinpoints(None, SIZE)
    processor = LlavaNextImageProcessorPil(
        size={"shortest_edge": SIZE},
        crop_size={"height": SIZE, "width": SIZE},
        image_grid_pinpoints=[[height, width] for width, height in pinpoints],
        do_rescale=False,
        do_normalize=False,
    )
    for i, (width, height) in enumerate(sizes()):
        noise(width, height, i).save(tmp_path / "a.bmp")
        found, tiles = loaded(media_of(tmp_path / "a.bmp"), ANYRES)
        theirs = torch.as_tensor(np.asarray(processor(noise(width, height, i))["pixel_values"][0]))
        assert found == ((width, height),) and torch.equal(tiles.to(theirs.dtype), theirs), (width, height)


def test_tiles_are_llavas_with_any_pillow(tmp_path):
    tiles = hashlib.sha256()
    for i, (width, height) in enumerate(sizes()):
        noise(width, height, i).save(tmp_path / "a.bmp")
        tiles.update(loaded(media_of(tmp_path / "a.bmp"), ANYRES)[1].numpy().tobytes())
    assert tiles.hexdigest()[:16] == "51f4515da26ccf80"  # LLaVA's own process_anyres_image with Pillow 10.4


def test_several_images_of_an_anyres_sample_are_padded(tmp_path):
    noise(70, 30).save(tmp_path / "a.png")
    _, tiles = loaded(media_of(tmp_path / "a.png"), ANYRES, num_media=2)
    assert torch.equal(tiles[0], to_tile(noise(70, 30), "pad", SQUARE))


def test_original_is_what_the_towers_processor_does():
    assert torch.equal(to_tile(noise(70, 30), "original", SQUARE), to_tile(noise(70, 30), "square", SQUARE))


def test_frames_are_squares_taken_evenly(tmp_path):
    paths = [tmp_path / f"{i}.png" for i in range(5)]
    for i, path in enumerate(paths):
        noise(40 + i, 30, i).save(path)
    options = dataclasses.replace(ANYRES, frames_upbound=3)
    found, tiles = loaded(media_of(*paths, kind="frames"), options)
    assert found == ((40, 30), (42, 30), (44, 30))
    for tile, i in zip(tiles, (0, 2, 4)):
        assert torch.equal(tile, to_tile(noise(40 + i, 30, i), "square", SQUARE))


def test_padding_band_by_band_changes_no_pixel(monkeypatch):
    pictures = [noise(*size) for size in [(50, 31), (31, 50), (1, 90), (90, 1), (200, 7), (24, 24)]]
    whole = [to_tile(picture, "pad", SQUARE) for picture in pictures]
    see_through = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 30, 4), dtype=np.uint8))
    on_white = to_rgb(see_through)
    monkeypatch.setattr(resize_module, "_BAND_PIXELS", 100)
    assert all(torch.equal(to_tile(p, "pad", SQUARE), expected) for p, expected in zip(pictures, whole))
    assert to_rgb(see_through).tobytes() == on_white.tobytes()


def test_a_long_strip_is_padded_but_not_cropped(tmp_path):
    noise(1, 10_000).save(tmp_path / "strip.png")
    _, tiles = loaded(media_of(tmp_path / "strip.png"), dataclasses.replace(SQUARE, aspect_ratio="pad"))
    assert len(tiles) == 1
    loaded(media_of(tmp_path / "strip.png"), ANYRES)
    noise(1, 10_000).resize((1, 60_000)).save(tmp_path / "longer.png")
    for path, options, message in (
        (
            "strip.png",
            dataclasses.replace(SQUARE, max_pixels=10**6),
            "would be resized to 24 x 240000: leave it out, or",
        ),
        (
            "strip.png",
            dataclasses.replace(SQUARE, max_pixels=10**5, stretch=True),
            "would be resized to 24 x 10000: leave it out, or",
        ),
        ("longer.png", dataclasses.replace(ANYRES, max_pixels=10**8), "is too narrow to be padded: leave it out"),
    ):
        with pytest.raises(DataError, match=message) as caught:
            probe(media_of(tmp_path / path), options)
        assert str(caught.value).startswith(str(tmp_path / path))


@pytest.mark.parametrize("fmt", ["JPEG", "PNG", "TIFF", "WEBP", "AVIF"])
@pytest.mark.parametrize("orientation", [1, 3, 5, 6, 8])
def test_the_probed_size_is_the_upright_one(tmp_path, fmt, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    if fmt not in images_module._known_formats():
        pytest.skip(f"this Pillow knows no {fmt}")
    noise(30, 20).save(tmp_path / "a", format=fmt, exif=exif)
    found, _ = loaded(media_of(tmp_path / "a"), SQUARE)
    assert found == (((30, 20) if orientation < 5 else (20, 30)),)


def png_chunks(*chunks: tuple[bytes, bytes]) -> bytes:
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


def grey_png(
    width: int, height: int, *before: tuple[bytes, bytes], behind: tuple[tuple[bytes, bytes], ...] = ()
) -> bytes:
    """A black PNG of one bit a pixel, with more chunks before or behind its pixels."""
    rows = zlib.compress((b"\0" + bytes((width + 7) // 8)) * height, 9)
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return png_chunks((b"IHDR", header), *before, (b"IDAT", rows), *behind, (b"IEND", b""))


def test_exif_behind_the_pixels_of_a_png_is_left_alone_by_probe_and_load(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    chunk = (b"eXIf", exif.tobytes()[6:])
    (tmp_path / "before.png").write_bytes(grey_png(30, 20, chunk))
    (tmp_path / "behind.png").write_bytes(grey_png(30, 20, behind=(chunk,)))
    assert loaded(media_of(tmp_path / "before.png"), SQUARE)[0] == ((20, 30),)
    assert loaded(media_of(tmp_path / "behind.png"), SQUARE)[0] == ((30, 20),)


def test_damaged_exif_data_turn_nothing(tmp_path):
    (tmp_path / "a.png").write_bytes(grey_png(30, 20, (b"eXIf", b"MM\0*\0\0\0\x08\xff\xff\x01\x12\0\x02")))
    assert loaded(media_of(tmp_path / "a.png"), SQUARE)[0] == ((30, 20),)


@pytest.mark.parametrize("fmt", ["GIF", "PNG", "WEBP", "TIFF"])
def test_the_first_frame_of_an_animation_is_shown(tmp_path, fmt):
    frames = [Image.new("RGB", (30, 20), colour) for colour in ("red", "blue", "lime")]
    frames[0].save(
        tmp_path / "a",
        format=fmt,
        save_all=True,
        append_images=frames[1:],
        **({"lossless": True} if fmt == "WEBP" else {}),
    )
    _, tiles = loaded(media_of(tmp_path / "a"), SQUARE)
    assert tiles[0, :, 12, 12].tolist() == [255, 0, 0]


def test_the_name_of_a_file_does_not_matter_but_its_format_does(tmp_path):
    noise(30, 20).save(tmp_path / "a.jpg", format="PNG")
    assert torch.equal(loaded(media_of(tmp_path / "a.jpg"), SQUARE)[1][0], to_tile(noise(30, 20), "square", SQUARE))
    noise(30, 20).save(tmp_path / "b.png", format="EPS")
    noise(30, 20).save(tmp_path / "c.png", format="ICO")
    for name in ("b.png", "c.png"):
        with pytest.raises(
            DataError,
            match=r"its format is not JPEG, PNG, .*, or is an unsupported variant, .*: replace it or leave it out",
        ):
            probe(media_of(tmp_path / name), SQUARE)


def test_a_slice_of_a_file_is_an_image_too(tmp_path):
    parts = []
    for i, fmt in enumerate(FORMATS):
        buffer = io.BytesIO()
        noise(30 + i, 20, i).save(buffer, format=fmt)
        parts.append(buffer.getvalue())
    (tmp_path / "blob").write_bytes(b"".join(parts))
    offset = 0
    for i, part in enumerate(parts):
        (tmp_path / "alone").write_bytes(part)
        media = Media("image", (FileRef(str(tmp_path / "blob"), offset, len(part)),))
        found, tiles = loaded(media, SQUARE)
        assert found == ((30 + i, 20),) and torch.equal(tiles, loaded(media_of(tmp_path / "alone"), SQUARE)[1])
        with pytest.raises(DataError):
            loaded(Media("image", (FileRef(str(tmp_path / "blob"), offset, len(part) // 2),)), SQUARE)
        offset += len(part)


def test_an_image_that_changed_since_it_was_probed_is_named(tmp_path):
    path = tmp_path / "a.png"
    noise(30, 20).save(path)
    sizes = probe(media_of(path), ANYRES)
    noise(31, 20).save(path)
    with pytest.raises(DataError, match=r"a.png has 31 x 20 pixels, but had 30 x 20 when the data was checked"):
        load_media(media_of(path), sizes, media_layout("image", sizes, 1, ANYRES), ANYRES)


def tiff_of_huge_tiles() -> bytes:
    """A 10 x 10 TIFF whose single tile is 65,536 x 16,384."""
    tags = {256: 10, 257: 10, 258: 8, 259: 8, 262: 1, 277: 1, 322: 65536, 323: 16384, 324: 200, 325: 40}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0\x08\0\0\0" + struct.pack("<H", len(tags)) + entries + bytes(100)


BOMBS = {
    "a hundred megapixels": (grey_png(10_000, 10_000), "10000 x 10000 pixels, more than the bound"),
    "text": (
        grey_png(9, 9, (b"zTXt", b"a\0\0" + zlib.compress(bytes(2**25)))),
        "ValueError: Decompressed data too large",
    ),
    "colour profile": (
        grey_png(9, 9, (b"iCCP", b"a\0\0" + zlib.compress(bytes(2**25)))),
        "ValueError: Decompressed data",
    ),
    "canvas": (
        b"RIFF" + struct.pack("<I", 40) + b"WEBPVP8X\x0a\0\0\0\2\0\0\0" + b"\xff\x3f\0" * 2 + bytes(14),
        "could be decompression bomb|can't be read",
    ),
    "tiles": (tiff_of_huge_tiles(), "is stored in tiles of 65536 x 16384 pixels: save it in smaller ones"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_by_their_header(tmp_path, name, monkeypatch):
    content, message = BOMBS[name]
    path = tmp_path / "bomb"
    path.write_bytes(content)
    assert len(content) < 40_000
    monkeypatch.setattr(Image.Image, "load", None)  # nothing is decoded
    took = []
    for _ in range(3):
        started = time.process_time()
        with pytest.raises(DataError, match=message) as caught:
            probe(media_of(path), SQUARE)
        took.append(time.process_time() - started)
    assert str(caught.value).startswith(str(path)) and min(took) < 0.05


def mutated(content: bytes, rng: random.Random) -> bytes:
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at, length = rng.randrange(len(data) + 1), rng.randint(1, 30)
        change = rng.randrange(6)
        if change == 0:
            data[at : at + 1] = bytes([rng.randrange(256)])
        elif change == 1:
            header = rng.randrange(min(64, len(data) + 1))
            data[header : header + 1] = bytes([rng.randrange(256)])
        elif change == 2:
            del data[at:]
        elif change == 3:
            del data[at : at + length]
        elif change == 4:
            data[at:at] = data[at : at + length]
        else:
            number = rng.choice([0, 1, 255, 7000, 65535, 2**31 - 1, 2**32 - 1])
            data[at : at + 4] = struct.pack(rng.choice("<>") + "I", number)
    return bytes(data)


@pytest.mark.parametrize("fmt", FORMATS)
def test_damaged_images_are_shown_or_refused_with_a_reason(tmp_path, fmt):
    rng = random.Random(fmt)
    path = tmp_path / "a"
    outcomes = {"shown": 0, "refused": 0}
    modes = {"GIF": ["P", "L"], "JPEG": ["RGB", "L", "CMYK"], "TGA": ["RGB", "RGBA"], "PPM": ["RGB", "L", "1"]}
    for i in range(60):
        picture = noise(rng.randint(1, 60), rng.randint(1, 60), i).convert(rng.choice(modes.get(fmt, ["RGB", "L"])))
        buffer = io.BytesIO()
        picture.save(buffer, format=fmt)
        path.write_bytes(mutated(buffer.getvalue(), rng))
        options = (SQUARE, ANYRES, dataclasses.replace(SQUARE, aspect_ratio="pad"))[i % 3]
        options = dataclasses.replace(options, max_pixels=10**6)
        try:
            loaded(media_of(path), options)
            outcomes["shown"] += 1
        except DataError as error:
            assert (
                str(error).startswith(str(path)) and "\n" not in str(error) and len(str(error)) < len(str(path)) + 400
            )
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 0, outcomes


def test_fast_decoding_is_close_for_every_kind_of_image(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    noise(300, 200).save(tmp_path / "a.jpg", quality=90, exif=exif)
    noise(160, 120).save(tmp_path / "a.png")
    noise(160, 120).convert("L").save(tmp_path / "grey.png")
    Image.merge("CMYK", [noise(60, 80, i).getchannel(0) for i in range(4)]).save(tmp_path / "cmyk.jpg")
    Image.merge("RGBA", [noise(70, 50, i).getchannel(0) for i in range(4)]).save(tmp_path / "see-through.png")
    Image.fromarray(np.random.default_rng(0).integers(0, 65536, (50, 40), dtype=np.uint16)).save(tmp_path / "deep.png")
    worst = 0
    for path in sorted(tmp_path.iterdir()):
        for options in (SQUARE, ANYRES, *(dataclasses.replace(SQUARE, **more) for more in (PAD, {"stretch": True}))):
            exact = loaded(media_of(path), options)
            fast = loaded(media_of(path), dataclasses.replace(options, fast_decoding=True))
            assert exact[0] == fast[0]
            worst = max(worst, int((exact[1].int() - fast[1].int()).abs().max()))
    assert 0 < worst <= 2


def test_fast_decoding_refuses_what_the_other_refuses(tmp_path):
    fast = dataclasses.replace(SQUARE, fast_decoding=True, max_pixels=10_000)
    (tmp_path / "bomb.png").write_bytes(png_header_only(101, 100))
    noise(64, 64).save(tmp_path / "broken.jpg")
    (tmp_path / "broken.jpg").write_bytes((tmp_path / "broken.jpg").read_bytes()[:900])
    noise(1, 2000).save(tmp_path / "narrow.png")
    for name, reason in (
        ("bomb.png", "more than the bound"),
        ("broken.jpg", "can't be read"),
        ("narrow.png", "narrow"),
    ):
        media = media_of(tmp_path / name)
        with pytest.raises(DataError, match=reason) as caught:
            load_media(media, ((64, 64),), media_layout("image", ((64, 64),), 1, fast), fast)
        assert str(tmp_path / name) in str(caught.value)


def _chunk(kind: bytes, data: bytes, length: int | None = None) -> bytes:
    length = len(data) if length is None else length
    return struct.pack(">I", length) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


ENDLESS = {
    "png": b"\x89PNG\r\n\x1a\n"
    + _chunk(b"IHDR", struct.pack(">IIBBBBB", 50, 50, 8, 0, 0, 0, 0))
    + struct.pack(">I", 0x7FFFFFF0)
    + b"tEXt",
    "jpg": b"\xff\xd8\xff",
    "gif": b"GIF89a\x10\0\x10\0\0\0\0",
    "ppm": b"P6\n#",
    "webp": b"RIFF\xf0\xff\xff\x7fWEBPVP8 ",
}


@pytest.mark.parametrize("suffix", ENDLESS)
def test_a_header_in_a_huge_file_is_not_read_to_its_end(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr(images_module, "_HEADER_BYTES", 1 << 20)
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(ENDLESS[suffix])
    os.truncate(path, 1 << 32)
    with pytest.raises(DataError, match="is much longer than"):
        probe(Media("image", (FileRef(str(path)),)), dataclasses.replace(SQUARE, max_pixels=10**6))


def test_a_pipe_in_an_images_place_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "a.png")
    with pytest.raises(DataError, match="not a regular file"):
        load_image(tmp_path / "a.png")
