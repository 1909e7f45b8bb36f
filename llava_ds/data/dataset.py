"""The encoded data set: every record is checked and tokenized once, and stored in memory-mapped Arrow files."""

import copy
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyarrow as pa
import torch
from transformers import PreTrainedTokenizerBase

from llava_ds import geometry
from llava_ds.config.arguments import Arguments
from llava_ds.constants import IMAGE_TOKEN_INDEX, DataError, FileChanged
from llava_ds.data.cache import CachedRows, RowTable, next_number, note_stale, open_newest
from llava_ds.data.collate import LoadedPair, LoadedSample
from llava_ds.data.encoded_rows import (
    FIELDS,
    OTHER_COLUMNS,
    layout_of,
    media_from_text,
    media_of_text,
    place_of,
    reasons_in_short,
    rejections,
    would_be_accepted,
)
from llava_ds.data.file_slices import write_errors
from llava_ds.data.fingerprint import (
    ENCODING_LIBRARIES,
    EncodingOptions,
    box_parts,
    digest_of,
    options_part,
    options_that_matter,
    tokenizer_parts,
    versions_of,
    video_parts,
)
from llava_ds.data.images.decode import load_media
from llava_ds.data.known_records import KnownRecords, note_path, recall, remember, remember_earlier
from llava_ds.data.sample import UNMARKED_TEXTS, Media
from llava_ds.data.sample_index import PERCENTILES, TableIndex, index_of
from llava_ds.data.seen_files import changed_files, changes_since
from llava_ds.data.templates import resolve_template
from llava_ds.data.token_runs import from_columns, weights_from_column
from llava_ds.extensions.active import OF_OBJECTIVE, converters, no_fields, plugins, record_fields
from llava_ds.files.urls import real_path
from llava_ds.files.writing import run_folder
from llava_ds.layouts import MediaLayout
from llava_ds.runtime.ranks import Ranks, first_rank_first, gather, local_ranks, on_every_rank, print_first, printable
from llava_ds.tokenizer import rows_noted

if TYPE_CHECKING:
    from llava_ds.data.preflight import Checker
    from llava_ds.data.sources.source import Source

ENCODING_VERSION = 8  # increment it when the same records would be encoded to different rows
ROWS_FORMAT = "shards 5"  # file format: a new value forces re-encoding, but keeps the fingerprint
PAIR_ROWS_FORMAT = "pairs 5"  # file format of preference pairs

ALONE = Ranks(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))

EXAMPLES_TRIED = 100

KEYS_SHOWN = 20  # number of unread keys shown in the first lines

SCANNED_TOGETHER = 1 << 16  # samples per step of positions()


@dataclass(frozen=True)
class PreflightOptions:
    """Options for checking and encoding that leave samples unchanged. other_columns: add OTHER_COLUMNS to the rows."""

    cache_dir: str
    num_workers: int | None = None
    on_bad_sample: Literal["skip", "stop", "list"] = "skip"  # "list": never raise, even if every record is bad
    max_bad_fraction: float = 0.01
    other_columns: bool = False


@dataclass(frozen=True)
class BrokenSample:
    """Location of an accepted sample whose images can no longer be loaded, and the reason."""

    file: str
    line: int
    index: int
    id: str
    reason: str


@dataclass(frozen=True, eq=False)
class Undecoded:
    """An image or video whose layout is computed, but whose tiles are not decoded yet."""

    media: Media
    sizes: tuple[geometry.Size, ...]
    layout: MediaLayout
    options: geometry.ImageOptions

    def decode(self, tiles: Sequence[int] | None = None) -> torch.Tensor:
        """Decode the given tiles (default: all), (n, 3, S, S) uint8. Raises DataError if they can't be read."""
        return load_media(self.media, self.sizes, self.layout, self.options, tiles)


class EncodedDataset(torch.utils.data.Dataset):
    """The accepted samples by index. Images are decoded on access.

    sources: a short name per data source. fingerprint: hash of everything that determines the samples. index: lengths
    and other counts per sample. folder: cache folder of the table. descriptions: a printable line per source.
    are_pairs: True for preference data. has_boxes: True if records have boxes or points. of_answers: numbers that a run
    computes per answer, by their names in Batch.extra: (records, 2) float64, NaN if missing.
    """

    def __init__(
        self,
        rows: CachedRows,
        index: TableIndex,
        sources: list[str],
        descriptions: list[str],
        image_options: geometry.ImageOptions,
        fingerprint: str,
    ) -> None:
        self.table, self.folder = rows.table, rows.folder
        self.index, self._rejected = index.accepted, index.rejected
        self.sources = sources
        self.descriptions = descriptions
        self.image_options = image_options
        self.fingerprint = fingerprint
        self.are_pairs = "chosen_length" in self.table.column_names
        self.has_boxes = index.has_boxes
        self.of_answers: dict[str, np.ndarray] = {}

    @property
    def rows(self) -> np.ndarray:
        """Row of each sample in the table of all records, (samples,) int32."""
        return self.index.rows

    @property
    def lengths(self) -> np.ndarray:
        """Length of each sample in tokens, (samples,) int32."""
        return self.index.lengths

    @property
    def num_targets(self) -> np.ndarray:
        """Supervised tokens of each sample, (samples,) int32."""
        return self.index.num_targets

    @property
    def sizes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, supervised tokens, tiles and pairs of tiles of each sample, (samples,) each."""
        return self.lengths, self.num_targets, self.index.num_tiles, self.index.tile_pairs

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> LoadedSample | LoadedPair | BrokenSample:
        """Load a sample; a BrokenSample with the reason if its images can't be loaded."""
        return self._sample(index, Undecoded.decode)

    def undecoded(self, *indices: int) -> list[LoadedSample | LoadedPair | BrokenSample]:
        """Load samples without decoding their images: Undecoded objects replace the tiles."""
        return [self._sample(index, lambda undecoded: undecoded) for index in indices]

    def broken(self, index: int, reason: str) -> BrokenSample:
        """Describe a sample that can't be loaded."""
        return broken(self._record(int(self.rows[index])), reason)

    def note_error(self, error: DataError) -> None:
        """Mark the cache stale if an image has changed, so that the next start encodes the data again."""
        if isinstance(error, FileChanged):
            note_stale(self.folder)

    def _sample(
        self, index: int, load: Callable[[Undecoded], torch.Tensor | Undecoded]
    ) -> LoadedSample | LoadedPair | BrokenSample:
        row = self._record(int(self.rows[index]))
        media = media_from_text(row.column("media")[0].as_py())
        loaded = []
        try:
            for one in media:
                layout = layout_of(one, len(media), self.image_options)
                loaded.append((load(Undecoded(one.media, one.sizes, layout, self.image_options)), layout))
        except DataError as error:
            self.note_error(error)
            return broken(row, str(error))
        ids, labels = _ids_and_labels(row)
        weights = weights_from_column(row.column("weights")[0].as_py(), labels)
        weights = None if weights is None else torch.from_numpy(weights)
        try:
            own = _own_tensors(row) | ({} if self.added is None else self.added(index))
        except DataError as error:
            return broken(row, str(error))
        sample = LoadedSample(ids, labels, loaded, row.column("source")[0].as_py(), weights=weights, own=own)
        if not self.are_pairs:
            return sample
        numbers = {name: each[self.rows[index]].tolist() for name, each in self.of_answers.items()}
        for name, both in numbers.items():
            if math.isnan(sum(both)):
                return broken(row, f"its images could not be read when computing the {name} of its answers")
        chosen_length, margin = (row.column(name)[0].as_py() for name in ("chosen_length", "margin"))
        from llava_ds.data.loaded_pairs import pair_of

        numbers |= {"margin": [margin, 0.0]} if margin else {}
        return pair_of(sample, chosen_length, numbers, self.shares_prompts)

    def packs(self, *step: object) -> list[list[list[int]]]:
        """Distribute a step's samples over packs. step: the arguments of packing.plan_by_tokens."""
        from llava_ds.data.packing import plan_by_tokens

        return plan_by_tokens(*step)

    def summed(self, values: np.ndarray, samples: Sequence[int]) -> int:
        """Sum values over a micro-batch's samples. values: tokens or work of every sample of the data set, (N,)."""
        return int(values[np.asarray(samples, np.int64)].sum())

    # Kind of shuffling, and number of shards that are shuffled together.
    drawn: tuple[str, int] = ("random", 1)
    # Maps a sample's index to its additional tensors, by their names in Batch.extra. May raise DataError.
    added: Callable[[int], dict[str, torch.Tensor]] | None = None
    shares_prompts = False  # True: a pack holds the common prompt of a pair only once

    @property
    def is_whole(self) -> bool:
        """True if all records are encoded and their lengths known."""
        return True

    def wait_for(self, samples: Sequence[int]) -> None:
        """Wait until these samples are encoded. Returns at once here, because all samples are."""

    def heaviest_known(self, size: int, num_tokens: int | None) -> list[int]:
        """Return the longest samples encoded so far: `size` samples, or num_tokens tokens in total. Only data that is
        still being encoded implements it."""
        raise NotImplementedError

    @property
    def order_folder(self) -> Path:
        """Folder named after this set of samples; their orders are cached next to it."""
        return self.index.folder

    def _record(self, number: int) -> pa.Table:
        """Return one record as a one-row table. number: its row among all records."""
        return self.table.record(number)

    def lengths_for(self, how: str) -> np.ndarray:
        """Return the lengths by which an order sorts the samples: tokens for "bucket", else LLaVA's word counts."""
        if how in ("modality", "modality_auto"):
            return self.index.words  # negative for samples without images
        return self.index.words_next if how in ("length", "varlen") else self.lengths

    def positions(self, images: bool) -> Iterator[int]:
        """Yield the samples with images or videos, or those without, in order."""
        for first in range(0, len(self), SCANNED_TOGETHER):
            shown = self.index.num_images[first : first + SCANNED_TOGETHER] > 0
            yield from (first + np.flatnonzero(shown == images)).tolist()

    @property
    def num_records(self) -> int:
        """Number of accepted and rejected records."""
        return len(self.table)

    @property
    def num_rejected(self) -> int:
        """Number of rejected records."""
        return len(self._rejected)

    def rejections(self) -> Iterator[dict[str, object]]:
        """Rejected records: file, line (from 1), index (from 0), id and reason."""
        return rejections(self.table, self._rejected)

    def row(self, index: int) -> dict[str, object]:
        """Return one record's columns, with input_ids, labels and weights unpacked. index: among all records."""
        columns = self._record(index).to_pylist()[0]
        ids, labels = from_columns(*(np.array(columns.pop(name), np.int32) for name in ("ids", "flips")))
        weights = weights_from_column(columns["weights"], labels)
        weights = None if weights is None else weights.tolist()
        return {**columns, "input_ids": ids.tolist(), "labels": labels.tolist(), "weights": weights}

    def images_of(self, index: int) -> list[str | dict[str, object]]:
        """First file of each image or video of a sample: a path, or the FileRef's fields if it is a slice of a file."""
        media = media_from_text(self.row(int(self.rows[index]))["media"])
        refs = [one.media.refs[0] for one in media]
        return [ref.path if ref.num_bytes < 0 else asdict(ref) for ref in refs]

    def without_part(self, fraction: float, seed: int) -> tuple["EncodedDataset", "EncodedDataset"]:
        """Split off a random part of the samples. Returns the remaining samples and that part.

        fraction: share to split off, above 0 and below 1; each part gets at least one sample. Raises DataError for
        fewer than two samples.
        """
        number = len(self)
        num_held_out = num_held_back(number, fraction)

        def part(name: str, those: slice) -> EncodedDataset:
            def draw() -> np.ndarray:
                return np.sort(np.random.default_rng(seed).permutation(number)[those])

            return self.part(f"{name} {num_held_out} {seed}", draw)

        return part("rest", slice(num_held_out, None)), part("held out", slice(num_held_out))

    def part(self, name: str, draw: Callable[[], np.ndarray]) -> "EncodedDataset":
        """Select a subset of the samples. name: identifies the selection, with its parameters. draw: returns the
        indices of the selected samples, in order."""
        part = copy.copy(self)
        part.of_answers = dict(self.of_answers)  # a copy, because a reference pass over one part fills only that part
        part.added = None
        part.index = self.index.part(name, draw, self.table)
        part.fingerprint = digest_of([self.fingerprint, part.index.facts["drawn"]])
        return part

    def example(self) -> LoadedSample:
        """Return a sample to try a model on, with an image if one of the first few can be read."""
        first = itertools.islice(self.positions(images=True), EXAMPLES_TRIED)
        for index in itertools.chain(first, itertools.islice(self.positions(images=False), 1)):
            sample = self[index]
            if not isinstance(sample, BrokenSample):
                return sample.samples[0]
        ids, labels = _ids_and_labels(self._record(int(self.rows[0])))
        text = ids != IMAGE_TOKEN_INDEX
        return LoadedSample(ids[text], labels[text], [])

    def changes_since(self, run_dir: Path) -> str:
        """Describe how the files differ from an earlier run's; "" if unknown."""
        return changes_since(self.table, run_folder(run_dir))

    def summary(self) -> list[str]:
        """Printable lines: sources, numbers of answers, images and tokens, and rejected records."""
        return [*self.descriptions, *self.counts(), *self.token_counts(), *self.notes()]

    def counts(self) -> list[str]:
        """Return the line with the numbers of accepted and rejected records."""
        accepted = self.num_records - self.num_rejected
        apart = f"; {accepted - len(self):,} of the accepted are eval samples" if accepted > len(self) else ""
        cut = self.index.facts["truncated"] if len(self) else 0
        short = f"; {cut:,} samples cut short" if cut else ""
        return [f"{self.num_records:,} records: {accepted:,} accepted, {self.num_rejected:,} rejected{apart}{short}"]

    def token_counts(self) -> list[str]:
        """Return lines with the numbers of answers, images and tokens, and the lengths; empty without samples."""
        if not len(self):
            return []
        facts = self.index.facts
        tokens, targets = facts["tokens"], facts["targets"]
        shown = ", ".join(f"{p} % {n:,}" for p, n in zip(PERCENTILES, facts["percentiles"]))
        answers = f"{facts['answers']:,} answers"
        if self.are_pairs:
            chosen, whole = (np.asarray(self.table.column(name))[self.rows] for name in ("chosen_length", "length"))
            singles = int((chosen == whole).sum())  # samples with one labelled answer
            answers = f"{2 * (len(self) - singles):,} answers in pairs" + (f", {singles:,} alone" if singles else "")
        return [
            f"{answers}, {facts['images']:,} images, {tokens:,} tokens, of which {targets:,} "
            f"({targets / tokens:.1%}) are supervised",
            f"lengths in tokens, shortest to longest: {shown}",
        ]

    def notes(self) -> list[str]:
        """Return notes about the records: unread keys, answers that are not learned, rejected records."""
        lines = []
        if len(self):
            facts = self.index.facts
            lines += [f"{number:,} records {UNMARKED_TEXTS[kind]}" for kind, number in facts["unmarked"].items()]
            if weighed := facts["weighed"]:
                lines.append(f"{weighed:,} samples have answers with a loss weight other than 1")
            lines += _unread_lines(facts)
            lines += [self.image_options.boxes.describe()] * self.has_boxes
            if facts["deep"]["number"]:
                from llava_ds.data.images.deep_images import deep_images_line

                lines.append(printable(deep_images_line(**facts["deep"])))
        if self.num_rejected:
            rows = list(self.rejections())
            lines += [
                "left out:",
                *reasons_in_short([row["reason"] for row in rows]),
                f"  the first: {_rejection_line(rows[0])}",
            ]
        return lines


def _own_tensors(row: pa.Table) -> dict[str, torch.Tensor | None]:
    """Return the tensors that plugins read from a record, by their names in Batch.extra. Missing ones are None."""
    found = json.loads(row.column(FIELDS)[0].as_py()) if FIELDS in row.column_names else {}
    tensors = {name: fields.load(found[name]) for name, fields in record_fields().items() if name in found}
    return no_fields() | {f"{name}.{key}": tensor for name, each in tensors.items() for key, tensor in each.items()}


def _unread_lines(facts: dict[str, object]) -> list[str]:
    """Lines about record keys that are not read, and about thoughts that the chat template omits."""
    lines, (thoughts, records) = [], facts["left_out"]
    if thoughts:
        lines.append(
            f"{thoughts:,} thoughts of {records:,} records are not learned: the chat template omits them, usually "
            "before a later question"
        )
    if unread := [f"{key!r} ({number:,} records)" for key, number in facts["unread"].items()]:
        more = f" and {len(unread) - KEYS_SHOWN} more" if len(unread) > KEYS_SHOWN else ""
        lines.append(f"keys of records that are not read: {', '.join(unread[:KEYS_SHOWN])}{more}")
    return lines


def num_held_back(number: int, fraction: float) -> int:
    """Number of samples that --eval_fraction holds back. Raises DataError if no training sample would remain."""
    if number < 2:
        raise DataError(f"--eval_fraction {fraction} holds samples back, but there is only {number}: add more")
    return min(max(1, round(number * fraction)), number - 1)


def open_data(
    args: Arguments,
    tokenizer: PreTrainedTokenizerBase,
    image_options: geometry.ImageOptions,
    refuse_bad: bool = True,
    ranks: Ranks = ALONE,
) -> EncodedDataset:
    """Open the data that the flags name. All ranks call it together.

    refuse_bad: apply --on_bad_sample to bad records.
    """
    dataset = data_spec(args, tokenizer, image_options, refuse_bad, ranks).open(ranks)
    if args.traits.one_answer:
        _refuse_weights(dataset, args.training.objective)
    return dataset


def encoding_options(args: Arguments) -> EncodingOptions:
    """Read the flags that control the encoding of conversations."""
    model, data = args.model, args.data
    return EncodingOptions(
        template=resolve_template(model.version),
        max_length=data.model_max_length,
        mm_use_im_start_end=model.mm_use_im_start_end,
        supervise_last_turn_only=data.supervise_last_turn_only or args.traits.one_answer,
        split_special_tokens=model.split_special_tokens,
        answer_is_reference=args.traits.draws,
    )


def data_spec(
    args: Arguments,
    tokenizer: PreTrainedTokenizerBase,
    image_options: geometry.ImageOptions,
    refuse_bad: bool = True,
    ranks: Ranks = ALONE,
) -> "DataSpec":
    """Build the DataSpec for these flags. Takes the arguments of open_data."""
    data = args.data
    for flags in args.own.values():
        flags.prepare(args)
    OF_OBJECTIVE.clear()
    OF_OBJECTIVE[args.training.objective] = args.traits.fields
    encoding = encoding_options(args)
    options = PreflightOptions(
        cache_dir=data.cache_dir,
        num_workers=data.preprocessing_num_workers,
        on_bad_sample=data.on_bad_sample if refuse_bad else "list",
        max_bad_fraction=data.max_bad_fraction,
        other_columns=args.traits.other_columns,
    )
    form = EncodingForm.of(tokenizer, encoding, image_options)
    opening = Opening(partial(_open_records, args, tokenizer, encoding, image_options))
    note = note_path(args, form.parts)
    with first_rank_first(ranks):  # rank 0 opens the sources, the others find its note
        known = recall(note) or _noted(note, data.data_path, opening, Path(data.cache_dir).expanduser())
    return DataSpec(known, form, options, opening, note)


def _open_records(*args: object) -> "Checker":
    from llava_ds.data.open_records import open_records  # only if the cache lacks the records

    return open_records(*args)


def _noted(note: Path, data_path: str, opening: "Opening", cache_dir: Path) -> KnownRecords:
    """Open the records, and save their facts for other ranks and later starts."""
    from llava_ds.data.open_records import facts_of, files_read

    began = time.time()
    known = facts_of(opening.checker, cache_dir)
    if (files := files_read(data_path, opening.checker)) is not None:
        remember(note, known, files, began)
    return known


def open_together(
    args: Arguments, tokenizer: PreTrainedTokenizerBase, image_options: geometry.ImageOptions, ranks: Ranks
) -> EncodedDataset:
    """Open the data on every rank, and check that all ranks have the same. All ranks call it together."""
    dataset = open_data(args, tokenizer, image_options, ranks=ranks)
    check_same_data(dataset.fingerprint, ranks)
    return dataset


def open_encoded(
    sources: "list[Source]",
    tokenizer: PreTrainedTokenizerBase,
    encoding: EncodingOptions,
    image_options: geometry.ImageOptions,
    options: PreflightOptions,
    ranks: Ranks = ALONE,
) -> EncodedDataset:
    """Open the encoded records of all sources. Encodes them first if they are not cached. All ranks call it together.

    The cache folder is named by a hash of everything that determines the rows. Several processes may call it at once.
    Raises DataError if more records are bad than the options allow, or if no record remains.
    """
    return DataSpec.of(sources, tokenizer, encoding, image_options, options, ranks).open(ranks)


class Opening:
    """Opens the records for encoding, once and only if needed."""

    def __init__(self, open_records: Callable[[], "Checker"]) -> None:
        self._open_records = open_records

    @cached_property
    def checker(self) -> "Checker":
        """The checker that validates and encodes the records."""
        return self._open_records()


@dataclass(frozen=True)
class EncodingForm:
    """Texts to hash. They change if the tokenizer or an option would change the rows. encoding: texts that affect
    conversations; images: texts that affect images; others: texts that force re-encoding. A change in `others` changes
    the fingerprint only if the rows change."""

    image_options: geometry.ImageOptions
    encoding: list[str]
    images: list[str]
    others: list[str]

    @classmethod
    def of(
        cls, tokenizer: PreTrainedTokenizerBase, encoding: EncodingOptions, image_options: geometry.ImageOptions
    ) -> "EncodingForm":
        """Build the form from a tokenizer and options."""
        # These are in `others`: a newer library may produce different ids. A larger embedding may accept samples that
        # are now rejected, but does not change accepted samples.
        rows = rows_noted(tokenizer)
        own_fields = [f"{name} {fields.names}" for name, fields in record_fields().items()]
        converted = [f"{name} {plugins().get(name)}" for name in converters()]
        return cls(
            image_options,
            [str(ENCODING_VERSION), repr(encoding), *tokenizer_parts(tokenizer), *converted],
            [options_part(image_options), *box_parts(image_options), *video_parts(image_options)],
            [*versions_of(ENCODING_LIBRARIES), *([] if rows is None else [f"{rows} rows"]), *own_fields],
        )

    @property
    def parts(self) -> list[str]:
        """All texts."""
        return [*self.encoding, *self.images, *self.others]


@dataclass(frozen=True)
class DataSpec:
    """Records and their encoding options: everything that determines the rows in the cache, known before encoding.

    known: facts about the records. note: file that stores these facts; None if they are not stored.
    """

    known: KnownRecords
    form: EncodingForm
    options: PreflightOptions
    opening: Opening
    note: Path | None = None

    @classmethod
    def of(
        cls,
        sources: "list[Source]",
        tokenizer: PreTrainedTokenizerBase,
        encoding: EncodingOptions,
        image_options: geometry.ImageOptions,
        options: PreflightOptions,
        ranks: Ranks = ALONE,
    ) -> "DataSpec":
        """Build the spec of opened sources. Hashes their files. All ranks call it together.

        Raises ConfigError if no answer in the first records matches its prompt (prompt_check).
        """
        from llava_ds.data.open_records import checker_of, facts_of

        opening = Opening(partial(checker_of, sources, tokenizer, encoding, image_options))
        with first_rank_first(ranks):  # rank 0 hashes the files, and the others find the hashes in the cache
            known = facts_of(opening.checker, Path(options.cache_dir).expanduser())
        return cls(known, EncodingForm.of(tokenizer, encoding, image_options), options, opening)

    @cached_property
    def common(self) -> list[str]:
        """Parts of the fingerprint that describe the encoding. They are available before the records are encoded."""
        types = [source["bbox_type"] for source in self.known["sources"]]
        readings = [source["reading"] for source in self.known["sources"]]
        return [*self.form.encoding, *readings, *(f"{i} {kind}" for i, kind in enumerate(types) if kind != "real")]

    @cached_property
    def contents(self) -> list[str]:
        """Parts of the fingerprint that describe the record files. They are available before encoding."""
        return [source["contents"] for source in self.known["sources"]]

    @cached_property
    def folder(self) -> Path:
        """Cache folder of the data set."""
        form = [PAIR_ROWS_FORMAT if self.known["are_pairs"] else ROWS_FORMAT]
        form += [OTHER_COLUMNS.name] * self.options.other_columns
        stamps = [source["stamp"] for source in self.known["sources"]]
        # Image folders decide which images are found, so they name the cache; moving the data keeps the fingerprint.
        roots = [real_path(path) for source in self.known["sources"] for path in source["roots"]]
        digest = digest_of([*form, *self.common, *self.form.images, *stamps, *roots, *self.form.others])
        return Path(self.options.cache_dir).expanduser() / "encoded" / digest

    @property
    def checker(self) -> "Checker":
        """The checker that validates and encodes the records."""
        return self.opening.checker

    @property
    def image_options(self) -> geometry.ImageOptions:
        """Options for reading images."""
        return self.form.image_options

    @property
    def names(self) -> list[str]:
        """A short name for each source."""
        return [source["name"] for source in self.known["sources"]]

    @property
    def descriptions(self) -> list[str]:
        """One line per source."""
        return [source["description"] for source in self.known["sources"]]

    def note_on_earlier(self) -> str:
        """Return the note about earlier answers of a conversation, "" if there is nothing to note."""
        line = self.known["earlier"]
        if line is None:
            line = self.checker.prompts.note_on_earlier()
            if self.note is not None:
                remember_earlier(self.note, line)
        return line

    def open(self, ranks: Ranks) -> EncodedDataset:
        """Open the rows. If needed, the first rank of each machine encodes them first, on all its cores."""
        number, rows = self.find(ranks)
        on_every_rank(ranks, lambda: ranks.local_rank == 0 and rows is None and self.encode(number))
        rows = rows or open_newest(self.folder)
        if rows is None:
            raise DataError(
                f"{self.folder}: the rows that were just written can't be read: is the disk of --cache_dir sound?"
            )
        return self.with_rows(rows, ranks)

    def find(self, ranks: Ranks) -> tuple[int, CachedRows | None]:
        """Return the next generation's number, and the newest rows, or None if they are missing or outdated."""
        number, rows = next_number(self.folder), open_newest(self.folder)

        share = _share(rows, ranks)
        processes = (self.options.num_workers or len(os.sched_getaffinity(0))) // local_ranks()

        def why_outdated() -> str:
            with write_errors(self.options.cache_dir, "the encoded data"):
                return "" if rows is None else _why_outdated(rows, self, share, processes)

        reasons = list(filter(None, gather(on_every_rank(ranks, why_outdated), ranks)))
        if reasons:
            print_first(f"{reasons[0]}: all records are checked again")
        return number, None if reasons else rows

    def encode(self, number: int, order: Callable[[int], Sequence[int]] | None = None) -> None:
        """Encode a generation together with other processes that encode the same one. order: as in encode_together."""
        from llava_ds.data.shards import encode_together

        with write_errors(self.options.cache_dir, "the encoded data"):
            encode_together(self.folder, number, self.checker, self.options.num_workers, order)

    def with_rows(self, rows: CachedRows, ranks: Ranks) -> EncodedDataset:
        """Build the data set of these rows. Raises DataError if more records are bad than the options allow. All ranks
        call it together."""
        with first_rank_first(ranks), write_errors(Path(self.options.cache_dir).expanduser(), "the encoded data"):
            index = index_of(rows.table, rows.folder)
            _refuse_if_bad(rows.table, index.rejected, self.options, rows.folder)
        used = options_that_matter(self.image_options, index.has_videos)
        boxes = box_parts(used) if index.has_boxes else []
        boxes += video_parts(used) if index.has_videos else []
        parts = [*self.common, options_part(used), *boxes, *self.contents, *index.outcome, index.contents]
        lines = self.descriptions
        samples = index.accepted
        if len(samples.rows) and samples.facts["answers"] > len(samples.rows):
            lines += filter(None, [self.note_on_earlier()])
        return EncodedDataset(rows, index, self.names, lines, self.image_options, digest_of(parts))


def _share(rows: CachedRows | None, ranks: Ranks) -> tuple[int, int]:
    """Return the part of the files that this rank checks (its index), and the number of parts. Only ranks with the same
    cache share the check, because machines with separate caches may also have separate images."""
    own = None if rows is None else rows.identity
    everyone = gather(own, ranks)
    return everyone[: ranks.rank].count(own), everyone.count(own)


def _why_outdated(rows: CachedRows, spec: DataSpec, share: tuple[int, int], processes: int) -> str:
    """Return why the records must be checked again, or "". share: this rank's part and the number of parts, from
    _share; processes: number of processes that check files."""
    if rows.is_stale:
        return "an image file that was read has changed since the data was checked"
    table, index = rows.table, index_of(rows.table, rows.folder)
    part = slice(share[0], None, share[1])
    if would_be_accepted(table, table.files_of(index.rejected)[part], lambda: spec.checker):
        return "a file that was missing or broken can be used now"
    samples = index.accepted
    with_images = table.files_of(samples.rows[samples.num_images > 0])
    changed = changed_files(table, spec.image_options, media_of_text, with_images[part], processes)
    return f"image files have changed since the data was checked, such as {printable(changed[0])}" if changed else ""


def sample_ids(dataset: EncodedDataset, samples: Iterable[int]) -> list[str]:
    """Return the ids of these samples in their record files."""
    return [str(dataset.row(int(dataset.rows[sample]))["id"]) for sample in samples]


def check_same_data(fingerprint: str, ranks: Ranks) -> None:
    """Raise DataError on every rank if ranks have different samples. All ranks call it together."""
    prints = gather(fingerprint, ranks)
    others = [str(rank) for rank, each in enumerate(prints) if each != prints[0]]
    if others:
        raise DataError(
            f"ranks {', '.join(others)} of {ranks.world_size} found other data than rank 0: give every node the same "
            "files and a shared --cache_dir, or delete an earlier run's files from its own"
        )


def _rejection_line(row: dict[str, object]) -> str:
    """Describe a rejected record in one line: location, id and reason."""
    return f"{printable(place_of(row))}: record {row['index']} ({row['id']}): {row['reason']}"


def _refuse_if_bad(table: RowTable, bad: np.ndarray, options: PreflightOptions, folder: Path) -> None:
    """Raise DataError, with the reasons and the path of a full list, if more records are bad than the options allow.

    bad: rows of the rejected records.
    """
    if options.on_bad_sample == "list":
        return
    allowed = 0 if options.on_bad_sample == "stop" else options.max_bad_fraction * len(table)
    if len(bad) <= allowed and len(bad) < len(table):
        return
    from llava_ds.data.sources.open import shown

    rows = list(rejections(table, bad))
    listing = folder / "rejected.jsonl"
    listing.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    limit = f"--max_bad_fraction allows {options.max_bad_fraction:.2%}"
    if options.on_bad_sample == "stop":
        limit = "--on_bad_sample stop allows none"
    lines = [
        f"{len(rows):,} of {len(table):,} records ({len(rows) / len(table):.2%}) can't be trained on, {limit}: "
        "correct or remove them, or raise the limit",
        shown(map(_rejection_line, rows), f", all listed in {listing}"),
        "in short:",
        *reasons_in_short([row["reason"] for row in rows]),
    ]
    raise DataError("\n".join(lines))


def _refuse_weights(dataset: EncodedDataset, objective: str) -> None:
    """Raise DataError if an answer has a loss weight: only supervised fine-tuning supports them."""
    number = dataset.index.facts["weighed"]
    if not number:
        return
    first = int(dataset.rows[np.flatnonzero(dataset.table.column("weights").is_valid().take(dataset.rows))[0]])
    row = dataset.row(first)
    weight = next(each for each in row["weights"] if each != 1)
    raise DataError(
        f"{printable(place_of(row))}: record {row['index']} ({printable(row['id'])}) gives its answer the weight "
        f"{weight:g}, but --objective {objective} takes no weights: leave them out ({number:,} of "
        f"{len(dataset):,} records {'has' if number == 1 else 'have'} one)"
    )


def broken(row: pa.Table, reason: str) -> BrokenSample:
    """Describe a record that can't be loaded, from its one-row table."""
    return BrokenSample(*(row.column(name)[0].as_py() for name in ("file", "line", "index", "id")), reason)


def _ids_and_labels(row: pa.Table) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and labels, (L,) int64 each, of a one-row table."""
    ids, labels = from_columns(*(row.column(name).chunk(0).flatten().to_numpy() for name in ("ids", "flips")))
    return torch.from_numpy(ids), torch.from_numpy(labels)
