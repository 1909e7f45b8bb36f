"""Any number of processes may write the same cache at once, be killed there, and read on while another writes."""

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from llava_ds.data import cache
from llava_ds.data.cache import cache_scratch
from llava_ds.data.sources.embedded import ImageStore, spooled


def spool_row(store: ImageStore):
    store.add(b"abc")
    yield 0, 1, "{}"


def open_many(folder: Path, start, failures) -> None:
    for i in range(8):
        start.wait(timeout=30)
        try:
            assert list(spooled(str(folder / "pictures" / str(i)), spool_row)) == [(0, 1, "{}")]
        except BaseException as error:
            failures.put(repr(error))


def test_processes_that_write_a_spool_at_once_all_get_it(tmp_path):
    context = multiprocessing.get_context("fork")
    start, failures = context.Barrier(4), context.SimpleQueue()
    processes = [context.Process(target=open_many, args=(tmp_path, start, failures)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=60)
    assert failures.empty() and [process.exitcode for process in processes] == [0] * 4
    assert not list(tmp_path.rglob("*.tmp"))
    assert sorted(path.name for path in (tmp_path / "pictures").iterdir()) == sorted(map(str, range(8)))


def test_scratch_of_a_killed_process_with_this_number_is_in_nobodys_way(tmp_path):
    (tmp_path / f"spool.{os.getpid()}.tmp").mkdir()
    assert len(list(spooled(str(tmp_path / "spool"), spool_row))) == 1
    assert len(list(tmp_path.glob("*.tmp"))) == 1  # it may be alive


def test_scratch_is_removed_once_nobody_has_written_there_for_a_day(tmp_path):
    old = time.time() - cache.SCRATCH_AGE_S - 60
    for name in ("dead", "alive"):
        with pytest.raises(KeyboardInterrupt), cache_scratch(tmp_path / "key") as scratch:
            scratch.parent.rename(tmp_path / f"{name}.tmp")  # as if the clean-up never came
            raise KeyboardInterrupt
        inner = tmp_path / f"{name}.tmp" / "key"
        (inner / "rows").write_text("")
        for path in (inner / "rows", inner, inner.parent):
            os.utime(path, (old, old))
    (tmp_path / "alive.tmp" / "key" / "rows").write_text("more")
    with cache_scratch(tmp_path / "other"):
        assert not (tmp_path / "dead.tmp").exists() and (tmp_path / "alive.tmp").exists()


def test_a_folder_can_be_read_by_whoever_may_read_its_neighbours(tmp_path):
    (tmp_path / "plain").mkdir()
    list(spooled(str(tmp_path / "key"), spool_row))
    assert (tmp_path / "key").stat().st_mode == (tmp_path / "plain").stat().st_mode
