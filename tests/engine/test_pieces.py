"""A layout comes back from its file as it was, also from the files of earlier versions, which have no slices."""

import itertools
import json
import math
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from llava_ds.constants import DataError
from llava_ds.engine.placement import slice_of
from llava_ds.engine.shards.pieces import Piece, has_layout, layout_file, layout_of, layout_text, read_layout


@pytest.fixture
def engine() -> SimpleNamespace:
    """As much of DeepSpeed's at stage 0 as a layout describes."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    return SimpleNamespace(
        module=model,
        optimizer=optimizer,
        basic_optimizer=optimizer,
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
    content["slots"][0][0][1] = [0, 1, 3]
    layout_file(tmp_path, 0).write_text(json.dumps(content))
    assert read_layout(tmp_path, 0).slots[0][0].slice == (0, 1, 3)


def cut(whole: torch.Tensor, dim: int, parts: int, index: int) -> tuple[torch.Tensor, tuple]:
    """A part of a matrix, and its slice."""
    if parts == 1:
        return whole, ()
    return whole.chunk(parts, dim)[index], slice_of(tuple(whole.shape), dim, index, parts)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", [(12, 12), (24, 12), (12, 36)])
def test_pieces_of_any_slices_find_their_common_numbers(dim, shape):
    """Every number of a piece comes out of the pieces of another mesh, and from where it is."""
    rng = random.Random(f"{dim} {shape}")
    whole = torch.arange(math.prod(shape)).view(shape)
    for _ in range(60):
        parts, others = rng.choice([1, 2, 3, 4, 6]), rng.choice([1, 2, 3, 4, 6])
        index = rng.randrange(parts)
        own, own_slice = cut(whole, dim, parts, index)
        first, last = sorted(rng.sample(range(own.numel() + 1), 2))
        target = Piece("weight", own_slice, first, last - first, rng.randrange(5))
        found = torch.full((target.offset + target.length,), -1)
        counted = 0
        for other in range(others):
            held, held_slice = cut(whole, dim, others, other)
            ends = sorted({0, held.numel(), *rng.sample(range(held.numel()), 2)})
            for begin, end in itertools.pairwise(ends):  # the shards of data-parallel ranks
                offset = rng.randrange(4)
                piece = Piece("weight", held_slice, begin, end - begin, offset)
                stored = torch.cat([torch.full((offset,), -2), held.flatten()[begin:end]])
                counted += piece.overlap(target)
                for block in piece.common(target):
                    for row in range(block.rows):
                        from_, to = block.from_ + row * block.from_step, block.to + row * block.to_step
                        found[to : to + block.width] = stored[from_ : from_ + block.width]
        assert counted == target.length
        assert torch.equal(found[target.offset :], own.flatten()[first:last])


@pytest.mark.parametrize(
    "piece",
    [["weight"], ["weight", 0, 6], ["weight", 7, 0, 6, 0], ["weight", [], 0, 6, 0, 0], ["weight", [1, 2], 0, 6, 0]],
)
def test_a_damaged_layout_is_refused(engine, tmp_path, piece):
    content = json.loads(layout_text(engine))
    content["slots"][0][0] = piece
    layout_file(tmp_path, 0).write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"layout-0\.json can't be read"):
        read_layout(tmp_path, 0)
