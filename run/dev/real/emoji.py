"""Use a color font's emoji as additional named images: things, animals, plants, food, buildings and vehicles.

A character's caption is its Unicode name with an article. Signs, faces, gestures and pages are left out, by their code
points or by a word in their names.
"""

import re
import unicodedata
from itertools import chain
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from real.stamps import Stamp

SIZE = 109  # the only bitmap size in Noto Color Emoji
LONGEST = 4  # words in a name, without the article
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
_SINGULAR = re.compile(r"(ss|us|is|christmas|rhinoceros|abacus)$")


def read_emoji(font: Path, side: int) -> dict[Stamp, Image.Image]:
    """Read the font's emoji: RGBA, without empty margins, at most side pixels wide and high."""
    bitmaps = ImageFont.truetype(str(font), SIZE)
    absent = _draw("\U0010ffff", bitmaps).tobytes()
    pictures = {}
    for code in chain(*(range(first, last + 1) for first, last in _BLOCKS)):
        if name := _name_of(chr(code)):
            image = _draw(chr(code), bitmaps)
            box = image.getchannel("A").getbbox()
            if box is not None and image.tobytes() != absent:
                image = image.crop(box)
                scale = side / max(image.size)
                size = [max(1, round(scale * each)) for each in image.size]
                stamp = Stamp(f"emoji/{code:x}", font, name)
                pictures[stamp] = image.resize(size, Image.Resampling.BICUBIC)
    return pictures


def _name_of(character: str) -> str | None:
    """Return the name with its article; None if it doesn't name a thing."""
    name = _HEADS.sub(r"\1", unicodedata.name(character, "").lower())
    if not name or _NO_THING.search(name) or len(name.split()) > LONGEST:
        return None
    if name.endswith("s") and not _SINGULAR.search(name):
        return f"some {name}"
    return f"{'an' if re.match('(?!eu|uni|one)[aeiou]|x-', name) else 'a'} {name}"


def _draw(character: str, bitmaps: ImageFont.FreeTypeFont) -> Image.Image:
    image = Image.new("RGBA", (160, 160), (0, 0, 0, 0))
    ImageDraw.Draw(image).text((10, 10), character, font=bitmaps, embedded_color=True)
    return image
