"""A file that is written anew is the old or the new one, and nothing else stays."""

import pytest

from llava_ds.whole_files import write_whole


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
