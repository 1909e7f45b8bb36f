"""Every record checked and encoded before anything is built: what is accepted, what is not, and why."""

import contextlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute

from llava_ds import geometry
from llava_ds.constants import ConfigError, DataError, FileProblem
from llava_ds.data.encode import Encoded, Encoder
from llava_ds.data.images.decode import probe
from llava_ds.data.sample import IMAGE_LEFT_OUT, FileRef, Media, Sample
from llava_ds.data.seen_files import COLUMNS, SeenFile, as_columns, seen_files, stamps_of
from llava_ds.data.sources import Source, to_sample
from llava_ds.data.sources.embedded import IMAGES
from llava_ds.runtime.ranks import printable, progress_bar

_NAMES_AND_NUMBERS = re.compile(r"'[^']*'|\"[^\"]*\"|/\S+|-?\d[\d.]*")

PART_BYTES = 4 << 20  # of records that are checked together, whose tokens take many times the room of their text

RECORDS_PER_BATCH, CHARS_PER_BATCH = 1_000, 8 << 20  # that are read before they are written, whichever is less
RECORDS_PER_CALL = 256  # that a worker process checks at a time
RECORDS_PER_WORKER = 2_000  # below this, starting another process takes longer than it saves

MAX_ID = 200  # characters that are kept of the id of a record that is not trained on

RECORDS = pa.schema(
    [
        ("source", pa.int32()),
        ("file", pa.string()),
        ("line", pa.int64()),
        ("index", pa.int64()),
        ("text", pa.binary()),
    ]
)

# One row per record, in the sources' order. reason is null for what is accepted; a rejected row keeps its text where
# the reason lies in another file, so that it can be tried again, and its id and reason are spelled so that they can be
# printed. words is LLaVA's measure of length; files and what was seen of them are llava_ds.data.seen_files'.
ROWS = pa.schema(
    [
        ("source", pa.int32()),
        ("file", pa.string()),
        ("line", pa.int64()),
        ("index", pa.int64()),
        ("id", pa.string()),
        ("reason", pa.string()),
        ("text_to_retry", pa.binary()),
        ("input_ids", pa.list_(pa.int32())),
        ("labels", pa.list_(pa.int32())),
        ("media", pa.string()),
        ("length", pa.int32()),
        ("num_targets", pa.int32()),
        ("num_turns", pa.int32()),
        ("num_pictures", pa.int32()),
        ("words", pa.int32()),
        ("truncated", pa.bool_()),
        *COLUMNS,
        ("unmarked", pa.string()),
    ]
)


@dataclass(frozen=True)
class SizedMedia:
    """An image or video with the upright size in pixels of each of its images (or sampled frames)."""

    media: Media
    sizes: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Checker:
    """Turns a table of RECORDS into one of ROWS, as long: what worker processes do."""

    sources: tuple[Source, ...]
    encoder: Encoder
    image_options: geometry.ImageOptions

    def __call__(self, records: pa.Table) -> pa.Table:
        parts = [self._rows(records.slice(first, last - first)) for first, last in _parts(records.column("text"))]
        return pa.concat_tables(parts)

    def _rows(self, records: pa.Table) -> pa.Table:
        places = [records.column(name).to_pylist() for name in ("source", "index", "text")]
        outcomes = [self._check(*place) for place in zip(*places)]
        good = [one for one in outcomes if isinstance(one, _Checked)]
        coded = iter(self.encoder.encode_batch([(one.sample.messages, one.num_tokens) for one in good]))
        outcomes = [self._coded(one, next(coded)) if isinstance(one, _Checked) else one for one in outcomes]
        columns = {name: records.column(name).combine_chunks() for name in ("source", "file", "line", "index")}
        to_retry = [isinstance(one, _Rejected) and isinstance(one.error, FileProblem) for one in outcomes]
        columns["text_to_retry"] = pa.array(
            [text if again else None for again, text in zip(to_retry, places[2])], pa.binary()
        )
        columns |= _columns(outcomes)
        return pa.table([columns[field.name] for field in ROWS], schema=ROWS)

    def _check(self, source: int, index: int, text: bytes) -> "_Checked | _Rejected":
        try:
            sample = to_sample(text.decode("utf-8", "surrogatepass"), self.sources[source], index)
        except DataError as error:
            return _Rejected(_id_in(text, self.sources[source].columns.id, index), error)
        try:
            looked_at = [self._looked_at(one) for one in sample.media]
        except DataError as error:
            return _Rejected(sample.id, error)
        media = tuple(sized for sized, _ in looked_at)
        seen = [file for _, files in looked_at for file in files]
        return _Checked(
            sample, media, seen, [layout_of(one, len(media), self.image_options).num_tokens for one in media]
        )

    def _coded(self, one: "_Checked", coded: Encoded | DataError) -> "_Accepted | _Rejected":
        if isinstance(coded, DataError):
            return _Rejected(one.sample.id, coded)
        if coded.num_targets == 0:
            limit = self.encoder.options.max_length
            why = f"the first {limit} tokens hold no answer" if coded.truncated else "no answer has a text"
            return _Rejected(one.sample.id, DataError(f"nothing to learn from: {why}"))
        return _Accepted(one.sample, one.media, one.seen, coded)

    def _looked_at(self, media: Media) -> tuple[SizedMedia, list[SeenFile]]:
        try:
            stamps = stamps_of(media, self.image_options)  # first: what is written meanwhile has another one
            sized = SizedMedia(media, probe(media, self.image_options))
            return sized, seen_files(media, self.image_options, stamps)
        except (DataError, ConfigError) as error:  # ConfigError: an extra is missing, which may be there next time
            raise FileProblem(str(error)) from error
        except OSError as error:
            raise FileProblem(f"{error.filename or media.refs[0].path} can't be read: {error.strerror}") from error


@dataclass(frozen=True)
class _Checked:
    """A record that can be used as far as one can tell without encoding it; num_tokens of each of its media."""

    sample: Sample
    media: tuple[SizedMedia, ...]
    seen: list[SeenFile]
    num_tokens: list[int]


@dataclass(frozen=True)
class _Accepted:
    sample: Sample
    media: tuple[SizedMedia, ...]
    seen: list[SeenFile]
    coded: Encoded


@dataclass(frozen=True)
class _Rejected:
    id: str
    error: DataError


def _parts(texts: pa.ChunkedArray) -> Iterator[tuple[int, int]]:
    """(first, last) rows whose texts have no more than PART_BYTES together, unless one alone has."""
    ends = np.cumsum(pa.compute.binary_length(texts).to_numpy())
    first = 0
    while first < len(ends):
        before = ends[first - 1] if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + PART_BYTES, "right")))
        yield first, last
        first = last


def layout_of(one: SizedMedia, num_media: int, options: geometry.ImageOptions) -> geometry.MediaLayout:
    """How an image or video of a sample with num_media of them becomes tiles and tokens."""
    return geometry.media_layout(one.media.kind, one.sizes, num_media, options)


def _id_in(text: bytes, names: tuple[str, ...], index: int) -> str:
    """The id that a rejected record gives itself, as far as it can be read; else its index."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return str(index)
    found = [record[name] for name in names if name in record] if isinstance(record, dict) else []
    usable = found and isinstance(found[0], (str, int)) and not isinstance(found[0], bool)
    return str(found[0])[:MAX_ID].encode("utf-8", "replace").decode() if usable else str(index)


def _columns(outcomes: list[_Accepted | _Rejected]) -> dict[str, pa.Array]:
    """The columns that the outcomes make, a rejected record's being empty."""
    ids, reasons, media, numbers, truncated, unmarked = [], [], [], [], [], []
    input_ids, labels = [], []
    nothing = np.empty(0, np.int32)
    for one in outcomes:
        if isinstance(one, _Rejected):
            ids.append(printable(one.id))
            reasons.append(printable(str(one.error)))
            media.append("[]")
            numbers.append((0, 0, 0, 0, 0))
            truncated.append(False)
            unmarked.append("")
            input_ids.append(nothing)
            labels.append(nothing)
            continue
        messages = one.sample.messages
        words = sum(len(message.text.split()) for message in messages)
        ids.append(one.sample.id)
        reasons.append(None)
        media.append(media_to_text(one.media))
        numbers.append(
            (
                len(one.coded.input_ids),
                one.coded.num_targets,
                sum(message.role == "gpt" for message in messages),
                sum(len(sized.sizes) for sized in one.media),
                words if one.media or one.sample.unmarked == IMAGE_LEFT_OUT else -words,  # LLaVA looks for the field
            )
        )
        truncated.append(one.coded.truncated)
        unmarked.append(one.sample.unmarked)
        input_ids.append(one.coded.input_ids)
        labels.append(one.coded.labels)
    names = ("length", "num_targets", "num_turns", "num_pictures", "words")
    counts = np.array(numbers, np.int32).reshape(-1, len(names))
    return {
        "id": pa.array(ids, pa.string()),
        "reason": pa.array(reasons, pa.string()),
        "media": pa.array(media, pa.string()),
        "truncated": pa.array(truncated, pa.bool_()),
        "unmarked": pa.array(unmarked, pa.string()),
        "input_ids": _lists(input_ids),
        "labels": _lists(labels),
        **{name: pa.array(np.ascontiguousarray(counts[:, i])) for i, name in enumerate(names)},
        **as_columns([one.seen if isinstance(one, _Accepted) else [] for one in outcomes]),
    }


def _lists(rows: list[np.ndarray]) -> pa.Array:
    """Arrays of int32 as one Arrow list array, without a Python number in between."""
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(rows, dtype=np.int32)))


def media_to_text(media: tuple[SizedMedia, ...]) -> str:
    """Media as the table keeps them."""
    if not media:
        return "[]"
    return json.dumps([[m.media.kind, [[r.path, r.offset, r.num_bytes] for r in m.media.refs], m.sizes] for m in media])


def media_from_text(text: str) -> tuple[SizedMedia, ...]:
    """What media_to_text wrote."""
    return tuple(
        SizedMedia(Media(kind, tuple(FileRef(*ref) for ref in refs)), tuple(tuple(size) for size in sizes))
        for kind, refs, sizes in json.loads(text)
    )


def media_of_text(text: str) -> list[Media]:
    """Read what media_to_text wrote, without the sizes."""
    return [sized.media for sized in media_from_text(text)]


def rejections(table: pa.Table, rows: np.ndarray) -> Iterator[dict[str, object]]:
    """What skipped.jsonl says of rejected rows: file, line (from 1), index (from 0), id and reason."""
    if len(rows):
        yield from table.select(["file", "line", "index", "id", "reason"]).take(pa.array(rows)).to_pylist()


def place_of(row: dict[str, object]) -> str:
    """The file of a record, and its line where that tells it from others: in a JSON list of one line all are in it."""
    return str(row["file"]) if row["line"] == 1 and row["index"] > 0 else f"{row['file']}:{row['line']}"


def reasons_in_short(reasons: list[str], most: int = 8) -> list[str]:
    """The reasons, alike but for names and numbers counted together, the most frequent first."""
    kinds, first = Counter(), {}
    for reason in reasons:
        kind = _NAMES_AND_NUMBERS.sub("…", reason)
        kinds[kind] += 1
        first.setdefault(kind, reason)
    lines = [f"  {count:,} x {kind if count > 1 else first[kind]}" for kind, count in kinds.most_common(most)]
    return lines + ([f"  and {len(kinds) - most} more reasons"] if len(kinds) > most else [])


def can_now_be_used(table: datasets.Dataset, checker: Checker) -> bool:
    """Whether some record that was rejected for a missing or broken file would now be accepted."""
    columns = ["text_to_retry" if name == "text" else name for name in RECORDS.names]
    for batch in table.data.table.select(columns).to_batches(max_chunksize=RECORDS_PER_CALL):
        tried = pa.Table.from_batches([batch.filter(batch.column("text_to_retry").is_valid())])
        if len(tried) and checker(tried.rename_columns(RECORDS.names)).column("reason").null_count:
            return True
    return False


def write_rows(folder: Path, checker: Checker, num_workers: int | None) -> tuple[list[str], list[str]]:
    """Read all records, check and encode them in parallel, and leave Arrow files in a folder.

    Returns their names in order, and the files of images that came inside the records.
    """
    spool = folder / "records.arrow"
    with pa.OSFile(str(spool), "wb") as file, pa.ipc.new_stream(file, RECORDS) as writer:
        for batch in _record_batches(checker.sources):
            writer.write_batch(batch)
    records = datasets.Dataset.from_file(str(spool)).with_format("arrow")
    if not len(records):
        raise DataError(f"{', '.join(source.path for source in checker.sources)}: there is no record in it")
    most = num_workers or len(os.sched_getaffinity(0))
    num_proc = min(most, len(records) // RECORDS_PER_WORKER)
    with _bars():
        rows = records.map(
            checker,
            batched=True,
            batch_size=RECORDS_PER_CALL,
            remove_columns=records.column_names,
            features=datasets.Features.from_arrow_schema(ROWS),
            num_proc=num_proc if num_proc > 1 else None,  # 1 would start a process too
            cache_file_name=str(folder / "rows.arrow"),
            new_fingerprint=folder.name,
            desc="checking and encoding",
        )
    assert len(rows) == len(records), "a record was lost"
    names = [Path(file["filename"]).name for file in rows.cache_files]
    spool.unlink()
    spooled = (f"{source.spool}/{IMAGES}" for source in checker.sources)
    return names, sorted({path for path in spooled if os.path.exists(path)})


def _record_batches(sources: tuple[Source, ...]) -> Iterator[pa.RecordBatch]:
    for number, source in enumerate(sources):
        rows: list[tuple] = []
        num_chars = 0
        for record in progress_bar(iterable=source.read(), desc=f"reading {Path(source.path).name}", delay=2):
            # Broken text is the record's fault, which only its checker may find: it passes through as it is.
            text = record.text.encode("utf-8", "surrogatepass")
            rows.append((number, record.file.encode("utf-8", "replace").decode(), record.line, record.index, text))
            num_chars += len(record.text)
            if len(rows) == RECORDS_PER_BATCH or num_chars > CHARS_PER_BATCH:
                yield _batch(rows)
                rows, num_chars = [], 0
        if rows:
            yield _batch(rows)


def _batch(rows: list[tuple]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(zip(*rows), RECORDS)], schema=RECORDS
    )


@contextlib.contextmanager
def _bars() -> Iterator[None]:
    """Show the bars of `datasets` where a person watches; in a log file each would be hundreds of lines."""
    if sys.stderr.isatty():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()
