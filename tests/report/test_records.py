"""Event files are those that TensorBoard itself would write."""

import random

import pytest

from llava_ds.report import records


def test_records_are_tensorboards_of_any_length(tmp_path, monkeypatch):
    record_writer = pytest.importorskip("tensorboard.summary.writer.record_writer")
    monkeypatch.setattr(records, "LONGEST", 64)
    drawn = random.Random(0)
    contents = [drawn.randbytes(size) for size in (4, 5, 63, 64, 65, 1000, 7, 330)] + [bytes(9), b"\xff" * 9]
    with (tmp_path / "theirs").open("wb") as file:
        for content in contents:
            record_writer.RecordWriter(file).write(content)
    ours = records.RecordFile((tmp_path / "ours").open("wb", buffering=0))
    for content in contents:
        ours.write(content)
    ours.close()
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
