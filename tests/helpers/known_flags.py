"""Cases of tests by the flags that there are: an extension that was deleted took its flags along."""

from collections.abc import Iterable, Mapping
from typing import TypeVar

import pytest

from llava_ds.config.parsing import build_parser

Case = TypeVar("Case")
_KNOWN = {name.removeprefix("--") for action in build_parser()._actions for name in action.option_strings}


def known(flags: Iterable[str]) -> bool:
    """True if all of these names are flags."""
    return _KNOWN.issuperset(flags)


def known_cases(cases: Mapping[str, tuple[Case, ...]]) -> dict[str, tuple[Case, ...]]:
    """The cases with known flags; each ends with its flags by name."""
    return {name: case for name, case in cases.items() if known(case[-1])}


def needs(*flags: str) -> pytest.MarkDecorator:
    """A mark for a test that needs flags of an extension."""
    return pytest.mark.skipif(not known(flags), reason=f"there is no extension with {', '.join(flags)}")


def known_words(words: list[str]) -> list[str]:
    """A command line without the flags that there are not, and their values."""
    kept, keeps = [], True
    for word in words:
        if word.startswith("--"):
            keeps = known([word[2:].split("=", 1)[0]])
        kept += [word] * keeps
    return kept
