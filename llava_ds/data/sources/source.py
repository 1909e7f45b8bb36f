"""A source of records: its files, their format, and how to read them."""

import functools
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from llava_ds.boxes import BboxType
from llava_ds.constants import DataError, in_short
from llava_ds.data.file_slices import read_errors
from llava_ds.data.sources.embedded import IMAGES, ImageStore, Row, embed, rejected, spooled
from llava_ds.data.sources.json_files import holds_data_uri, read_json_list, read_jsonl
from llava_ds.data.sources.locate import KINDS
from llava_ds.data.sources.objects import OBJECTS
from llava_ds.data.sources.options import RECORD_WEIGHT_KEYS, TEMPLATE_KWARGS, TOOLS, Columns, RawRecord
from llava_ds.data.sources.selection import Selection
from llava_ds.data.sources.tables import num_parquet_rows, open_saved, read_csv, read_parquet, read_saved
from llava_ds.data.sources.tars import read_shard
from llava_ds.extensions.active import converters, record_fields


def converted(rows: Iterable[Row]) -> Iterator[Row]:
    """Apply the convert functions of all plugins to the rows. A record may become several records."""
    found = converters()
    return ((file, line, one) for file, line, text in rows for one in _convert(text, found)) if found else iter(rows)


def _convert(text: str, found: dict) -> list[str]:
    try:
        records = [json.loads(text)]
    except (ValueError, RecursionError):
        return [text]  # to_sample reports the reason
    if not isinstance(records[0], dict):
        return [text]
    for name, fields in found.items():
        try:
            made = [fields.convert(record) for record in records]
            records = [one for each in made for one in (each if isinstance(each, list) else [each])]
            assert all(isinstance(one, dict) for one in records), "convert() returned no record"
            texts = [json.dumps(one) for one in records]
        except DataError as error:
            return [rejected(str(error))]
        except Exception as error:
            return [rejected(f"can't be converted by {name}.py: {in_short(repr(error))}")]
    return texts


FORMATS = {
    "llava": "LLaVA records",
    "sharegpt": "ShareGPT records",
    "messages": "OpenAI messages",
    "texts": "pairs of user and assistant",
    "question_answer": "questions and answers",
    "caption": "captions",
    "preference": "preferences",
}
MAX_FIRST_CHARS = 8 << 20  # maximum number of characters of the first records
SPOOLED_KINDS = ("parquet", "datasets")  # kinds whose records may hold images as bytes


@dataclass(frozen=True)
class Source:
    """Records of one format. Small and picklable: workers receive it with every task.

    files: all files that determine the records; spool: folder for embedded images; slices_of: spools and tars that
    records may refer to; seen: (field, name) pairs in the first records; bbox_type: type of box coordinates, used if a
    record has none; note: a remark to print on the choice of files; other_columns: as in SourceOptions; unread_columns:
    table columns omitted from the records.
    """

    path: str
    kind: str
    format: str
    image_root: str | None
    video_root: str | None
    files: tuple[str, ...]
    spool: str
    columns: Columns = field(default_factory=Columns)
    selection: Selection = field(default_factory=Selection)
    seen: tuple[tuple[str, str], ...] = ()
    marks_added: bool = False
    on_unmarked_image: str = "prepend"
    bbox_type: BboxType = "real"
    note: str = ""
    other_columns: bool = False
    unread_columns: tuple[str, ...] = ()
    slices_of: frozenset[str] = field(init=False, default=frozenset())

    def __post_init__(self) -> None:
        slices = frozenset(self.files) if self.kind == "webdataset" else frozenset([f"{self.spool}/{IMAGES}"])
        object.__setattr__(self, "slices_of", slices)

    @functools.cached_property
    def read_keys(self) -> frozenset[str]:
        """All keys of a record that are read."""
        fields = (key for fields in record_fields().values() for key in fields.names)
        names = frozenset((*self.columns.all(), OBJECTS, "kind", *fields))
        if self.format == "caption":
            return names.difference(self.columns.turns)
        return names.union(RECORD_WEIGHT_KEYS, (TOOLS, TEMPLATE_KWARGS))

    def read(self) -> Iterator[RawRecord]:
        """Yield the selected records in the files' order, the same in every process.

        Only one record, or one batch of a table, is in memory. Raises DataError if a file can't be read.
        """
        return self.selection.apply(self._records, self.count)

    def count(self) -> int:
        """Count the records in the files, before any selection. Reads the files unless they are tables."""
        if self.kind == "parquet":
            return sum(map(num_parquet_rows, self.files))
        if self.kind == "datasets":
            return len(open_saved(self._names()[0]))
        return sum(1 for _ in converted(self._rows()))

    def describe(self) -> str:
        """Describe the files, the format and the names of fields in one line."""
        files = len(self._names())
        line = f"{self.path}: {FORMATS[self.format]} in {KINDS[self.kind]}"
        line += f" of {files:,} files" if files > 1 else ""
        line += "; " + (", ".join(f"{name} from {column!r}" for name, column in self.seen) or "no field recognised")
        names = dict(self.seen)
        if self.kind == "webdataset":
            line += "; images read in place"
        elif "image" in names and self.image_root is not None:
            line += f"; images in {self.image_root}"
        if "video" in names and self.video_root not in (None, self.image_root):
            line += f"; videos in {self.video_root}"
        if self.marks_added and self.on_unmarked_image == "prepend":
            line += "; images without a mark are shown at the start of the first question"
        line += f"; {self.note}" if self.note else ""
        selected = self.selection.describe()
        return line + (f"; taken: {selected}" if selected else "")

    def first(self, num_records: int) -> list[RawRecord]:
        """Read the first num_records records, or fewer if they are long, without embedded images."""
        rows, names = islice(converted(self._parse(ImageStore(_Nowhere(), ""))), num_records), self._names()
        found: list[RawRecord] = []
        left = MAX_FIRST_CHARS
        for i, (file, line, text) in enumerate(rows):
            found.append(RawRecord(names[file], line, i, text))
            left -= len(text)
            if left < 0:
                break
        return found

    def _records(self) -> Iterator[RawRecord]:
        names = self._names()
        for index, (file, line, text) in enumerate(converted(self._rows())):
            yield RawRecord(names[file], line, index, text)

    def _names(self) -> tuple[str, ...]:
        return (os.path.dirname(self.files[0]),) if self.kind == "datasets" else self.files

    def _rows(self) -> Iterator[Row]:
        if self.kind in SPOOLED_KINDS:
            return spooled(self.spool, self._parse)
        if self.kind in ("json", "jsonl") and any(map(holds_data_uri, self.files)):
            return spooled(self.spool, self._without_data_uris)
        return self._parse(None)

    def _parse(self, store: ImageStore | None) -> Iterator[Row]:
        """Yield rows from the files; `store` receives the images inside tables."""
        with read_errors(self.path):
            yield from self._parsed(store)

    def _parsed(self, store: ImageStore | None) -> Iterator[Row]:
        if self.kind == "parquet":
            yield from read_parquet(self.files, self.columns, store, self.other_columns)
        elif self.kind == "datasets":
            yield from read_saved(self._names()[0], self.columns, store, self.other_columns)
        else:
            for number, path in enumerate(self.files):
                for line, text in self._parse_file(path, store):
                    yield number, line, text

    def _parse_file(self, path: str, store: ImageStore | None) -> Iterator[tuple[int, str]]:
        if self.kind == "webdataset":
            return read_shard(path, self.columns)
        if self.kind == "json":
            return read_json_list(path)
        if path.lower().endswith((".csv", ".tsv")):
            return read_csv(path, self.columns)
        if path.endswith(".parquet"):
            store = store or ImageStore(_Nowhere(), "")  # metadata.parquet holds image names, no bytes
            rows = read_parquet((path,), self.columns, store, self.other_columns)
            return ((line, text) for _, line, text in rows)
        return read_jsonl(path)

    def _without_data_uris(self, store: ImageStore) -> Iterator[Row]:
        for number, line, text in self._parse(None):
            try:
                record = json.loads(text)
                text = json.dumps(embed(record, self.columns, store.embed) if isinstance(record, dict) else record)
            except RecursionError:
                text = rejected("is nested too deeply")
            except ValueError:
                text = text.replace("\n", " ")  # to_sample gives the reason
            yield number, line, text


def short_names(paths: list[str]) -> list[str]:
    """Unique short names of data sources: the file's name, with as many folders as needed."""
    parts, stems = [Path(path).parts for path in paths], [Path(path).stem for path in paths]
    for depth in range(max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts] if depth else stems
        if len(set(names)) == len(names):
            return names
    # A mixture may list a file several times, with different selections.
    return [f"{path} ({paths[: i + 1].count(path)})" if paths.count(path) > 1 else path for i, path in enumerate(paths)]


class _Nowhere:
    """A file that discards its bytes."""

    def write(self, data: bytes) -> int:
        return len(data)
