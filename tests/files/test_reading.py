"""Small files are read whoever has touched them: nothing waits, nothing takes all memory, and every fault is said."""

import os

import pytest

from llava_ds.constants import DataError
from llava_ds.files.reading import MAX_JSON_BYTES, move_aside, read_json, read_rows, why_not_regular

OBJECT = dict[str, int]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is empty"),
        (b"{", "it is no JSON"),
        (b"\xff\xfe{}", "it is no"),
        (b'{"a": "\xff"}', r"it is not UTF-8 \(byte 7\)"),
        (b"null", "it: input should be a valid dict"),
        (b'{"a": "1"}', "a: input should be a valid integer"),
        (b"[" * 200_000 + b"]" * 200_000, "it is nested too deeply"),
        (b"1" * 5_000, "it is no JSON"),  # more digits than Python reads
        (b" " * (MAX_JSON_BYTES + 1), "it is larger than 16 MB"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_what_is_no_such_json_is_said(tmp_path, content, reason):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=reason):
        read_json(path, OBJECT)


def test_what_is_no_file_is_said_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    for name, reason in (("pipe", "a named pipe"), ("zero", "a device"), ("folder", "a directory")):
        for read in (lambda path: read_json(path, OBJECT), read_rows):
            with pytest.raises(DataError, match=f"(?i){reason}"):
                read(tmp_path / name)
        assert why_not_regular(tmp_path / name) is not None
    assert "it is a broken link" in why_not_regular(tmp_path / "nowhere")
    assert why_not_regular(tmp_path / "absent") is None
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "absent", OBJECT)


def test_sound_rows_are_read_around_damaged_ones(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"step": 1}\n\xff\xfe\n{"step": 2}\n[3]\n{"step": 4}\nnot\n\n{"step": 5}\n{"step"')
    assert read_rows(path) == ([{"step": n} for n in (1, 2, 4, 5)], [2, 4, 6])
    path.write_bytes(b'{"step": "1"}\n{"step": 2}')
    assert read_rows(path, OBJECT) == ([{"step": 2}], [1])


def test_what_is_moved_aside_takes_nobodys_place(tmp_path):
    moved = []
    for _ in range(3):
        (tmp_path / "a").mkdir()
        moved.append(move_aside(tmp_path / "a"))
    assert len(set(moved)) == 3 and all(path.is_dir() for path in moved)
