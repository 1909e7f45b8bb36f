"""Schemas of the cache's rows, and readers of their media and rejections."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from llava_ds import geometry
from llava_ds.boxes import Numbers
from llava_ds.data import token_runs
from llava_ds.data.cache import RowTable
from llava_ds.data.fingerprint import DEEP
from llava_ds.data.sample import FileRef, Media
from llava_ds.data.seen_files import COLUMNS
from llava_ds.layouts import MediaLayout

if TYPE_CHECKING:
    from llava_ds.videos import Footage

_NAMES_AND_NUMBERS = re.compile(r"'[^']*'|\"[^\"]*\"|/\S+|-?\d[\d.]*")

RECORDS_PER_CALL = 256  # records that a worker process checks per call

RECORDS = pa.schema(
    [
        ("source", pa.int32()),
        ("file", pa.string()),
        ("line", pa.int64()),
        ("index", pa.int64()),
        ("text", pa.binary()),
    ]
)

# One row per record, in the sources' order. reason is null for accepted records. A record rejected because of a missing
# or broken file keeps its text in text_to_retry. Ids and reasons of rejected records are printable. words is the length
# as LLaVA counts it. COLUMNS describe the image files (llava_ds.data.seen_files). The columns of token_runs hold ids,
# labels and weights. unread: names of keys that are not read, one per line; left_out: number of thoughts that the
# template does not write.
ROWS = pa.schema(
    [
        ("source", pa.int32()),
        ("file", pa.string()),
        ("line", pa.int64()),
        ("index", pa.int64()),
        ("id", pa.string()),
        ("reason", pa.string()),
        ("text_to_retry", pa.binary()),
        *token_runs.COLUMNS,
        ("media", pa.string()),
        ("length", pa.int32()),
        ("num_targets", pa.int32()),
        ("num_turns", pa.int32()),
        ("num_pictures", pa.int32()),
        ("num_tiles", pa.int32()),
        ("tile_pairs", pa.int64()),
        ("words", pa.int32()),
        ("truncated", pa.bool_()),
        *COLUMNS,
        ("unmarked", pa.string()),
        token_runs.WEIGHTS,
        ("unread", pa.string()),
        ("left_out", pa.int32()),
    ]
)


# Preferences: ids and labels of the chosen and then the rejected answer, the length of the chosen part, and the margin
# by which the chosen answer is better.
PAIR_ROWS = ROWS.append(pa.field("chosen_length", pa.int32())).append(pa.field("margin", pa.float64()))


# Other columns of the records: a JSON object per row, null for rejected records. Added only if an objective needs it.
OTHER_COLUMNS = pa.field("other_columns", pa.string())
# Values of plugins' fields: a JSON object by plugin, null for rejected records. Added only if a plugin reads fields.
FIELDS = "fields"


@dataclass
class SizedMedia:
    """An image or video, with the upright size in pixels of each image or sampled frame.

    boxes: coordinates of its boxes and points, as in the sample's text; footage: number and rate of a video's frames,
    if its architecture samples them; deep: descriptions of images with more than 8 bits that use little of their range.
    """

    media: Media
    sizes: tuple[tuple[int, int], ...]
    boxes: tuple[Numbers, ...] = ()
    footage: "Footage | None" = None
    deep: tuple[str, ...] = ()

    @classmethod
    def of(cls, media: Media, options: geometry.ImageOptions) -> "SizedMedia":
        """Read the headers of the files. Raises DataError as probe does."""
        from llava_ds.data.images.headers import footage

        notes: list[str] = []
        found, sizes = footage(media, options, notes)
        return cls(media, sizes, footage=found, deep=tuple(notes))


def layout_of(one: SizedMedia, num_media: int, options: geometry.ImageOptions) -> MediaLayout:
    """Compute the layout in tiles and tokens of one image or video. num_media: images and videos of its sample."""
    return geometry.media_layout(one.media.kind, one.sizes, num_media, one.media.apply_settings(options), one.footage)


def media_to_text(media: tuple[SizedMedia, ...]) -> str:
    """Serialize media to the JSON stored in the table."""
    if not media:
        return "[]"
    return json.dumps(
        [
            [m.media.kind, [[r.path, r.offset, r.num_bytes] for r in m.media.refs], m.sizes]
            + [{"settings": m.media.settings}] * bool(m.media.settings)
            + [{"boxes": m.boxes}] * bool(m.boxes)
            + [{"footage": m.footage}] * bool(m.footage)
            + [{DEEP: m.deep}] * bool(m.deep)
            for m in media
        ]
    )


def media_from_text(text: str) -> tuple[SizedMedia, ...]:
    """Parse the JSON written by media_to_text."""
    return tuple(
        SizedMedia(
            Media(
                kind,
                tuple(FileRef(*ref) for ref in refs),
                tuple((name, value) for more in rest for name, value in more.get("settings", ())),
            ),
            tuple(tuple(size) for size in sizes),
            tuple(tuple(numbers) for more in rest for numbers in more.get("boxes", ())),
            next((_footage(*more["footage"]) for more in rest if "footage" in more), None),
            tuple(text for more in rest for text in more.get(DEEP, ())),
        )
        for kind, refs, sizes, *rest in json.loads(text)
    )


def _footage(num_frames: int, rate: float) -> "Footage":
    from llava_ds.videos import Footage

    return Footage(num_frames, rate)


def media_of_text(text: str) -> list[Media]:
    """Parse the JSON written by media_to_text, without the sizes."""
    return [sized.media for sized in media_from_text(text)]


def rejections(table: RowTable, rows: np.ndarray) -> Iterator[dict[str, object]]:
    """Yield rejected rows as in skipped.jsonl: file, line (from 1), index (from 0), id and reason."""
    if len(rows):
        yield from table.take(["file", "line", "index", "id", "reason"], rows).to_pylist()


def place_of(row: dict[str, object]) -> str:
    """Return file:line of a record, or only the file if its JSON list is on a single line."""
    return str(row["file"]) if row["line"] == 1 and row["index"] > 0 else f"{row['file']}:{row['line']}"


def reasons_in_short(reasons: list[str], most: int = 8) -> list[str]:
    """Return lines with the most frequent reasons. Reasons that differ only in names and numbers count as one."""
    kinds, first = Counter(), {}
    for reason in reasons:
        kind = _NAMES_AND_NUMBERS.sub("…", reason)
        kinds[kind] += 1
        first.setdefault(kind, reason)
    lines = [f"  {count:,} x {kind if count > 1 else first[kind]}" for kind, count in kinds.most_common(most)]
    return lines + ([f"  and {len(kinds) - most} more reasons"] if len(kinds) > most else [])


def would_be_accepted(
    table: RowTable, numbers: Sequence[int], check: Callable[[], Callable[[pa.Table], pa.Table]]
) -> bool:
    """True if a record that was rejected for a missing or broken file would be accepted now.

    numbers: indices of the table's files to check; check: builds the function that turns a RECORDS table into a ROWS
    table; called only if such a record exists.
    """
    columns = ["text_to_retry" if name == "text" else name for name in RECORDS.names]
    for rows in table.files(columns, numbers):
        rows = rows.select(columns)
        for batch in rows.to_batches(max_chunksize=RECORDS_PER_CALL):
            tried = pa.Table.from_batches([batch.filter(batch.column("text_to_retry").is_valid())])
            if len(tried) and check()(tried.rename_columns(RECORDS.names)).column("reason").null_count:
                return True
    return False
