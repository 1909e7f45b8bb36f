"""All records of all sources through the checker, in parallel, to Arrow files; and some of them once more."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import datasets
import pyarrow as pa

from llava_ds.constants import DataError
from llava_ds.data.preflight import RECORDS, ROWS, Checker
from llava_ds.data.sources import Source
from llava_ds.data.sources.embedded import PICTURES
from llava_ds.runtime.ranks import progress_bar

RECORDS_PER_BATCH, CHARS_PER_BATCH = 1_000, 8 << 20  # that are read before they are written, whichever is less
RECORDS_PER_CALL = 256  # that a worker process checks at a time
RECORDS_PER_WORKER = 2_000  # below this, starting another process takes longer than it saves


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

    Returns their names in order, and the files of pictures that came inside the records.
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
    spooled = (f"{source.spool}/{PICTURES}" for source in checker.sources)
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
