"""Hashes of everything that an encoded data set depends on."""

import dataclasses
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute
from transformers import PreTrainedTokenizerBase

from llava_ds.boxes import LLAVA_BOXES
from llava_ds.constants import DataError
from llava_ds.data.file_slices import read_errors, write_errors
from llava_ds.data.sources.source import Source
from llava_ds.data.sources.tars import shard_contents
from llava_ds.files.places import open_data, real_path
from llava_ds.files.reading import FileState, read_json, state_of
from llava_ds.files.writing import write_whole
from llava_ds.geometry import BICUBIC, ImageOptions
from llava_ds.tokenizer import first_space_pattern, framing_ids

HASHES_VERSION = 1  # of notes on hashed files; raise it when the same file would get another hash
# Libraries that make ids of records: another version may make others.
ENCODING_LIBRARIES = ("tokenizers", "transformers", "jinja2")

DEEP = "deep"  # in a row's media: descriptions of images that use little of their range
VIDEO_OPTIONS = ("video_fps", "frames_upbound", "pool_stride", "pool_mode", "newline_position")


def digest_of(parts: Iterable[str]) -> str:
    """A hash of all parts in order, usable as a folder's name."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()[:20]


def tokenizer_parts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Everything that a tokenizer's ids depend on: itself, what it adds around a text, and what a template may read."""
    first_space = first_space_pattern(tokenizer)
    return [
        tokenizer.backend_tokenizer.to_str(),
        json.dumps(sorted(tokenizer.get_added_vocab().items())),
        json.dumps([tokenizer.bos_token, tokenizer.eos_token, str(tokenizer.chat_template)]),
        json.dumps([framing_ids(tokenizer), first_space and first_space.pattern]),
        json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str),
    ]


def versions_of(packages: Iterable[str]) -> list[str]:
    """A text with the installed version of every package."""
    return [f"{name} {_version(name)}" for name in packages]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def options_part(options: ImageOptions) -> str:
    """All fields as text. The class's earlier name is in fingerprints of earlier runs, and stays; later fields are in
    none of them while they change nothing."""
    text = repr(options).replace(ImageOptions.__name__, "PictureOptions", 1)
    return text.replace(", value_range=None", "", 1).replace(f", short_side=None, square_resample={BICUBIC}", "", 1)


def has_videos(media: pa.ChunkedArray) -> bool:
    """True if a table's column of media has a video."""
    # A path may hold these words too, but not these quotes: JSON escapes them.
    found = [pa.compute.any(pa.compute.match_substring(media, f'["{kind}", [')) for kind in ("frames", "video")]
    return any(each.as_py() for each in found)


def has_boxes(media: pa.ChunkedArray) -> bool:
    """True if a table's column of media has boxes or points."""
    return bool(pa.compute.any(pa.compute.match_substring(media, '{"boxes": [')).as_py())


def deep_rows(media: pa.ChunkedArray) -> np.ndarray:
    """Rows whose column of media describes images that use little of their range, ascending."""
    found = pa.compute.match_substring(media, f'{{"{DEEP}": [')
    return pa.compute.indices_nonzero(found).to_numpy().astype(np.int64)


def box_parts(options: ImageOptions) -> list[str]:
    """How boxes are written, of models that don't write them as LLaVA does."""
    return [] if options.boxes == LLAVA_BOXES else [repr(options.boxes)]


def video_parts(options: ImageOptions) -> list[str]:
    """What a ready model makes of videos."""
    return [] if options.video is None else [repr(options.video), repr(options.force_sample)]


def options_that_matter(image_options: ImageOptions, videos: bool) -> ImageOptions:
    """The options, with defaults for those that change no sample of a table. videos: it has some.

    max_pixels is such an option, as the rows already show which images were too large.
    """
    unused = {"max_pixels"} if videos else {"max_pixels", *VIDEO_OPTIONS}
    defaults = {field.name: field.default for field in dataclasses.fields(image_options) if field.name in unused}
    return dataclasses.replace(image_options, **defaults)


def file_stamp(source: Source, path: str, cache_dir: Path) -> str:
    """A text that differs if encoded rows would. For tars it includes the file's stamp, as slices may move."""
    if source.kind != "webdataset":
        return file_digest(source, path, cache_dir)
    with read_errors(path):
        return f"{os.path.basename(path)} {state_of(path)}"


class _Note(FileState):
    sha256: str


def file_digest(source: Source, path: str, cache_dir: Path) -> str:
    """A hash of a source's file, remembered in cache_dir while its stamp and some of its blocks stay the same."""
    with read_errors(path):
        seen = state_of(path)
    # The contents count by their stamp and blocks (FileState), and a tar's by its members.
    note = cache_dir / "hashes" / f"{digest_of([str(HASHES_VERSION), real_path(path), source.kind])}.json"
    try:
        known = read_json(note, _Note)
        if seen.items() <= known.items():
            return known["sha256"]
    except (FileNotFoundError, DataError):
        pass  # not hashed before, or the note was cut short by a kill
    digest = hashlib.sha256()
    with read_errors(path):
        for block in shard_contents(path) if source.kind == "webdataset" else _blocks(path):
            digest.update(block)
    sha256 = digest.hexdigest()
    with write_errors(cache_dir, "the hashes of files"):
        note.parent.mkdir(parents=True, exist_ok=True)
        write_whole(note, json.dumps({**seen, "sha256": sha256}), shared=True)
    return sha256


def _blocks(path: str) -> Iterator[bytes]:
    with open_data(path) as stream:
        while block := stream.read(1 << 20):
            yield block
