"""A layout comes back from its file as it was, also from the files of earlier versions, which have no slices."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from llava_ds.constants import DataError
from llava_ds.engine.pieces import Piece, has_layout, layout_file, layout_of, layout_text, read_layout


@pytest.fixture
def engine() -> SimpleNamespace:
    """As much of DeepSpeed's at stage 0 as a layout describes."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    return SimpleNamespace(
        optimizer=optimizer,
        basic_optimizer=optimizer,
        param_names={p: name for name, p in model.named_parameters()},
        get_data_types=lambda: (torch.float32, torch.float32),
    )


def without_slices(folder: Path, rank: int) -> None:
    """Change a layout file into one of an earlier version."""
    file = layout_file(folder, rank)
    content = json.loads(file.read_text())
    assert all(piece.pop(1) == [] for slot in content["slots"] for piece in slot)
    file.write_text(json.dumps(content))


def test_a_layout_is_read_as_it_was_written(engine, tmp_path):
    assert not has_layout(tmp_path)
    layout_file(tmp_path, 0).write_text(layout_text(engine))
    layout = read_layout(tmp_path, 0)
    assert has_layout(tmp_path) and layout == layout_of(engine)
    assert layout.slots == ((Piece("weight", (), 0, 6, 0),), (Piece("bias", (), 0, 2, 0),))


def test_a_layout_of_an_earlier_version_is_of_whole_parameters(engine, tmp_path):
    layout_file(tmp_path, 0).write_text(layout_text(engine))
    without_slices(tmp_path, 0)
    assert json.loads(layout_file(tmp_path, 0).read_text())["slots"][0] == [["weight", 0, 6, 0]]
    assert read_layout(tmp_path, 0) == layout_of(engine)


def test_a_slice_is_read_as_it_was_written(engine, tmp_path):
    content = json.loads(layout_text(engine))
    content["slots"][0][0][1] = [[0, 0, 1]]
    layout_file(tmp_path, 0).write_text(json.dumps(content))
    assert read_layout(tmp_path, 0).slots[0][0].slice == ((0, 0, 1),)


@pytest.mark.parametrize("piece", [["weight"], ["weight", 0, 6], ["weight", 7, 0, 6, 0], ["weight", [], 0, 6, 0, 0]])
def test_a_damaged_layout_is_refused(engine, tmp_path, piece):
    content = json.loads(layout_text(engine))
    content["slots"][0][0] = piece
    layout_file(tmp_path, 0).write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"layout-0\.json can't be read"):
        read_layout(tmp_path, 0)
