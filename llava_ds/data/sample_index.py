"""Index of a data set: a few numbers per accepted sample, in arrays shared by all processes of a machine.

It is derived from the encoded rows and stored in their folder. An index of an earlier version is rebuilt.
"""

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute

from llava_ds.data.cache import RowTable
from llava_ds.data.fingerprint import DEEP, deep_rows, digest_of, has_boxes, has_videos
from llava_ds.data.mapped_arrays import Mapped, mapped
from llava_ds.data.sample import IMAGE_LEFT_OUT, UNMARKED_TEXTS
from llava_ds.data.seen_files import contents_digest

VERSION = 4  # increment it when the index of the same rows would change

LLAVA_TOKENS_PER_IMAGE = 128  # words that LLaVA adds to the length of a sample with images

FIRST_NAMED = 3  # number of images to name that use little of their range
MAX_KEYS = 100  # number of keys to list that are not read, the most frequent first

PERCENTILES = (5, 25, 50, 75, 95, 99, 100)


@dataclass(frozen=True)
class SampleIndex:
    """Numbers per sample, in the samples' order.

    rows: row in the table of all records; lengths: tokens; num_targets: supervised tokens; words: length as LLaVA
    counts it, negative without images; words_next: length as LLaVA-NeXT counts it; num_images: images and videos;
    num_tiles: their tiles. These are (samples,) int32. tile_pairs: as in Counts, int64. folder: cache folder for data
    derived from these samples; facts: sums over the samples, from _sums.
    """

    folder: Path
    rows: np.ndarray
    lengths: np.ndarray
    num_targets: np.ndarray
    words: np.ndarray
    words_next: np.ndarray
    num_images: np.ndarray
    num_tiles: np.ndarray
    tile_pairs: np.ndarray
    facts: dict[str, object]

    def part(self, name: str, draw: Callable[[], np.ndarray], table: RowTable) -> "SampleIndex":
        """Build the index of some of the samples.

        name: identifies the selection; draw: returns the selected samples in order (facts["drawn"] is their hash);
        table: table of all records.
        """
        folder = self.folder.with_name(f"{self.folder.name}-{digest_of([name])}")

        def make() -> Mapped:
            samples = draw()
            arrays = {name: np.ascontiguousarray(getattr(self, name)[samples]) for name in _COLUMNS}
            facts = _sums(arrays, table)
            return Mapped(arrays, {"sums": facts["sums"] | {"drawn": _sha256(samples)}})

        return _index(folder, mapped(folder, make))


@dataclass(frozen=True)
class TableIndex:
    """Index of a whole table. rejected: rows of the rejected records; outcome: hash of the acceptance flags and hash of
    all lengths; contents: hash of the image and video files. The hashes are part of the fingerprint."""

    accepted: SampleIndex
    rejected: np.ndarray
    outcome: tuple[str, str]
    contents: str
    has_videos: bool
    has_boxes: bool


_COLUMNS = ("rows", "lengths", "num_targets", "words", "words_next", "num_images", "num_tiles", "tile_pairs")


def index_of(table: RowTable, generation: Path) -> TableIndex:
    """Open the index of a generation's rows. The first process builds it."""
    folder = generation / f"index-{VERSION}"
    found = mapped(folder, lambda: _made(table))
    facts = found.facts
    return TableIndex(
        _index(folder, found),
        found.arrays["rejected"],
        tuple(facts["outcome"]),
        facts["contents"],
        facts["has_videos"],
        facts["has_boxes"],
    )


def _index(folder: Path, found: Mapped) -> SampleIndex:
    # Slices of np.memmap are slow: convert to plain arrays.
    return SampleIndex(folder, *(np.asarray(found.arrays[name]) for name in _COLUMNS), found.facts["sums"])


def _made(table: RowTable) -> Mapped:
    accepted = table.column("reason").is_null().to_numpy()
    lengths = numbers(table, "length")
    rows = np.flatnonzero(accepted).astype(np.int32)
    words = numbers(table, "words")[rows]
    arrays = {
        "rows": rows,
        "rejected": np.flatnonzero(~accepted).astype(np.int32),
        "lengths": lengths[rows],
        "num_targets": numbers(table, "num_targets")[rows],
        "words": words,
        "words_next": np.abs(words) + LLAVA_TOKENS_PER_IMAGE * _has_images_of_next(table)[rows].astype(np.int32),
        "num_images": numbers(table, "num_pictures")[rows],
        **{name: numbers(table, name)[rows] for name in ("num_tiles", "tile_pairs")},
    }
    facts = {
        "outcome": [_sha256(accepted), _sha256(lengths)],
        "contents": contents_digest(table),
        "has_videos": has_videos(table.column("media")),
        "has_boxes": has_boxes(table.column("media")),
    }
    return Mapped(arrays, _sums(arrays, table) | facts)


def _has_images_of_next(table: RowTable) -> np.ndarray:
    """Return (records,) bool: True if LLaVA-NeXT adds words for an image. For videos it adds none."""
    shown = pa.compute.match_substring(table.column("media"), '["image", [')
    left_out = pa.compute.equal(table.column("unmarked"), IMAGE_LEFT_OUT)
    return pa.compute.or_kleene(shown, left_out).fill_null(False).to_numpy()


def _sums(arrays: dict[str, np.ndarray], table: RowTable) -> dict[str, object]:
    """Sum tokens, answers and the like over all samples of an index."""
    rows, lengths = arrays["rows"], arrays["lengths"]
    unmarked = pa.compute.value_counts(table.column("unmarked").take(pa.array(rows))).to_pylist()
    counts = {each["values"]: each["counts"] for each in unmarked}
    unread = pa.compute.value_counts(table.column("unread").take(pa.array(rows))).to_pylist()
    keys = Counter()
    for each in unread:
        keys.update(dict.fromkeys(filter(None, each["values"].split("\n")), each["counts"]))
    left_out = numbers(table, "left_out")[rows]
    sums = {
        "tokens": int(lengths.sum(dtype=np.int64)),
        "targets": int(arrays["num_targets"].sum(dtype=np.int64)),
        "images": int(arrays["num_images"].sum(dtype=np.int64)),
        "answers": int(numbers(table, "num_turns")[rows].sum(dtype=np.int64)),
        "truncated": int(np.count_nonzero(numbers(table, "truncated")[rows])),
        "weighed": _num_weighed(table, rows),
        "unmarked": {kind: counts[kind] for kind in UNMARKED_TEXTS if kind in counts},
        "deep": _deep_images(rows, table),
        "unread": dict(keys.most_common(MAX_KEYS)),
        "left_out": [int(left_out.sum(dtype=np.int64)), int(np.count_nonzero(left_out))],
        "percentiles": [int(n) for n in np.percentile(lengths, PERCENTILES)] if len(rows) else [],
    }
    return {"sums": sums}


def _deep_images(rows: np.ndarray, table: RowTable) -> dict[str, object]:
    """Count the images of some rows that use only a small part of their value range, and describe the first few."""
    media = table.column("media")
    those = np.intersect1d(deep_rows(media), rows)
    described = media.take(pa.array(those)).to_pylist() if len(those) else []
    found = [more.get(DEEP, ()) for text in described for _, _, _, *rest in json.loads(text) for more in rest]
    distinct = list(dict.fromkeys(itertools.chain(*found)))
    return {"number": len(distinct), "first": distinct[:FIRST_NAMED]}


def _num_weighed(table: RowTable, rows: np.ndarray) -> int:
    """Number of samples with a loss weight other than 1."""
    weights = table.column("weights")
    return 0 if weights.null_count == len(weights) else int(np.count_nonzero(weights.is_valid().to_numpy()[rows]))


def numbers(table: RowTable, name: str) -> np.ndarray:
    """Return a column of numbers as an array."""
    return table.column(name).to_numpy()


def _sha256(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()
