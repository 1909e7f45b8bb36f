"""The Open Clip Art Library's drawings, with their titles and keywords."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import unescape

# Signs, flags, patterns, cards and icons show a rule or a text rather than a thing.
_LEFT_OUT = re.compile(r"^(shapes|special|buttons|logos|geography)/|/flags/|icons/|smilies|cards|map_symbols")
_RARE = 20  # maximum drawings with a keyword; one that more drawings have is a category


def read_drawings(folder: Path) -> Iterator[tuple[str, Path, str, list[str]]]:
    """Yield path in the folder, file, title, and keywords. A drawing that is in several folders comes once."""
    found, seen = [], set()
    for file in sorted(folder.rglob("*.svg")):
        path = file.relative_to(folder).as_posix()
        if not _LEFT_OUT.search(path) and file.name not in seen:
            seen.add(file.name)
            found.append((path, file, *_described(file.read_text(encoding="utf-8", errors="replace"))))
    uses = Counter(word for *_, words in found for word in set(words))
    for path, file, title, words in found:
        yield path, file, title, [word for word in words if uses[word] <= _RARE]


def _described(text: str) -> tuple[str, list[str]]:
    """Return the title and the keywords in an SVG file's metadata."""
    title = re.search(r"<(?:cc:)?Work\b.*?<dc:title>(.*?)</dc:title>", text, re.DOTALL)
    subject = re.search(r"<dc:subject>(.*?)</dc:subject>", text, re.DOTALL)
    words = re.findall(r"<rdf:li[^>]*>(.*?)</rdf:li>", subject[1], re.DOTALL) if subject else []
    return unescape(title[1].strip()) if title else "", [word.lower() for word in words if word]
