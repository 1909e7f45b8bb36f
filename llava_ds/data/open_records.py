"""Open records before they are encoded, and collect the facts about them that a start from the cache needs."""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from llava_ds.config.arguments import Arguments
from llava_ds.constants import DataError
from llava_ds.data.encode import encoder_of
from llava_ds.data.file_slices import read_errors, write_errors
from llava_ds.data.fingerprint import EncodingOptions, digest_of
from llava_ds.data.known_records import KnownRecords, KnownSource
from llava_ds.data.preflight import Checker
from llava_ds.data.prompt_check import refuse_unmatched_prompts
from llava_ds.data.sources import Source, SourceOptions, open_sources, parse_columns
from llava_ds.data.sources.open import MIXTURE_SUFFIXES
from llava_ds.data.sources.source import short_names
from llava_ds.data.sources.tars import shard_contents
from llava_ds.files.places import open_data
from llava_ds.files.reading import FileState, read_json, state_of
from llava_ds.files.urls import real_path
from llava_ds.files.writing import write_whole
from llava_ds.geometry import ImageOptions
from llava_ds.runtime.ranks import printable

HASHES_VERSION = 1  # version of the notes on hashed files; increment it when a file's hash would change


def open_records(
    args: Arguments, tokenizer: PreTrainedTokenizerBase, encoding: EncodingOptions, images: ImageOptions
) -> Checker:
    """Open the sources of --data_path, and build the checker of their records."""
    data = args.data
    options = SourceOptions(
        data_format=data.data_format,
        columns=parse_columns(data.data_columns),
        image_folder=data.image_folder,
        video_folder=data.video_folder,
        cache_dir=data.cache_dir,
        on_unmarked_image=data.on_unmarked_image,
        bbox_type=data.bbox_type,
        split=data.data_split,
        are_preferences=args.traits.pairs,
        other_columns=args.traits.other_columns,
        are_labelled=args.traits.labels,
    )
    return checker_of(open_sources(data.data_path, options), tokenizer, encoding, images)


def checker_of(
    sources: list[Source], tokenizer: PreTrainedTokenizerBase, encoding: EncodingOptions, images: ImageOptions
) -> Checker:
    """Build the checker of opened sources' records."""
    return Checker(tuple(sources), encoder_of(tokenizer, encoding, images), images)


def facts_of(checker: Checker, cache_dir: Path) -> KnownRecords:
    """Collect the facts of opened records. Hashes their files.

    Raises ConfigError if no answer in the first records matches its prompt (prompt_check).
    """
    names = short_names([source.path for source in checker.sources])
    sources = [_facts_of(source, name, cache_dir) for source, name in zip(checker.sources, names)]
    refuse_unmatched_prompts(checker.prompts, checker.sources)
    return KnownRecords(sources=sources, are_pairs=checker.takes_pairs, earlier=None)


def _facts_of(source: Source, name: str, cache_dir: Path) -> KnownSource:
    return KnownSource(
        name=name,
        description=printable(source.describe()),
        reading=repr(
            (
                *(source.kind, source.format, source.columns, source.selection, source.on_unmarked_image),
                *source.columns.label,
            )
        ),
        bbox_type=source.bbox_type,
        roots=[path for path in (source.image_root, source.video_root, source.path) if path is not None],
        stamp="".join(file_stamp(source, path, cache_dir) for path in source.files),
        contents="".join(file_digest(source, path, cache_dir) for path in source.files),
    )


def files_read(data_path: str, checker: Checker) -> list[str] | None:
    """Return the record files if all were opened by name. Returns None if folders, patterns or stores were searched,
    because their contents may change."""
    sources, is_mixture = checker.sources, data_path.endswith(MIXTURE_SUFFIXES)
    named = all(each.kind in ("json", "jsonl") and os.path.isfile(each.path) for each in sources)
    if not named or (len(sources) > 1 and not is_mixture):
        return None
    return [*([data_path] if is_mixture else []), *(path for each in sources for path in each.files)]


def file_stamp(source: Source, path: str, cache_dir: Path) -> str:
    """Return a text that changes if the rows would. For a tar it includes the file's state: slices may move."""
    if source.kind != "webdataset":
        return file_digest(source, path, cache_dir)
    with read_errors(path):
        return f"{os.path.basename(path)} {state_of(path)}"


class _Note(FileState):
    sha256: str


def file_digest(source: Source, path: str, cache_dir: Path) -> str:
    """Hash a source's file. The hash is cached in cache_dir while the file's state and some of its blocks stay the
    same."""
    with read_errors(path):
        seen = state_of(path)
    # A file's contents are identified by its state and blocks (FileState), a tar's by its members.
    note = cache_dir / "hashes" / f"{digest_of([str(HASHES_VERSION), real_path(path), source.kind])}.json"
    try:
        known = read_json(note, _Note)
        if seen.items() <= known.items():
            return known["sha256"]
    except (FileNotFoundError, DataError):
        pass  # not hashed before, or the note was truncated by a kill
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
