"""Constants shared by the whole package, and the two errors that a user may see."""

import difflib
import re
from collections.abc import Iterable

IGNORE_INDEX = -100  # label of unsupervised positions (torch's cross-entropy default)
IMAGE_TOKEN_INDEX = -200  # LLaVA's id for a position of an image feature; the collator replaces it
IMAGE_TOKEN = "<image>"
IM_PATCH_TOKEN = "<im_patch>"  # added with --mm_use_im_patch_token (LLaVA); no text contains it
IM_START_TOKEN, IM_END_TOKEN = "<im_start>", "<im_end>"  # around every image, with --mm_use_im_start_end
SPACE = "▁"  # sentencepiece's mark for a space

MAX_IMAGE_PIXELS = 50_000_000  # default limit, checked before decoding and after resizing
PILLOW_MAX_PIXELS = 178_956_970  # Pillow refuses to open larger images, even if a flag allows them

EXIT_FAILURE = 1  # an error of the program, with a traceback
EXIT_BAD_INPUT = 2
EXIT_STOPPED = 75  # stopped on request; the same command resumes without loss (EX_TEMPFAIL of sysexits.h)
# Stopped on request, without a state to resume from. Not in sysexits.h, so that no program retries automatically.
EXIT_NOT_RESUMABLE = 79
EXIT_INTERRUPTED = 130  # by Ctrl-C, as in a shell
EXIT_READER_GONE = 141  # a shell's exit code for a program that SIGPIPE ended
EXIT_RANK_LOST = 70  # a rank died or hung, and the watchdog ended the run


class ConfigError(ValueError):
    """The flags, the recipe or the DeepSpeed JSON can't be used as given. The message says what to do."""


class FlagProblems(ConfigError):
    """Flags exist but can't be used as given. arguments: the parsed flags (config.arguments.Arguments)."""

    def __init__(self, message: str, arguments: object) -> None:
        super().__init__(message)
        self.arguments = arguments


class DataError(ValueError):
    """A data set, image or weight file can't be used as given. The message says where, and what to do."""


class FileProblem(DataError):
    """A file that a record names is missing or unusable. The record becomes valid once the file is repaired."""


class FileChanged(DataError):
    """A file has changed since its record was checked, so the data must be checked again."""


def nearest_names(name: str, known: Iterable[str]) -> list[str]:
    """Find known names that `name` may be a misspelling of, the most similar first.

    Names are compared word by word (words end at _ - . or a space), because names that share their last words are
    similar as strings but mean different things. A known name matches if each word has a counterpart of similar
    spelling, or if it has one word more or less. Opposites (freeze, unfreeze) and different numbers (beta1, beta3)
    never match. A word may be abbreviated to its first letters.
    """
    scores = {each: _similarity(name, each) for each in known}
    return sorted((each for each, score in scores.items() if score), key=lambda each: -scores[each])


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the first of nearest_names, or None."""
    return next(iter(nearest_names(name, known)), None)


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return "did you mean X?" for an unknown name, or `otherwise` if no known name is similar."""
    nearest = nearest_name(name, known)
    return otherwise if nearest is None else f"did you mean {nearest}?"


def _similarity(name: str, known: str) -> float:
    """Return the similarity of two names, up to 1; 0 if they don't match."""
    words, others = _words(name), _words(known)
    if (joined := "".join(words)) == (other := "".join(others)):
        return 1.0
    ratio = difflib.SequenceMatcher(None, joined, other).ratio()
    if len(words) != len(others) and ratio >= 0.9 and _same_word(joined, other):  # written as one word
        return ratio
    pairs = [(word, each) for word in words for each in others if _same_word(word, each)]
    paired = min(len({word for word, _ in pairs}), len({each for _, each in pairs}))
    if paired < min(len(words), len(others)):
        return 0.0
    missing, extra = max(0, len(others) - len(words)), max(0, len(words) - len(others))
    return ratio if 2 * missing <= len(others) and 3 * extra <= len(words) else 0.0


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[\W_]+", name.lower()) if word]


def _same_word(word: str, known: str) -> bool:
    if any({word, known} == {each, f"{prefix}{each}"} for each in (word, known) for prefix in ("un", "no", "dis")):
        return False
    number = re.sub(r"\D", "", word)
    if number and number != re.sub(r"\D", "", known):
        return False
    is_beginning = len(word) >= 3 and known.startswith(word)
    is_swapped = sorted(word) == sorted(known)
    return is_beginning or is_swapped or difflib.SequenceMatcher(None, word, known).ratio() > 0.75


def in_short(value: object) -> str:
    """Format a value for a message, shortened if very long."""
    try:
        text = str(value)
    except ValueError:  # Python refuses to format integers with more than 4,300 digits
        return "a number with thousands of digits"
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text):,} characters)"
