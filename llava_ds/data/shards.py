"""Check and encode records in shards, shared by any number of processes on any number of machines.

The processes share a work folder in the cache. One reads the sources and writes records-N.arrow. Any idle process
encodes a shard to rows-N-HASH.arrow. Each file is renamed when complete, so a kill loses only unfinished shards, and
a shard can be read once its file exists. When all are encoded, the folder becomes a generation of the cache. A claim
file marks a shard in work. It only saves time: two processes that encode the same shard write the same rows.
"""

import atexit
import contextlib
import json
import multiprocessing
import os
import re
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import pyarrow as pa
from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from llava_ds.constants import DataError
from llava_ds.data.cache import DONE, Listed, put_in_place, remove_older
from llava_ds.data.encoded_rows import RECORDS, RECORDS_PER_CALL
from llava_ds.data.preflight import Checker
from llava_ds.data.sources import Source
from llava_ds.data.sources.embedded import IMAGES
from llava_ds.files.reading import read_json
from llava_ds.files.writing import flush, flush_and_hash, write_whole
from llava_ds.runtime.children import begin_helper
from llava_ds.runtime.main_thread import frozen_gc
from llava_ds.runtime.output_lock import Process
from llava_ds.runtime.processes import end_with_parent
from llava_ds.runtime.ranks import progress_bar

# Records per shard. It is part of the cache's format, because runs continue the work folder of a killed run.
SHARD_RECORDS = 4_096
RECORDS_PER_BATCH, CHARS_PER_BATCH = 1_000, 8 << 20  # the buffer is written when it reaches either limit
# Minimum size of a row batch: each batch takes 15 kB of memory in every process that opens the cache.
BATCH_BYTES = 64 << 20
SILENT_S = 60.0  # a claim from another machine expires when it is not renewed for this long
TICK_S = 0.1
NICENESS = 10  # encodes at low priority during training, so that training gets the processor first
READING = "reading"  # name of the claim for reading
READ = "read.json"  # file in a work folder that exists once all records are read

_ROWS_FILE = re.compile(r"rows-(\d+)-[0-9a-f]{64}\.arrow")
_RECORDS_FILE = re.compile(r"records-(\d+)\.arrow")
_SCRATCH = re.compile(r"\..*\.tmp")
_PROCESS = TypeAdapter(Process)


class _Read(TypedDict):
    """Number of records, and the files outside the work folder that they refer to."""

    records: int
    elsewhere: list[str]


@dataclass(frozen=True)
class _State:
    """Contents of a work folder. rows: file name of each encoded shard; facts: None until all records are read."""

    read: frozenset[int]
    rows: dict[int, str]
    facts: _Read | None

    @property
    def waiting(self) -> list[int]:
        """Shards that are read but not yet encoded."""
        return sorted(self.read - self.rows.keys())

    @property
    def is_whole(self) -> bool:
        """True if every shard is encoded."""
        return self.facts is not None and len(self.rows) == num_shards(self.facts["records"])


def num_shards(num_records: int) -> int:
    """Number of shards for this many records."""
    return -(-num_records // SHARD_RECORDS)


def encode_together(
    folder: Path,
    number: int,
    checker: Checker,
    num_workers: int | None,
    order: Callable[[int], Sequence[int]] | None = None,
) -> None:
    """Check and encode the records of a data set, shared with other processes, until the generation is published.

    Starts up to num_workers processes. folder: the data set's cache folder; number: number of the generation; order:
    maps the number of shards to the order in which to encode them. Raises DataError or ConfigError if a source can't be
    read, and OSError.
    """
    work = _Work(folder, number, order)
    most = num_workers or len(os.sched_getaffinity(0))
    claims = Claims(work.path)
    with (
        frozen_gc(collect=False),
        _Helpers(work, checker, most) as helpers,
        progress_bar(desc="checking and encoding", delay=2, **({"disable": True} if order else {})) as bar,
    ):
        while (state := work.state()) is not None:
            bar.total, bar.n = state.facts and num_shards(state.facts["records"]), len(state.rows)
            bar.update(0)
            helpers.start(state)
            if state.is_whole:
                work.finish(state)
            elif state.facts is None and claims.take(READING):
                with claims.held(READING):
                    for _ in _read_shards(work, checker.sources):
                        claims.renew(READING)
                        helpers.start(work.state())
            elif helpers.are_running or not _encode_next(work, state, checker, claims):
                time.sleep(TICK_S)


class _Work:
    """The work folder of a generation, and its final path."""

    def __init__(self, folder: Path, number: int, order: Callable[[int], Sequence[int]] | None = None) -> None:
        self.path, self.final, self._order = folder / f"{number}.work", folder / str(number), order
        state = self.state()
        if state is not None and state.facts and not all(map(os.path.exists, state.facts["elsewhere"])):
            shutil.rmtree(self.path, ignore_errors=True)  # a killed run left it, and its images were removed since

    def state(self) -> _State | None:
        """List the folder's contents, and create it if missing. Returns None once the generation is published."""
        if self.final.exists():
            return None
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            self.path.mkdir(parents=True, exist_ok=True)
            names = []
        rows: dict[int, str] = {}
        for name in sorted(names, reverse=True):  # if a shard was encoded twice, the first name counts
            if found := _ROWS_FILE.fullmatch(name):
                rows[int(found[1])] = name
        read = frozenset(int(found[1]) for name in names if (found := _RECORDS_FILE.fullmatch(name)))
        facts = None
        if READ in names:
            with contextlib.suppress(FileNotFoundError):  # the folder was renamed
                facts = read_json(self.path / READ, _Read)
        return _State(read, rows, facts)

    def in_turn(self, state: _State) -> list[int]:
        """Return the waiting shards in the given order, or in ascending order until all records are read."""
        if self._order is None or state.facts is None:
            return state.waiting
        waiting = set(state.waiting)
        return [shard for shard in self._order(num_shards(state.facts["records"])) if shard in waiting]

    def records(self, shard: int) -> Path:
        """Path of a shard's records."""
        return self.path / f"records-{shard:06d}.arrow"

    def scratch(self) -> Path:
        """Return a temporary path in the folder that no other process uses."""
        return self.path / f".{secrets.token_hex(8)}.tmp"

    def finish(self, state: _State) -> None:
        """Publish the finished folder as a generation (the first process wins) and delete leftovers."""
        names = [name for _, name in sorted(state.rows.items())]
        elsewhere = {path: os.stat(path).st_size for path in state.facts["elsewhere"]}
        with contextlib.suppress(FileNotFoundError):  # another process has renamed the folder
            sizes = {name: os.stat(self.path / name).st_size for name in names}
            listed: Listed = {"files": sizes, "elsewhere": elsewhere}
            write_whole(self.path / DONE, json.dumps(listed), shared=True)
            flush(self.path / DONE)
            put_in_place(self.path, self.final)
        for path in self.final.iterdir() if self.final.exists() else ():
            ours = (
                _RECORDS_FILE.fullmatch(path.name) or _ROWS_FILE.fullmatch(path.name) or _SCRATCH.fullmatch(path.name)
            )
            if path.name not in names and (ours or path.name == READ or path.suffix == ".claim"):
                path.unlink(missing_ok=True)
        remove_older(self.final)


class Claims:
    """Claims on work in a folder. A claim is a file that names the process that holds and renews it.

    A claim held on this machine is valid while its process runs. One from another machine is valid while it is renewed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._mine = folder, Process.current()
        self._seen: dict[str, tuple[int, float]] = {}  # by name: last renewal, and when this process first saw it

    def take(self, name: str) -> bool:
        """Try to claim `name`. Returns False if a live process holds it, or if the folder is gone."""
        text = json.dumps(asdict(self._mine))
        try:
            with open(self._path(name), "x", encoding="utf-8") as file:
                file.write(text)
            return True
        except FileNotFoundError:
            return False
        except FileExistsError:
            pass
        if not self._is_abandoned(name):
            return False
        with contextlib.suppress(FileNotFoundError):
            write_whole(self._path(name), text, shared=True)
            return True
        return False

    def renew(self, name: str) -> None:
        """Renew the claim: this process is still working on it."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(self._path(name))

    @contextlib.contextmanager
    def held(self, name: str) -> Iterator[None]:
        """Remove the claim at the end of the block."""
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                self._path(name).unlink()

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.claim"

    def _is_abandoned(self, name: str) -> bool:
        try:
            renewed = self._path(name).stat().st_mtime_ns
            holder = _PROCESS.validate_json(self._path(name).read_bytes())
        except FileNotFoundError:
            return False
        except ValidationError:
            holder = None  # not written yet, or truncated by a full disk
        if holder is not None and holder.is_here:
            return not holder.is_alive
        before, since = self._seen.get(name, (None, 0.0))
        if before != renewed:
            self._seen[name] = renewed, time.monotonic()
            return False
        return time.monotonic() - since > SILENT_S


class _Helpers:
    """Processes that encode shards until all are done. They end with this process."""

    def __init__(self, work: _Work, checker: Checker, most: int) -> None:
        self._work, self._checker, self._most = work, checker, most
        context = multiprocessing.get_context("fork")
        self._make, self._errors = context.Process, context.SimpleQueue()
        self._processes: list[multiprocessing.process.BaseProcess] = []

    def __enter__(self) -> "_Helpers":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()  # they have inherited this process's handler of SIGTERM
            process.join()

    @property
    def are_running(self) -> bool:
        return any(process.is_alive() for process in self._processes)

    def start(self, state: _State | None) -> None:
        """Start the processes as soon as each has a shard, or all records are read. Raises the error of a process that
        failed."""
        if not self._errors.empty():
            raise self._errors.get()
        if any(process.exitcode for process in self._processes):
            raise DataError(
                "a process that checks and encodes records was killed: this machine may be out of memory: give a "
                "smaller --preprocessing_num_workers; encoded records are kept"
            )
        if self._processes or state is None or self._most < 2:
            return
        waiting = len(state.waiting)
        if waiting >= self._most or (state.facts is not None and waiting > 1):
            for _ in range(min(self._most, waiting)):
                self._processes.append(self._make(target=self._help, args=(os.getpid(),), daemon=True))
                self._processes[-1].start()

    def _help(self, parent: int) -> None:
        begin_helper(parent)
        try:
            claims = Claims(self._work.path)
            while os.getppid() == parent and (state := self._work.state()) is not None and not state.is_whole:
                if not _encode_next(self._work, state, self._checker, claims):
                    time.sleep(TICK_S)
        except Exception as error:
            self._errors.put(error)


class EncodingBeside:
    """A process that encodes while this process trains. It ends when this process ends."""

    def __init__(self, encode: Callable[[], None]) -> None:
        """encode: called in the forked process."""
        context = multiprocessing.get_context("fork")
        self._errors = context.SimpleQueue()
        self._process = context.Process(target=self._run, args=(encode, os.getpid()))  # not a daemon: it has children
        self._process.start()
        atexit.register(self._process.kill)

    def check(self) -> None:
        """Raise the error that ended the process before its work was done."""
        if not self._errors.empty():
            raise self._errors.get()
        if self._process.exitcode:
            raise DataError(
                "the process that checks and encodes records during training was killed: this machine may be out of "
                "memory: give a smaller --preprocessing_num_workers; encoded records are kept"
            )

    def _run(self, encode: Callable[[], None], parent: int) -> None:
        end_with_parent(parent)
        # All processes get the signals that stop a run. Ignore them: the run may need another shard before it saves.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        os.nice(NICENESS)
        try:
            encode()
        except Exception as error:
            self._errors.put(error)


def encoded_shards(folder: Path, number: int) -> dict[int, Path]:
    """Map each encoded shard of a generation to its file, also before the generation is published."""
    for path in (folder / str(number), folder / f"{number}.work"):
        with contextlib.suppress(FileNotFoundError):  # the work folder is renamed at the end
            found = map(_ROWS_FILE.fullmatch, sorted(os.listdir(path), reverse=True))
            return {int(match[1]): path / match[0] for match in found if match}
    return {}


def records_in_work(folder: Path, number: int) -> int | None:
    """Return the number of records of an unpublished generation; None until all are read."""
    with contextlib.suppress(FileNotFoundError):
        return read_json(folder / f"{number}.work" / READ, _Read)["records"]
    return None


def _encode_next(work: _Work, state: _State, checker: Checker, claims: Claims) -> bool:
    """Encode an unclaimed shard; False if all are claimed or done."""
    for shard in work.in_turn(state):
        name = f"{shard:06d}"
        if claims.take(name):
            with claims.held(name):
                now = work.state()
                if now is not None and shard in now.waiting:  # else another process has encoded it meanwhile
                    _encode(work, shard, checker, partial(claims.renew, name))
            return True
    return False


def _encode(work: _Work, shard: int, checker: Checker, renew: Callable[[], None]) -> None:
    """Write the rows of a shard of records."""
    scratch = work.scratch()
    try:
        with pa.memory_map(str(work.records(shard))) as file, pa.ipc.open_stream(file) as reader:
            records = reader.read_all()
            with pa.OSFile(str(scratch), "wb") as out, pa.ipc.new_stream(out, checker.schema) as writer:
                parts: list[pa.Table] = []
                for first in range(0, len(records), RECORDS_PER_CALL):
                    part = records.slice(first, RECORDS_PER_CALL)
                    parts.append(checker(part))
                    assert len(parts[-1]) == len(part), "a record was lost"
                    if sum(rows.nbytes for rows in parts) > BATCH_BYTES:
                        writer.write_table(pa.concat_tables(parts).combine_chunks())
                        parts = []
                    renew()
                if parts:
                    writer.write_table(pa.concat_tables(parts).combine_chunks())
        digest = flush_and_hash(scratch)["sha256"]
        os.replace(scratch, work.path / f"rows-{shard:06d}-{digest}.arrow")
    except FileNotFoundError:
        if not work.final.exists():  # else another process published the folder
            raise
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink()


def _read_shards(work: _Work, sources: tuple[Source, ...]) -> Iterator[int]:
    """Write the sources' records in shards, skipping existing shards. Yields the index of each shard."""
    total, state = 0, work.state()
    there = state.read if state is not None else frozenset()
    for shard, batches in groupby(_record_batches(sources), itemgetter(0)):
        scratch = work.scratch()
        try:
            with pa.OSFile(str(scratch), "wb") as file, pa.ipc.new_stream(file, RECORDS) as writer:
                for _, batch in batches:
                    total += len(batch)
                    if shard not in there:
                        writer.write_batch(batch)
            if shard not in there:
                os.replace(scratch, work.records(shard))
        finally:
            with contextlib.suppress(OSError):
                scratch.unlink()
        yield shard
    if not total:
        raise DataError(f"{', '.join(source.path for source in sources)}: it has no records")
    spooled = {f"{source.spool}/{IMAGES}" for source in sources}
    facts: _Read = {"records": total, "elsewhere": sorted(filter(os.path.exists, spooled))}
    write_whole(work.path / READ, json.dumps(facts), shared=True)


def _record_batches(sources: tuple[Source, ...]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield all records in order, in batches that don't cross shards, with the shard's index."""
    rows: list[tuple] = []
    total = num_chars = 0
    for number, source in enumerate(sources):
        for record in progress_bar(iterable=source.read(), desc=f"reading {Path(source.path).name}", delay=2):
            # Keep invalid Unicode: the checker then rejects only this record.
            text = record.text.encode("utf-8", "surrogatepass")
            rows.append((number, record.file.encode("utf-8", "replace").decode(), record.line, record.index, text))
            total, num_chars = total + 1, num_chars + len(record.text)
            if total % SHARD_RECORDS == 0 or len(rows) == RECORDS_PER_BATCH or num_chars > CHARS_PER_BATCH:
                yield (total - 1) // SHARD_RECORDS, _batch(rows)
                rows, num_chars = [], 0
    if rows:
        yield (total - 1) // SHARD_RECORDS, _batch(rows)


def _batch(rows: list[tuple]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(zip(*rows), RECORDS)], schema=RECORDS
    )
