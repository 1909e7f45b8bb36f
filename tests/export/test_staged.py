"""An exported folder is there whole or not at all."""

import pytest

from llava_ds.export.staged import staged


def files(folder) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_a_folder_that_is_not_finished_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), staged(tmp_path / "new" / "model") as stage:
        assert stage.name == "model"
        (stage / "config.json").write_text("half")
        raise KeyboardInterrupt
    assert not (tmp_path / "new" / "model").exists()


def test_what_was_there_stays_until_all_is_written(tmp_path):
    (tmp_path / "config.json").write_text("old")
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(OSError, match="full"), staged(tmp_path) as stage:
        (stage / "config.json").write_text("half")
        raise OSError("full")
    assert files(tmp_path) == {"config.json": "old", "notes": "mine"}
    with staged(tmp_path) as stage:
        (stage / "config.json").write_text("new")
        (stage / "weights").write_text("1")
    assert files(tmp_path) == {"config.json": "new", "notes": "mine", "weights": "1"}
