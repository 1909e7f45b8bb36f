"""Tux Paint's stamps: their images, names, and held-out share.

A stamp is a drawing or a photograph without background, with a text file in many languages. The file's first line
describes it in English; the name is the noun phrase at the start of that line.
"""

import hashlib
import io
import re
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from PIL import Image

ARTICLES = {"a", "an", "the", "some", "two", "three"}
LONGEST = 6  # words in a name
LEFT_OUT = "symbols"  # letters, digits, notes, coins and chessmen show a text or a rule
# Words that distinguish images of one object: colours, sides, sizes.
_VARIETY = """
    red orange yellow green blue purple pink black white brown grey gray gold golden silver light dark
    small large big little tiny left right front back side open opened closed old new young baby male female
    another drawing photo cartoon a an the some two three of pair on in up down off
"""
VARIETY = set(_VARIETY.split())
_VERBS = "is are was can gets lets means carries covered hatched ahead called which that used from with for"
_CUT = re.compile(rf"[.!?:;,—]|\s[–-]\s|\s(?:{'|'.join(_VERBS.split())})\b")


@dataclass(frozen=True)
class Stamp:
    """A stamp. id: its file relative to the stamps' folder, without suffix; name: with a lower-case article."""

    id: str
    picture: Path
    name: str

    @property
    def noun(self) -> str:
        """The last word of the name."""
        return self.name.split()[-1].lower()


def read_stamps(folder: Path) -> list[Stamp]:
    """Read all stamps that have an image and a name."""
    stamps = []
    for text in sorted(folder.rglob("*.txt")):
        where = text.relative_to(folder)
        pictures = [file for end in (".png", ".svg") if (file := text.with_suffix(end)).exists()]
        name = name_of(text.read_text(encoding="utf-8").partition("\n")[0])
        if pictures and name and where.parts[0] != LEFT_OUT:
            stamps.append(Stamp(where.with_suffix("").as_posix(), pictures[0], name))
    return stamps


def name_of(line: str) -> str | None:
    """Return the noun phrase with an article at the start of a line; None if there is none or it is too long."""
    phrase = _CUT.split(re.sub(r"\s*\([^)]*\)", "", line))[0]
    words = re.sub(r"[“”\"‘]", "", phrase).split()
    if len(words) < 2 or len(words) > LONGEST or words[0].lower() not in ARTICLES:
        return None
    return " ".join([words[0].lower(), *words[1:]])


def split(stamps: list[Stamp], held_out: float) -> tuple[list[Stamp], list[Stamp]]:
    """Split stamps into training and held-out ones, by object.

    Stamps of one object stay together: their names or file names differ only in colours, sides, sizes and numbers. The
    hash of the object's first file name decides, so a different folder or another stamp doesn't change the split.
    """
    groups: list[tuple[set[str], list[Stamp]]] = []
    for stamp in stamps:
        file = stamp.id.rpartition("/")[2]
        keys = {_object_of(stamp.name), _object_of(file)} - {""}
        same = [group for group in groups if group[0] & keys]
        groups = [group for group in groups if not group[0] & keys]
        groups.append((keys.union(*(each[0] for each in same)), [*chain(*(each[1] for each in same)), stamp]))
    sides: tuple[list[Stamp], list[Stamp]] = ([], [])
    for keys, members in groups:
        digest = hashlib.sha256(min(keys).encode()).digest()
        sides[int.from_bytes(digest[:4]) < held_out * 2**32].extend(members)
    return tuple(sorted(side, key=lambda stamp: stamp.id) for side in sides)


def without_objects_of(stamps: list[Stamp], heldout: list[Stamp]) -> list[Stamp]:
    """Drop stamps whose names contain all words of a held-out object, ignoring plural -s."""
    texts = chain(*((stamp.name, stamp.id.rpartition("/")[2]) for stamp in heldout))
    objects = {_singular(_object_of(text)) for text in texts} - {frozenset()}
    return [stamp for stamp in stamps if not any(each <= _singular(_object_of(stamp.name)) for each in objects)]


def _singular(words: str) -> frozenset[str]:
    return frozenset(word.removesuffix("s") for word in words.split())


def _object_of(text: str) -> str:
    """Return the words that identify the object; an orange stays one."""
    words = [word for word in re.findall(r"[a-z]+", text.lower()) if len(word) > 1]
    return " ".join(sorted({word for word in words if word not in VARIETY} or words[-1:]))


def read_picture(file: Path, side: int) -> Image.Image:
    """Read as RGBA, without empty margins, at most side pixels wide and high."""
    if file.suffix == ".svg":
        import resvg_py  # only needed by make real

        image = Image.open(io.BytesIO(bytes(resvg_py.svg_to_bytes(svg_path=str(file), width=2 * side))))
    else:
        image = Image.open(file)
    image = image.convert("RGBA")
    image = image.crop(image.getchannel("A").getbbox())
    scale = side / max(image.size)
    return image.resize([max(1, round(scale * each)) for each in image.size], Image.Resampling.BICUBIC)


def draw(picture: Image.Image, side: int, rng: np.random.Generator | None = None) -> Image.Image:
    """Return a square RGB image with the stamp centred on white; with rng, varied without affecting its name."""
    scale, ground = 0.94, (255, 255, 255)
    if rng is not None:
        if rng.random() < 0.5:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        picture = picture.rotate(rng.uniform(-20, 20), Image.Resampling.BICUBIC, expand=True)
        scale, ground = rng.uniform(0.6, 1.0), tuple(int(each) for each in rng.integers(160, 256, 3))
    width, height = (max(1, round(scale * side * each / max(picture.size))) for each in picture.size)
    picture = picture.resize((width, height), Image.Resampling.BICUBIC)
    place = [(side - width) / 2, (side - height) / 2]
    if rng is not None:
        place = [rng.uniform(0, 2 * each) for each in place]
    square = Image.new("RGB", (side, side), ground)
    square.paste(picture, [round(each) for each in place], picture)
    return square
