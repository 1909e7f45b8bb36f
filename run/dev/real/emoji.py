"""A color font's emoji of things, animals, plants, food, buildings and vehicles, with their Unicode names.

Signs, faces, gestures and pages are left out, by their code points or by a word in their names.
"""

import re
import unicodedata
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

SIZE = 109  # the only bitmap size in Noto Color Emoji
LONGEST = 4  # words in a name
_BLOCKS = (
    (0x1F32D, 0x1F37F), (0x1F380, 0x1F3D3), (0x1F3E0, 0x1F3F0), (0x1F3F8, 0x1F3FA), (0x1F400, 0x1F43F),
    (0x1F444, 0x1F445), (0x1F451, 0x1F45F), (0x1F480, 0x1F4FF), (0x1F525, 0x1F52D), (0x1F56F, 0x1F5FF),
    (0x1F680, 0x1F6FF), (0x1F950, 0x1F970), (0x1F980, 0x1F9B4), (0x1F9B7, 0x1F9CB), (0x1F9E0, 0x1F9FF),
    (0x1FA70, 0x1FAE7),
)  # fmt: skip
_NO_THING = re.compile(
    r"\b(symbol|sign|hands?|pointing|arrows?|mark|bubble|hearts?|person|face|no|chart|silhouette|points|post|page|mode"
    r"|off|do|put|service|love|splashing|speech|japan|notes|emoji)\b"
)
_HEADS = re.compile(r"^(dragon|pig|frog|hamster|wolf|bear|panda|lion|unicorn|fox|giraffe|zebra) face$")


def read_emoji(font: Path) -> Iterator[tuple[str, Image.Image, str]]:
    """Yield id, RGBA image and name of each of the font's emoji."""
    bitmaps = ImageFont.truetype(str(font), SIZE)
    absent = _draw("\U0010ffff", bitmaps).tobytes()
    for code in chain(*(range(first, last + 1) for first, last in _BLOCKS)):
        if name := _name_of(chr(code)):
            image = _draw(chr(code), bitmaps)
            if image.tobytes() != absent:
                yield f"emoji/{code:x}", image, name


def _name_of(character: str) -> str | None:
    """Return a character's name in lower case; None if it doesn't name a thing."""
    name = _HEADS.sub(r"\1", unicodedata.name(character, "").lower())
    return name if name and not _NO_THING.search(name) and len(name.split()) <= LONGEST else None


def _draw(character: str, bitmaps: ImageFont.FreeTypeFont) -> Image.Image:
    image = Image.new("RGBA", (160, 160), (0, 0, 0, 0))
    ImageDraw.Draw(image).text((10, 10), character, font=bitmaps, embedded_color=True)
    return image
