"""Tux Paint's stamps: their images and names.

A stamp is a drawing or a photograph without background, with a text file in many languages. The file's first line
describes it in English; the name is the noun phrase at the start of that line.
"""

import re
from dataclasses import dataclass
from pathlib import Path

ARTICLES = {"a", "an", "the", "some", "two", "three"}
LONGEST = 6  # words in a name
LEFT_OUT = "symbols"  # letters, digits, notes, coins and chessmen show a text or a rule
_VERBS = "is are was can gets lets means carries covered hatched ahead called which that used from with for"
_CUT = re.compile(rf"[.!?:;,—]|\s[–-]\s|\s(?:{'|'.join(_VERBS.split())})\b")


@dataclass(frozen=True)
class Stamp:
    """A stamp. id: its file relative to the stamps' folder, without suffix; name: with a lower-case article."""

    id: str
    picture: Path
    name: str


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
    """Return the noun phrase with an article at the start of a line; None without one, or if it is too long."""
    phrase = _CUT.split(re.sub(r"\s*\([^)]*\)", "", line))[0]
    words = re.sub(r"[“”\"‘]", "", phrase).split()
    if len(words) < 2 or len(words) > LONGEST or words[0].lower() not in ARTICLES:
        return None
    return " ".join([words[0].lower(), *words[1:]])
