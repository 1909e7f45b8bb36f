"""Values with one meaning in the whole package, and the two errors that a user may see."""

import difflib
from collections.abc import Iterable

IGNORE_INDEX = -100  # label of a position that is not supervised (torch's cross-entropy default)
IMAGE_TOKEN_INDEX = -200  # id of one image-feature position in encoded ids, before the collator replaces it (LLaVA)
IMAGE_TOKEN = "<image>"
IM_PATCH_TOKEN = "<im_patch>"  # never in a text, with --mm_use_im_patch_token (LLaVA)
IM_START_TOKEN, IM_END_TOKEN = "<im_start>", "<im_end>"  # around every image, with --mm_use_im_start_end

MAX_IMAGE_PIXELS = 50_000_000  # of an image, before decoding and after resizing, unless a flag changes it
PILLOW_MAX_PIXELS = 178_956_970  # Pillow refuses to open an image with more, whatever the flag

EXIT_FAILURE = 1  # an error of the program, with a traceback
EXIT_BAD_INPUT = 2
EXIT_STOPPED = 75  # stopped on request, and nothing is lost: the same command resumes (EX_TEMPFAIL of sysexits.h)
# Stopped on request, without a state to resume from. Not in sysexits.h, so that no program retries on it by itself.
EXIT_NOT_RESUMABLE = 79
EXIT_INTERRUPTED = 130  # by Ctrl-C, as in a shell
EXIT_READER_GONE = 141  # as in a shell for a program that SIGPIPE ended
EXIT_RANK_LOST = 70  # a rank died or hung, and another's watchdog ended the run


class ConfigError(ValueError):
    """The flags, the recipe or the DeepSpeed JSON can't be used as given. The text tells what to do."""


class DataError(ValueError):
    """A data set, image or weight file can't be used as given. The text tells where and what to do."""


class FileProblem(DataError):
    """A file that a record names is missing or can't be used: the record is fine once the file is."""


class FileChanged(DataError):
    """A file has changed since its record was checked: the data have to be checked again."""


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The most similar of the known names, to suggest in a message; None where none is similar."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.7)), None)


def in_short(value: object) -> str:
    """A value as a message shows it: what was written may be very long."""
    try:
        text = str(value)
    except ValueError:  # Python converts no whole number with more than 4,300 digits
        return "a number with thousands of digits"
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text):,} characters)"
