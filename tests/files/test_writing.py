"""A file that is written anew is the old or the new one, and nothing else stays."""

import os
import re
from pathlib import Path

import pytest

from llava_ds.constants import ConfigError
from llava_ds.files.writing import can_be_made, path_problem, write_output, write_whole


def test_what_breaks_off_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a.txt"
    write_whole(path, "old")

    def broken_off(scratch):
        scratch.write_text("ne")
        assert path.read_text() == "old"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(path, broken_off)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    write_whole(path, lambda scratch: scratch.write_bytes(b"new"))
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "no" / "a.txt", "x")


@pytest.mark.parametrize("name", ["fifo", "folder", "nowhere/page.html", "/dev/full"])
def test_a_file_that_can_not_be_written_is_named_with_its_flag(tmp_path, name):
    os.mkfifo(tmp_path / "fifo")  # that nobody reads: opening it would wait
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=r"--html .*" + name + r" can't be written \(.*\): name another file"):
        write_output(tmp_path / name, "text", "--html")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fifo", "folder"]


def test_a_device_is_written_to_and_not_replaced(tmp_path):
    write_output(Path("/dev/null"), "text", "--html")
    assert Path("/dev/null").is_char_device()
    write_output(tmp_path / "page.html", "text", "--html")
    assert (tmp_path / "page.html").read_text() == "text"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is empty"),
        ("~nobody-here/x", "no such user"),
        ("x" * 300, "a name in it has more than 255 bytes|File name too long"),
        ("../" * 2000, "File name too long"),
        ("a\0b", "null"),
    ],
)
def test_a_path_that_no_file_can_have(text, problem):
    assert re.search(problem, path_problem(text))
    assert not can_be_made(text)


def test_a_path_that_a_file_can_have(tmp_path):
    for path in (str(tmp_path), str(tmp_path / "new" / "file"), "/etc/passwd/x", "~", "~/x"):
        assert path_problem(path) is None
