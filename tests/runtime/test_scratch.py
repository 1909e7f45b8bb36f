"""Scratch folders of killed processes are removed at the next start, and nobody else's."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from llava_ds.runtime import scratch
from llava_ds.runtime.scratch import OTHERS_AGE_S, scratch_folder

PREFIX = "export-trial-"


def hold(parent: Path, ready) -> None:
    with scratch_folder(PREFIX, parent) as folder:
        (folder / "weights").mkdir()
        (folder / "weights" / "model.safetensors").write_bytes(b"x")
        ready.set()
        time.sleep(60)


@pytest.fixture
def holder(tmp_path):
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=hold, args=(tmp_path, ready), daemon=True)
    process.start()
    assert ready.wait(20)
    yield process
    process.kill()
    process.join()


def names(parent: Path) -> list[str]:
    return sorted(path.name for path in parent.iterdir())


def test_a_killed_processes_folder_goes_at_the_next_start_and_a_living_ones_stays(tmp_path, holder):
    (left,) = names(tmp_path)
    with scratch_folder(PREFIX, tmp_path) as folder:
        assert folder.is_dir() and left in names(tmp_path)
    assert names(tmp_path) == [left]
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    assert names(tmp_path) == [left]
    with scratch_folder(PREFIX, tmp_path) as folder:
        assert names(tmp_path) == [folder.name]
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", ["export-trial-x8f3k2", f"export-trial-{'0' * 12}-1-1-abc"])
def test_an_older_versions_or_another_machines_folder_goes_after_a_day_without_a_write(tmp_path, name):
    (tmp_path / name / "weights").mkdir(parents=True)
    with scratch_folder(PREFIX, tmp_path):
        assert name in names(tmp_path)
    for path in (tmp_path / name / "weights", tmp_path / name):
        os.utime(path, (0, time.time() - OTHERS_AGE_S - 9))
    with scratch_folder(PREFIX, tmp_path):
        assert name not in names(tmp_path)


def test_other_peoples_files_stay(tmp_path):
    number = "999999999-1-abc"  # of a process that is not there
    own = f"{PREFIX}{scratch._machine(scratch.Process.current())}-{number}"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / own).symlink_to(tmp_path / "elsewhere")
    (tmp_path / f"{own}.txt").write_text("a file")
    (tmp_path / "export").mkdir()
    with scratch_folder(PREFIX, tmp_path):
        pass
    assert names(tmp_path) == sorted(["elsewhere", own, f"{own}.txt", "export"])
