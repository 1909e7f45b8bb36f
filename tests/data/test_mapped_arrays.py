"""Arrays that the processes of a machine share are made once, whole, and found again."""

import multiprocessing
import os
import time
from pathlib import Path

import numpy as np
import pytest

from llava_ds.data import mapped_arrays
from llava_ds.data.mapped_arrays import Mapped, mapped, remove_unused


def numbers(made: list | None = None) -> Mapped:
    if made is not None:
        made.append(1)
    return Mapped({"a": np.arange(5, dtype=np.int32), "none": np.zeros(0, np.int32)}, {"sum": 10})


def is_right(found: Mapped) -> bool:
    return found.arrays["a"].tolist() == list(range(5)) and not len(found.arrays["none"]) and found.facts == {"sum": 10}


def test_arrays_are_made_once_and_mapped_read_only(tmp_path):
    made: list = []
    for _ in range(3):
        found = mapped(tmp_path / "new" / "a", lambda: numbers(made))
        assert is_right(found) and isinstance(found.arrays["a"], np.memmap)
        with pytest.raises(ValueError, match="read-only"):
            found.arrays["a"][0] = 1
    assert len(made) == 1


@pytest.mark.parametrize("name", ["a.npy", "facts.json"])
@pytest.mark.parametrize("damage", ["cut", "empty", "gone"])
def test_damaged_arrays_are_made_again(tmp_path, name, damage):
    mapped(tmp_path / "a", numbers)
    path, made = tmp_path / "a" / name, []
    if damage == "gone":
        path.unlink()
    else:
        os.truncate(path, 0 if damage == "empty" else path.stat().st_size - 1)
    assert is_right(mapped(tmp_path / "a", lambda: numbers(made))) and is_right(mapped(tmp_path / "a", numbers))
    assert len(made) == 1


def test_where_nothing_can_be_written_every_process_has_its_own(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(mapped_arrays, "_write", refuse)
    made: list = []
    assert is_right(mapped(tmp_path / "a", lambda: numbers(made))) and len(made) == 1
    assert f"{tmp_path / 'a'}: can't be written (Permission denied): every process keeps" in capsys.readouterr().out
    (tmp_path / "file").touch()  # not a folder
    assert is_right(mapped(tmp_path / "file" / "a", numbers))


def _open(folder: Path, notes: Path) -> None:
    def make() -> Mapped:
        (notes / str(os.getpid())).touch()
        time.sleep(0.5)
        return numbers()

    assert is_right(mapped(folder, make))


def test_of_several_processes_one_makes_the_arrays(tmp_path):
    notes = tmp_path / "notes"
    notes.mkdir()
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_open, args=(tmp_path / "a", notes)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert len(list(notes.iterdir())) == 1


def test_arrays_that_nobody_opens_are_removed(tmp_path):
    for name in ("old", "used"):
        mapped(tmp_path / name, numbers)
        os.utime(tmp_path / name / "facts.json", (0, 0))
    found = mapped(tmp_path / "used", numbers)  # opening it again counts
    remove_unused(tmp_path)
    assert not (tmp_path / "old").exists() and is_right(found) and is_right(mapped(tmp_path / "used", numbers))
