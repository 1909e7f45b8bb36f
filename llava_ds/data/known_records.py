"""Facts about records found by an earlier start, saved in --cache_dir so that a start from the cache opens no source.

Opening a source detects the record format from the first records, and checks that the learned answers match the
prompts. A note is valid while the files that were read are unchanged. Folders, patterns and object stores have no note,
because every start has to search them.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path

from typing_extensions import TypedDict

from llava_ds import __version__
from llava_ds.config.arguments import Arguments
from llava_ds.constants import DataError
from llava_ds.data.file_slices import write_errors
from llava_ds.data.fingerprint import digest_of
from llava_ds.files.reading import FileState, read_json, state_of
from llava_ds.files.writing import write_whole

NOTES_VERSION = 1  # increment it when the facts about the same records would change
FLAGS = ("data_path", "data_split", "data_format", "data_columns", "image_folder", "video_folder")
FLAGS += ("on_unmarked_image", "bbox_type", "cache_dir")
# A file modified this recently before opening may change again with the same mtime.
RACY_S = 2.0


class KnownSource(TypedDict):
    """Facts about a source. name: short name; description: text to print; reading: how its files are read; roots: its
    image folders and its own path; stamp, contents: hashes of all its files."""

    name: str
    description: str
    reading: str
    bbox_type: str
    roots: list[str]
    stamp: str
    contents: str


class KnownRecords(TypedDict):
    """Facts about the records of all sources. earlier: result of PromptCheck.note_on_earlier, None until it is
    computed."""

    sources: list[KnownSource]
    are_pairs: bool
    earlier: str | None


class _Note(TypedDict):
    files: dict[str, FileState]
    known: KnownRecords


def note_path(args: Arguments, encoding: Iterable[str]) -> Path:
    """Path of the note for these flags. encoding: texts of everything else that the facts depend on."""
    flags = [f"{name} {getattr(args.data, name)}" for name in FLAGS]
    here = [__version__, os.getcwd(), os.path.expanduser("~"), args.training.objective]
    here += ["other columns"] * args.traits.other_columns
    digest = digest_of([str(NOTES_VERSION), *here, *flags, *encoding])
    return Path(args.data.cache_dir).expanduser() / "records" / f"{digest}.json"


def recall(note: Path) -> KnownRecords | None:
    """Load the facts in a note; None if it is missing, or if one of its files has changed."""
    try:
        found = read_json(note, _Note)
        if all(state_of(path) == state for path, state in found["files"].items()):
            return found["known"]
    except (OSError, DataError):  # note missing or truncated by a kill, or file gone
        pass
    return None


def remember(note: Path, known: KnownRecords, files: Iterable[str], began: float) -> None:
    """Save the facts found in files, unless a file may have changed meanwhile. began: time before the first file was
    opened."""
    states = {path: state_of(path) for path in files}
    if any(os.stat(path).st_mtime > began - RACY_S for path in states):
        return
    _write(note, {"files": states, "known": known})


def remember_earlier(note: Path, earlier: str) -> None:
    """Add KnownRecords' `earlier` to a note, if the note exists."""
    try:
        found = read_json(note, _Note)
    except (OSError, DataError):
        return
    _write(note, {**found, "known": {**found["known"], "earlier": earlier}})


def _write(note: Path, content: _Note) -> None:
    with write_errors(note.parent.parent, "the facts of records"):
        note.parent.mkdir(parents=True, exist_ok=True)
        write_whole(note, json.dumps(content), shared=True)
