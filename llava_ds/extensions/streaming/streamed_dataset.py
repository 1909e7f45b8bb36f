"""A data set that is trained on while it is being encoded (--stream).

Every record is a sample, accepted or not, so the order, the steps and the eval samples depend only on the number of
records. This number is known once all records are read. A step waits for the shards of its records. A rejected record
is skipped in its step, like a sample whose image broke after the check. Results don't depend on when encoding ends.
"""

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from transformers import PreTrainedTokenizerBase

from llava_ds import geometry
from llava_ds.config.arguments import Arguments
from llava_ds.constants import DataError
from llava_ds.data import shards
from llava_ds.data.cache import STALE, RowTable, map_rows, open_generation
from llava_ds.data.collate import LoadedPair, LoadedSample
from llava_ds.data.dataset import (
    BrokenSample,
    DataSpec,
    EncodedDataset,
    Undecoded,
    broken,
    check_same_data,
    data_spec,
    num_held_back,
)
from llava_ds.data.encoded_rows import media_of_text
from llava_ds.data.fingerprint import box_parts, digest_of, options_part, options_that_matter, video_parts
from llava_ds.data.heaviest import pack_of
from llava_ds.data.sample_order import shards_in_order
from llava_ds.data.seen_files import changed_files
from llava_ds.runtime.ranks import Ranks, barrier, gather, on_every_rank, print_first, printable
from llava_ds.runtime.waiting import note_progress

OPEN_SHARDS = 256  # per process: each takes some 20 kB of its memory
POLL_S, LONGEST_POLL_S = 0.1, 2.0  # between checks of the cache, which may be on a network disk
PATIENCE_S = 5.0  # seconds of waiting before a line reports it


class StreamedDataset(EncodedDataset):
    """The records of a data set as samples; some may not be encoded yet.

    number: of the cache generation. num_records: of the data set. beside: this rank's encoding process. lengths are 0
    until known, and 1 for rejected records that thus have a place in a layout.
    """

    def __init__(
        self, spec: DataSpec, number: int, num_records: int, beside: shards.EncodingBeside | None = None
    ) -> None:
        self._spec, self._number, self._num_records, self._beside = spec, number, num_records, beside
        self.sources, self.descriptions, self.image_options = spec.names, spec.descriptions, spec.image_options
        self.are_pairs, self.of_answers = False, {}
        self.drawn = "shards", 1
        # Identify this generation: a run must not resume with one that was rebuilt because images had changed.
        used = options_that_matter(spec.image_options, videos=True)
        parts = ["stream", str(number), *spec.common, options_part(used), *box_parts(used), *video_parts(used)]
        parts += spec.contents
        self.fingerprint = digest_of(parts)
        self._paths: dict[int, Path] = {}
        self._tables: dict[int, pa.Table] = {}  # the shards opened last
        self._take(range(num_records))

    def _take(self, rows: Sequence[int]) -> None:
        self._rows = rows
        self._sizes = tuple(np.zeros(len(rows), kind) for kind in (np.int32, np.int32, np.int32, np.int64))
        self._known: set[int] = set()  # shards whose lengths are known

    @property
    def is_whole(self) -> bool:
        return False

    @property
    def rows(self) -> Sequence[int]:
        """Return the index of each sample's record, in order."""
        return self._rows

    @property
    def lengths(self) -> np.ndarray:
        """(samples,) int32: tokens, as far as known."""
        return self._sizes[0]

    @property
    def sizes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        return self._sizes

    @property
    def num_records(self) -> int:
        """Number of records, encoded or not."""
        return self._num_records

    @property
    def folder(self) -> Path:
        """The current folder of the generation."""
        whole = self._spec.folder / str(self._number)
        return whole if whole.exists() else whole.with_name(f"{whole.name}.work")

    @property
    def order_folder(self) -> Path:
        return self._spec.folder / f"stream-{self.fingerprint}"

    def lengths_for(self, how: str) -> np.ndarray:
        """Return the number of samples in each shard."""
        return np.diff([self._samples_of(shard).start for shard in range(self.num_shards)] + [len(self)])

    @property
    def num_shards(self) -> int:
        """Number of shards, encoded or not."""
        return shards.num_shards(self._num_records)

    def rejections(self) -> Iterator[dict[str, object]]:
        """Return nothing: rejections are unknown before training."""
        return iter(())

    def positions(self, images: bool) -> Iterator[int]:
        """Yield the first shard's samples with images or videos, or without any, however many shards are encoded."""
        shard = int(self._rows[0]) // shards.SHARD_RECORDS
        table = self._shard(shard)
        wanted = table.column("reason").is_null().to_numpy() & ((table.column("num_pictures").to_numpy() > 0) == images)
        for sample in self._samples_of(shard):
            if wanted[self._rows[sample] % shards.SHARD_RECORDS]:
                yield sample

    def changes_since(self, run_dir: Path) -> str:
        """Return nothing: the files are not known yet."""
        return ""

    def counts(self) -> list[str]:
        """Return a line with the number of records, and of the shards encoded so far."""
        there = len(shards.encoded_shards(self._spec.folder, self._number))
        return [
            f"{self._num_records:,} records, checked and encoded during training (--stream): {there:,} "
            f"of {self.num_shards:,} shards are encoded",
        ]

    def token_counts(self) -> list[str]:
        """Return no lines: nothing is counted yet."""
        return []

    def notes(self) -> list[str]:
        """Return no lines: no record is read yet."""
        return []

    def without_part(self, fraction: float, seed: int) -> tuple["StreamedDataset", "StreamedDataset"]:
        """Split off a random part of the records, chosen by the seed. Returns the rest, and that part."""
        held_out = num_held_back(len(self), fraction)
        drawn = np.random.default_rng(seed).permutation(len(self)).astype(np.int32)

        def part(those: slice) -> StreamedDataset:
            part = copy.copy(self)
            part._take(np.sort(drawn[those]))
            part.fingerprint = digest_of([self.fingerprint, f"{those} {seed}"])
            return part

        return part(slice(held_out, None)), part(slice(held_out))

    def heaviest_known(self, size: int, num_tokens: int | None) -> list[int]:
        known = np.flatnonzero(self.lengths)
        lengths = self.lengths[known]
        if num_tokens is not None:
            return known[pack_of(lengths, max(int(lengths.max()), num_tokens))].tolist()
        return np.resize(known[np.argsort(-lengths, kind="stable")[:size]], size).tolist()

    def __len__(self) -> int:
        return len(self._rows)

    def _sample(
        self, index: int, load: Callable[[Undecoded], torch.Tensor | Undecoded]
    ) -> LoadedSample | LoadedPair | BrokenSample:
        record = self._record(int(self._rows[index]))
        reason = record.column("reason")[0].as_py()
        return super()._sample(index, load) if reason is None else broken(record, reason)

    def _record(self, number: int) -> pa.Table:
        shard, place = divmod(number, shards.SHARD_RECORDS)
        return self._shard(shard).slice(place, 1)

    def wait_for(self, samples: Sequence[int]) -> None:
        """Wait until these samples are encoded, and their lengths known."""
        if len(self._known) == self.num_shards:
            return
        records = np.asarray(self._rows)[samples] if isinstance(self._rows, np.ndarray) else np.asarray(samples)
        for shard in np.unique(records // shards.SHARD_RECORDS).tolist():
            if shard not in self._known:
                mine, table = self._samples_of(shard), self._shard(shard)
                places = np.asarray(self._rows[mine.start : mine.stop]) - shard * shards.SHARD_RECORDS
                for name, sizes in zip(("length", "num_targets", "num_tiles", "tile_pairs"), self._sizes):
                    sizes[mine.start : mine.stop] = table.column(name).to_numpy()[places]
                np.maximum(1, self.lengths[mine.start : mine.stop], out=self.lengths[mine.start : mine.stop])
                self._known.add(shard)

    def encoded(self, ranks: Ranks) -> tuple[EncodedDataset, EncodedDataset]:
        """Wait until all is encoded. Returns the complete data set, and a part with these samples. Collective."""
        generation, found = self._spec.folder / str(self._number), []

        def is_whole() -> bool:
            found[:] = filter(None, [open_generation(generation)])
            return bool(found)

        self._wait_until(is_whole)
        barrier(ranks)
        whole = self._spec.with_rows(found[0], ranks)
        if len(self) == self._num_records:
            return whole, whole

        def draw() -> np.ndarray:
            return np.flatnonzero(np.isin(whole.rows, self._rows))

        return whole, whole.part(f"stream {self.fingerprint}", draw)

    def _samples_of(self, shard: int) -> range:
        """Return the samples in a shard, a contiguous range."""
        bounds = [shard * shards.SHARD_RECORDS, min(self._num_records, (shard + 1) * shards.SHARD_RECORDS)]
        if isinstance(self._rows, np.ndarray):
            bounds = np.searchsorted(self._rows, bounds).tolist()
        return range(*bounds)

    def _shard(self, shard: int) -> pa.Table:
        """Return the rows of a shard, waiting until they exist."""
        while shard not in self._tables:
            self._wait_until(lambda: shard in self._paths or shard in self._look())
            try:
                table = map_rows(str(self._paths[shard]))
            except FileNotFoundError:  # its folder was renamed
                del self._paths[shard]
                continue
            if len(self._tables) == OPEN_SHARDS:
                del self._tables[next(iter(self._tables))]
            self._tables[shard] = table
        return self._tables[shard]

    def _look(self) -> dict[int, Path]:
        """Return the shards that exist."""
        before = len(self._paths)
        self._paths = shards.encoded_shards(self._spec.folder, self._number)
        if len(self._paths) != before:
            note_progress()
        return self._paths

    def _wait_until(self, is_there: Callable[[], bool]) -> None:
        """Wait for the encoding. Re-raises its error."""
        began, pause_s, is_reported = time.monotonic(), POLL_S, False
        while not is_there():
            if self._beside is not None:
                self._beside.check()
            if time.monotonic() - began > PATIENCE_S and not is_reported:
                is_reported = True
                print_first(f"waiting for the encoding: {len(self._look()):,} of {self.num_shards:,} shards are done")
            time.sleep(pause_s)
            pause_s = min(LONGEST_POLL_S, 1.5 * pause_s)
            self._look()


def open_streamed(
    args: Arguments, tokenizer: PreTrainedTokenizerBase, image_options: geometry.ImageOptions, ranks: Ranks
) -> StreamedDataset:
    """Open the training data named by the flags (see streamed), and compare them between ranks. Collective."""
    spec = data_spec(args, tokenizer, image_options, refuse_bad=False, ranks=ranks)
    dataset = streamed(spec, partial(_order_of_shards, args), ranks)
    dataset.drawn = "shards", math.ceil(args.own["streaming"].shuffle_buffer_size / shards.SHARD_RECORDS)
    check_same_data(dataset.fingerprint, ranks)
    return dataset


def streamed(spec: DataSpec, order: Callable[[int], Sequence[int]], ranks: Ranks) -> StreamedDataset:
    """Open data as soon as their records are counted, and start an encoding process if necessary. Collective.

    order: as in encode_together.
    """
    number, rows = spec.find(ranks)
    while rows is None and any(
        gather(on_every_rank(ranks, lambda n=number: ranks.is_first and _has_changed(spec, n)), ranks)
    ):
        number += 1
    beside = None
    if rows is not None:
        number, num_records = int(rows.folder.name), len(rows.table)
    else:
        if ranks.local_rank == 0:
            beside = shards.EncodingBeside(partial(spec.encode, number, order))
        num_records = on_every_rank(ranks, lambda: beside and _count(spec.folder, number, beside))
        num_records = num_records or _count(spec.folder, number)
    return StreamedDataset(spec, number, num_records, beside)


def _has_changed(spec: DataSpec, number: int) -> bool:
    """Return True if images have changed since the shards of an unfinished generation were encoded."""
    paths = [path for _, path in sorted(shards.encoded_shards(spec.folder, number).items())]
    if not paths:
        return False
    try:
        changed = changed_files(RowTable(list(map(str, paths))), spec.image_options, media_of_text)
    except DataError:
        if paths[0].exists():
            raise
        return False  # another process has just finished the encoding
    if changed:
        print_first(f"image files changed since their check, such as {printable(changed[0])}: all are checked again")
    return bool(changed) or (paths[0].parent / STALE).exists()


def _order_of_shards(args: Arguments, number: int) -> list[int]:
    """Return the shards in the order in which a run needs them."""
    data, training = args.data, args.training
    seed = training.seed if training.data_seed is None else training.data_seed
    order = shards_in_order(number, seed, epoch=0).tolist() if data.shuffle else list(range(number))
    # Extensions take samples from the start of the training data before training.
    takes = any(flags.takes_samples and not flags.data_path for flags in args.own.values())
    first = [0] if takes and not data.eval_data_path else []
    return list(dict.fromkeys([*first, *order]))


def _count(folder: Path, number: int, beside: shards.EncodingBeside | None = None) -> int:
    """Return the number of records, once all are read."""
    while True:
        found = shards.records_in_work(folder, number)
        if found is None and (rows := open_generation(folder / str(number))) is not None:
            found = len(rows.table)
        if found is not None:
            return found
        if beside is not None:
            beside.check()
        time.sleep(POLL_S)
