"""All images of make real, each with its noun and its side of the split."""

import hashlib
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from real.emoji import read_emoji
from real.gcompris import read_images
from real.openclipart import read_drawings
from real.pictures import is_photograph, read_picture
from real.stamps import read_stamps
from real.wordnet import WordNet

_LINKED = re.compile(r"\b(?:with|on|in|of|and|by|for|from)\b")


@dataclass(frozen=True, eq=False)
class Thing:
    """An image. noun: in lower case; sense: WordNet's key; group: see _groups."""

    id: str
    noun: str
    sense: str
    picture: Image.Image  # RGBA
    is_photograph: bool
    group: str


def read_things(share: Path, wordnet: WordNet, side: int) -> list[Thing]:
    """Read the packages' named images in share (Debian's /usr/share), at most side pixels wide and high."""
    named = [(*each, noun) for *each, names in _sources(share) if (noun := _noun_of(names, wordnet))]
    with ProcessPoolExecutor() as pool:
        pictures = list(pool.map(_read, ((source, is_svg, side) for _, source, is_svg, _ in named), chunksize=16))
    groups = _groups([noun for *_, noun in named])
    return [
        Thing(name, *noun, picture, name.startswith("gcompris") and not is_svg and is_photograph(picture), group)
        for (name, _, is_svg, noun), picture, group in zip(named, pictures, groups)
        if picture is not None
    ]


def split(things: list[Thing], held_out: float, of_photographed: float) -> tuple[list[Thing], list[Thing]]:
    """Split by group, into training and held-out things; groups with photographs have a share of their own.

    No noun of one side, nor a synonym or a noun with the same last word, is on the other. A hash decides, so another
    package doesn't change the side of other nouns.
    """
    photographed = {thing.group for thing in things if thing.is_photograph}
    sides: tuple[list[Thing], list[Thing]] = ([], [])
    for thing in things:
        digest = hashlib.sha256(thing.group.encode()).digest()
        share = of_photographed if thing.group in photographed else held_out
        sides[int.from_bytes(digest[:4]) < share * 2**32].append(thing)
    return sides


def _sources(share: Path) -> Iterator[tuple]:
    """Yield id, source of the image, whether it is SVG, and candidate names, the best first."""
    for path, file, title, keywords in read_drawings(share / "openclipart" / "svg"):
        yield f"openclipart/{path}", file, True, [title, keywords]
    for stamp in read_stamps(share / "tuxpaint" / "stamps"):
        yield f"stamps/{stamp.id}", stamp.picture, stamp.picture.suffix == ".svg", [stamp.name]
    for name, image, title in read_emoji(share / "fonts" / "truetype" / "noto" / "NotoColorEmoji.ttf"):
        yield name, image, False, [title]
    for path, content in read_images(share / "gcompris-qt" / "rcc"):
        yield f"gcompris/{path}", content, path.endswith(".svg"), [Path(path).stem]


def _noun_of(names: list, wordnet: WordNet) -> tuple[str, str] | None:
    """Return noun and sense of a title or, if it ends in no noun, of the keywords if exactly one is a noun."""
    title, *keywords = names
    words = _LINKED.split(
        re.sub(r"([a-z])([A-Z])", r"\1 \2", re.sub(r"[(\[].*?[)\]]|[\d_#.,:;/&]+", " ", title)).lower()
    )
    words = words[0].split()
    if 0 < len(words) <= 6 and (found := wordnet.find(words)):
        return found
    nouns = {found for word in (keywords[0] if keywords else []) if (found := wordnet.find([word]))}
    return nouns.pop() if len(nouns) == 1 else None


def _read(job: tuple) -> Image.Image | None:
    try:
        return read_picture(*job)
    except ValueError:  # an empty drawing, or one that the renderer refuses
        return None


def _groups(nouns: list[tuple[str, str]]) -> list[str]:
    """Return a group name per (noun, sense). Nouns with a common sense or last word are in the same group."""
    parent: dict[str, str] = {}

    def root(node: str) -> str:
        while parent.setdefault(node, node) != node:
            node = parent[node]
        return node

    for noun, sense in nouns:
        ends = sorted((root(noun.split()[-1]), root(sense)), reverse=True)
        parent[ends[1]] = ends[0]
    return [root(sense) for _, sense in nouns]
