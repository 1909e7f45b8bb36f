"""Drawings and photographs of one thing, rendered alone or together on a square image."""

import io
import re
from pathlib import Path

import numpy as np
from PIL import Image

_PIXELS = {"": 1.0, "px": 1.0, "pt": 96 / 72, "pc": 16.0, "mm": 96 / 25.4, "cm": 96 / 2.54, "in": 96.0}
PLACES = ("top left", "top right", "bottom left", "bottom right")


def read_picture(source: Path | bytes | Image.Image, is_svg: bool, side: int) -> Image.Image:
    """Read as RGBA, without empty margins, at most side pixels wide and high. Raises ValueError for an empty image."""
    if is_svg:
        import resvg_py  # only needed by make real

        text = (source.read_bytes() if isinstance(source, Path) else source).decode("utf-8", "replace")
        image = Image.open(io.BytesIO(bytes(resvg_py.svg_to_bytes(svg_string=in_pixels(text), width=2 * side))))
    elif isinstance(source, Image.Image):
        image = source
    else:
        image = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
    image = image.convert("RGBA")
    if (box := image.getchannel("A").getbbox()) is None:
        raise ValueError("the image is empty")
    image = image.crop(box)
    scale = side / max(image.size)
    return image.resize([max(1, round(scale * each)) for each in image.size], Image.Resampling.BICUBIC)


def in_pixels(svg: str) -> str:
    """Return an SVG with its size in pixels and a view box, because the renderer refuses one without both."""
    tag = re.search(r"<svg\b[^>]*>", svg, re.DOTALL)
    keys = ("width", "height")
    sizes = [re.search(rf'\b{key}\s*=\s*"\s*([\d.]+)\s*([a-z]*)\s*"', tag[0] if tag else "") for key in keys]
    if not all(size and size[2] in _PIXELS for size in sizes):
        return svg
    new, pixels = tag[0], [float(size[1]) * _PIXELS[size[2]] for size in sizes]
    for size, key, value in zip(sizes, keys, pixels):
        new = new.replace(size[0], f'{key}="{value:.3f}"')
    if "viewBox" not in new:
        new = new.replace("<svg", f'<svg viewBox="0 0 {pixels[0]:.3f} {pixels[1]:.3f}"', 1)
    return svg[: tag.start()] + new + svg[tag.end() :]


def is_photograph(picture: Image.Image) -> bool:
    """Return True if a bitmap fills its rectangle: no drawing here does."""
    return float((np.asarray(picture.getchannel("A")) > 250).mean()) > 0.98


def draw(picture: Image.Image, side: int, rng: np.random.Generator | None = None) -> Image.Image:
    """Return a square RGB image centred on white; with rng, varied without affecting its name."""
    scale, ground = 0.94, (255, 255, 255)
    if rng is not None:
        if rng.random() < 0.5:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        picture = picture.rotate(rng.uniform(-20, 20), Image.Resampling.BICUBIC, expand=True)
        scale, ground = rng.uniform(0.6, 1.0), tuple(int(each) for each in rng.integers(160, 256, 3))
    picture = _scaled(picture, scale * side)
    place = [(side - each) / 2 for each in picture.size]
    if rng is not None:
        place = [rng.uniform(0, 2 * each) for each in place]
    square = Image.new("RGB", (side, side), ground)
    square.paste(picture, [round(each) for each in place], picture)
    return square


def place(pictures: dict[str, Image.Image], side: int) -> Image.Image:
    """Return a square RGB image with one image in each of the given PLACES."""
    square, half = Image.new("RGB", (side, side), "white"), side // 2
    for at, picture in pictures.items():
        row, column = divmod(PLACES.index(at), 2)
        small = _scaled(picture, 0.88 * half)
        corner = [half * step + (half - size) // 2 for step, size in zip((column, row), small.size)]
        square.paste(small, corner, small)
    return square


def _scaled(picture: Image.Image, longest: float) -> Image.Image:
    size = [max(1, round(longest * each / max(picture.size))) for each in picture.size]
    return picture.resize(size, Image.Resampling.BICUBIC)
