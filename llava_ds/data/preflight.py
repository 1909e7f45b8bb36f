"""Check and encode every record before the model is built, with a reason for each rejected record."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute

from llava_ds import geometry
from llava_ds.constants import ConfigError, DataError, FileProblem
from llava_ds.data import token_runs
from llava_ds.data.encode import Encoded, Encoder
from llava_ds.data.encoded_rows import (
    FIELDS,
    OTHER_COLUMNS,
    PAIR_ROWS,
    ROWS,
    SizedMedia,
    layout_of,
    media_to_text,
)
from llava_ds.data.grounding import write_objects
from llava_ds.data.prompt_check import PromptCheck, with_generation_prompt
from llava_ds.data.sample import IMAGE_LEFT_OUT, Media, Sample, Transcript
from llava_ds.data.seen_files import SeenFile, as_columns, seen_files, stamps_of
from llava_ds.data.sources import Source, to_sample
from llava_ds.extensions.active import record_fields
from llava_ds.layouts import ImageText, MediaLayout
from llava_ds.runtime.main_thread import no_collection
from llava_ds.runtime.ranks import printable

Row = dict[str, object]  # a row of ROWS; "seen" replaces COLUMNS, "input_ids", "labels" and "weights" are unpacked

PART_BYTES = 4 << 20  # bytes of text to check together; their tokens take several times this memory

MAX_ID = 200  # characters of a rejected record's id


@dataclass(frozen=True)
class Checker:
    """Converts a RECORDS table to an equally long ROWS table, in worker processes."""

    sources: tuple[Source, ...]
    encoder: Encoder
    image_options: geometry.ImageOptions

    @cached_property
    def prompts(self) -> PromptCheck:
        """The check that answers match the prompts they will be generated from."""
        return PromptCheck(self.encoder, self.image_options)

    @property
    def takes_pairs(self) -> bool:
        """True for preferences."""
        return any(source.format == "preference" for source in self.sources)

    @property
    def schema(self) -> pa.Schema:
        """Schema of the rows: ROWS, or PAIR_ROWS for preferences; with OTHER_COLUMNS if a source keeps them, and FIELDS
        if a plugin reads fields."""
        rows = PAIR_ROWS if self.takes_pairs else ROWS
        rows = rows.append(OTHER_COLUMNS) if any(source.other_columns for source in self.sources) else rows
        return rows.append(pa.field(FIELDS, pa.string())) if record_fields() else rows

    def __call__(self, records: pa.Table) -> pa.Table:
        with no_collection():  # checking makes no cycles, and a collection visits every object of the process
            parts = [self._rows(records.slice(first, last - first)) for first, last in _parts(records.column("text"))]
        return pa.concat_tables(parts)

    def _rows(self, records: pa.Table) -> pa.Table:
        places = zip(*(records.column(name).to_pylist() for name in ("source", "index", "text")))
        outcomes = [self._check(*place) for place in places]
        good = [one for one in outcomes if isinstance(one, _Checked)]
        coded = self._encoded([(each, one.marks) for one in good for each in one.transcripts])
        rows = [
            self._row(one, [next(coded) for _ in one.transcripts]) if isinstance(one, _Checked) else one
            for one in outcomes
        ]
        columns = {name: records.column(name).combine_chunks() for name in ("source", "file", "line", "index")}
        labels = [row["labels"] for row in rows]
        columns |= token_runs.to_columns([row["input_ids"] for row in rows], labels)
        columns["weights"] = token_runs.weights_to_column([row["weights"] for row in rows], labels)
        columns |= as_columns([row["seen"] for row in rows])
        rest = [field for field in self.schema if field.name not in columns]
        columns |= {field.name: pa.array([row[field.name] for row in rows], field.type) for field in rest}
        return pa.table([columns[field.name] for field in self.schema], schema=self.schema)

    def _encoded(self, conversations: list[tuple[Transcript, list[int | ImageText]]]) -> Iterator[Encoded | DataError]:
        coded = self.encoder.encode_batch(conversations)
        if not self.encoder.options.answer_is_reference:
            return iter(coded)
        return itertools.starmap(self._with_prompt, zip(conversations, coded, strict=True))

    def _with_prompt(
        self, conversation: tuple[Transcript, list[int | ImageText]], one: Encoded | DataError
    ) -> Encoded | DataError:
        """Attach the generation prompt to an encoded conversation. Returns a DataError if it has no valid prompt."""
        try:
            return with_generation_prompt(self.encoder, *conversation, one) if isinstance(one, Encoded) else one
        except DataError as error:
            return error

    def _check(self, source: int, index: int, text: bytes) -> "_Checked | Row":
        try:
            sample = to_sample(text.decode("utf-8", "surrogatepass"), self.sources[source], index)
        except DataError as error:
            return _rejected(_id_in(text, self.sources[source].columns.id, index), error, text)
        try:
            fields = fields_to_text(text) if record_fields() else None
            for one in sample.media:
                one.apply_settings(self.image_options)
        except DataError as error:
            return _rejected(sample.id, error)
        try:
            found = [self._look_at(one) for one in sample.media]
        except DataError as error:
            return _rejected(sample.id, error, text)
        media = tuple(sized for sized, _ in found)
        seen = [file for _, files in found for file in files]
        try:
            if sample.refs or sample.boxes:
                sample, boxes = write_objects(sample, [one.sizes for one in media], self.image_options)
                media = tuple(replace(one, boxes=numbers) for one, numbers in zip(media, boxes, strict=True))
            layouts = [layout_of(one, len(media), self.image_options) for one in media]
            marks = [layout.mark for layout in layouts]
            transcripts = sample.transcripts
            for transcript in transcripts:
                if reason := self.prompts.reason(transcript, marks):
                    raise DataError(reason)
        except DataError as error:
            return _rejected(sample.id, error)
        return _Checked(sample, transcripts, media, seen, layouts, fields)

    def _look_at(self, media: Media) -> tuple[SizedMedia, list[SeenFile]]:
        try:
            stamps = stamps_of(media, self.image_options)  # before reading, so that later changes alter the stamp
            sized = SizedMedia.of(media, self.image_options)
            return sized, seen_files(media, self.image_options, stamps)
        except (DataError, ConfigError) as error:  # ConfigError: a missing extra; it may be installed later
            raise FileProblem(str(error)) from error
        except OSError as error:
            raise FileProblem(f"{error.filename or media.refs[0].path} can't be read: {error.strerror}") from error

    def _row(self, one: "_Checked", answers: list[Encoded | DataError]) -> Row:
        """Build the row of a record. answers: the encoded conversation, or for a pair the chosen and the rejected
        one."""
        sample = one.sample
        targets = 0
        for coded in answers:
            if isinstance(coded, DataError):
                return _rejected(sample.id, coded)
            own = coded.num_targets
            targets += own
            if own == 0:
                return _rejected(sample.id, DataError(f"nothing to learn from: {self._why_nothing(sample, coded)}"))
        words = turns = 0
        for message in sample.messages:
            words += len(message.text.split())
            turns += message.role == "gpt"
            if message.thought is not None or message.tool_calls:
                words += len(f"{message.thought or ''} {message.tool_calls}".split())
        has_field = one.media or sample.unmarked == IMAGE_LEFT_OUT  # LLaVA tests for the record's key "image"
        return {
            "id": sample.id,
            "reason": None,
            "text_to_retry": None,
            "input_ids": _joined([coded.input_ids for coded in answers]),
            "labels": _joined([coded.labels for coded in answers]),
            "weights": _joined_weights(answers),
            "media": media_to_text(one.media),
            "length": sum([len(coded.input_ids) for coded in answers]),
            "num_targets": targets,
            "chosen_length": len(answers[0].input_ids),
            "margin": sample.margin,
            "num_turns": turns,
            "num_pictures": sum([len(sized.sizes) for sized in one.media]),
            "num_tiles": sum([layout.num_tiles for layout in one.layouts]),
            "tile_pairs": sum([layout.tile_pairs for layout in one.layouts]),
            "words": words if has_field else -words,
            "truncated": any([coded.truncated for coded in answers]),
            "unmarked": sample.unmarked,
            "unread": "\n".join(map(printable, sample.unread)) if sample.unread else "",
            "left_out": sum([coded.left_out for coded in answers]),
            "other_columns": sample.other_columns,
            "seen": one.seen,
            FIELDS: one.fields,
        }

    def _why_nothing(self, sample: Sample, coded: Encoded) -> str:
        """Explain why none of a sample's tokens is supervised."""
        weights = [message.weight for message in sample.messages if message.role == "gpt"]
        if weights and not any(weights):
            return "all of its answers weigh 0"
        if self.encoder.options.supervise_last_turn_only and weights and not weights[-1]:
            return "its last answer weighs 0, and no other is learned"
        limit = self.encoder.options.max_length
        return f"the first {limit} tokens contain no answer" if coded.truncated else "no answer has a text"


@dataclass
class _Checked:
    """A checked record, ready to encode. layouts: layout of each image or video; fields: plugins' fields as JSON."""

    sample: Sample
    transcripts: list[Transcript]
    media: tuple[SizedMedia, ...]
    seen: list[SeenFile]
    layouts: list[MediaLayout]
    fields: str | None = None

    @property
    def marks(self) -> list[int | ImageText]:
        """MediaLayout.mark of each image or video, for the encoder."""
        return [layout.mark for layout in self.layouts]


def fields_to_text(record: bytes) -> str:
    """Serialize the values of plugins' fields in a record, by plugin. Raises DataError if one can't be used."""
    values = json.loads(record.decode("utf-8", "surrogatepass"))
    found = {
        name: {key: values[key] for key in fields.names if values.get(key) is not None}
        for name, fields in record_fields().items()
    }
    for name, fields in record_fields().items():
        fields.load(found[name])
    return json.dumps(found)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _joined_weights(answers: list[Encoded]) -> np.ndarray | None:
    if all([coded.weights is None for coded in answers]):
        return None
    weights = [np.ones(len(coded.labels), np.float32) if coded.weights is None else coded.weights for coded in answers]
    return _joined(weights)


def _rejected(id: str, error: DataError, text: bytes | None = None) -> Row:
    """Build the row of a rejected record: only its id and the reason are set."""
    nothing = np.empty(0, np.int32)
    return {
        **dict.fromkeys(("length", "num_targets", "num_turns", "num_pictures", "num_tiles", "tile_pairs"), 0),
        **dict.fromkeys(("words", "chosen_length", "margin"), 0),
        **{"input_ids": nothing, "labels": nothing, "media": "[]", "truncated": False, "unmarked": "", "seen": []},
        **{"unread": "", "left_out": 0, "other_columns": None},
        "id": printable(id),
        "reason": printable(str(error)),
        "text_to_retry": text if isinstance(error, FileProblem) else None,
        "weights": None,
        FIELDS: None,
    }


def _parts(texts: pa.ChunkedArray) -> Iterator[tuple[int, int]]:
    """Yield (first, end) rows of parts with at most PART_BYTES of text each. A larger record is a part by itself."""
    ends = np.cumsum(pa.compute.binary_length(texts).to_numpy())
    first = 0
    while first < len(ends):
        before = ends[first - 1] if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + PART_BYTES, "right")))
        yield first, last
        first = last


def _id_in(text: bytes, names: tuple[str, ...], index: int) -> str:
    """Id of a rejected record if it can be read, else its index."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return str(index)
    found = [record[name] for name in names if name in record] if isinstance(record, dict) else []
    usable = found and isinstance(found[0], (str, int)) and not isinstance(found[0], bool)
    return str(found[0])[:MAX_ID].encode("utf-8", "replace").decode() if usable else str(index)
