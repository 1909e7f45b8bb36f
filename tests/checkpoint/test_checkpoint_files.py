"""DeepSpeed's files are read for what they hold, and nothing in them is run."""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import torch

from llava_ds.checkpoint.checkpoint_files import model_states, optimizer_states, read_states, saved_pieces
from llava_ds.constants import DataError
from llava_ds.engine.shards.pieces import PLAIN, ZERO, Layout, Piece


class Trap:
    def __reduce__(self):
        return (Path.touch, (Path("sprung"),))


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_with_code_in_it_is_refused_and_nothing_runs(tmp_path, monkeypatch, zipped):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    torch.save(
        {"optimizer_state_dict": {"w": torch.ones(2), "more": Trap()}}, file, _use_new_zipfile_serialization=zipped
    )
    for read in (lambda: read_states(file), lambda: optimizer_states(tmp_path, 1)):
        with pytest.raises(DataError, match=r"is refused: it holds|can't be read"):
            read()
    assert not Path("sprung").exists()
    torch.save({"optimizer_state_dict": {"w": torch.ones(2)}}, file, _use_new_zipfile_serialization=zipped)
    assert optimizer_states(tmp_path, 1)["w"].tolist() == [1, 1]


def test_missing_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"has no mp_rank_00_model_states\.pt or zero_pp_rank_0_"):
        model_states(tmp_path)
    with pytest.raises(DataError, match=r"has 0 files named \*zero_pp_rank_3_mp_rank_00_optim_states\.pt, expected 1"):
        optimizer_states(tmp_path, 3)


WEIGHTS = {name: torch.arange(4.0) + 10 * i for i, name in enumerate(("first", "second", "third", "fourth"))}


def write_checkpoint(folder: Path, layouts: list[Layout]) -> None:
    """What DeepSpeed leaves at stage 0 and 1 of ranks that have these layouts, each with numbers of its own dp rank's
    added, so that it is seen from whose file they came."""
    (folder / "engine").mkdir()
    first = layouts[0]
    ranks_of_part = len(layouts) // (first.pp * first.tp)
    for rank, layout in enumerate(layouts):
        (folder / f"layout-{rank}.json").write_text(json.dumps(dataclasses.asdict(layout)))
        dp_rank, part = (rank % ranks_of_part, rank // ranks_of_part) if first.pp > 1 else divmod(rank, first.tp)
        held = {
            piece.name: WEIGHTS[piece.name].flatten()[piece.start :][: piece.length] + 100 * dp_rank
            for slot in layout.slots
            for piece in slot
        }
        moments = {
            "state": {i: {"exp_avg": -weight} for i, weight in enumerate(held.values())},
            "param_groups": [{"params": list(range(len(held)))}],
        }
        if first.kind == PLAIN:
            if dp_rank == 0:
                torch.save({"module": held, "optimizer": moments}, folder / f"engine/mp_rank_{part:02}_model_states.pt")
        else:
            states = {"single_partition_of_fp32_groups": list(held.values()), "base_optimizer_state": moments}
            torch.save(
                {"optimizer_state_dict": states},
                folder / f"engine/zero_pp_rank_{dp_rank}_mp_rank_{part:02}_optim_states.pt",
            )


def layout(kind: str, pieces: list[Piece], **axes: int) -> Layout:
    return Layout(kind, "AdamW", "torch.float32", "torch.float32", tuple((piece,) for piece in pieces), **axes)


def found(folder: Path, world_size: int, names: tuple[str, ...]) -> dict[tuple[str, int], tuple[list, list]]:
    """Weights and moments that a rank with the whole of these parameters is given, by name and start."""
    live = layout(PLAIN, [Piece(name, (), 0, 4, 0) for name in names])
    given = list(saved_pieces(folder, world_size, live))
    by_place = {(p.name, p.start): (m.tolist(), s["exp_avg"].tolist()) for p, m, s in given}
    assert len(by_place) == len(given)  # nothing twice
    return by_place


def test_each_stage_of_a_pipeline_gives_its_own_layers_once(tmp_path):
    stages = [("first", "second"), ("third", "fourth")]
    layouts = [
        layout(PLAIN, [Piece(name, (), 0, 4, 0) for name in stages[rank // 3]], pp=2) for rank in range(6)
    ]  # of three ranks that have a stage, the first saves it
    write_checkpoint(tmp_path, layouts)
    assert found(tmp_path, 6, ("first", "fourth")) == {
        (name, 0): (WEIGHTS[name].tolist(), (-WEIGHTS[name]).tolist()) for name in ("first", "fourth")
    }


def test_ranks_of_a_stage_give_their_parts_of_its_layers(tmp_path):
    stages = [("first", "second"), ("third", "fourth")]
    layouts = [
        layout(ZERO, [Piece(name, (), 2 * (rank % 2), 2, 0) for name in stages[rank // 2]], pp=2) for rank in range(4)
    ]
    write_checkpoint(tmp_path, layouts)
    expected = {}
    for name, dp_rank in itertools.product(("second", "third"), range(2)):
        part = WEIGHTS[name][2 * dp_rank :][:2] + 100 * dp_rank
        expected[name, 2 * dp_rank] = (part.tolist(), (-part).tolist())
    assert found(tmp_path, 4, ("second", "third")) == expected


def test_ranks_that_share_matrices_give_what_they_all_have_once(tmp_path):
    layouts = [
        layout(
            PLAIN,
            [Piece("first", (2 * (rank % 2), 2 * (rank % 2) + 2, 4), 0, 2, 0), Piece("second", (), 0, 4, 0)],
            tp=2,
        )
        for rank in range(4)
    ]
    write_checkpoint(tmp_path, layouts)
    live = layout(PLAIN, [Piece("first", (), 0, 4, 0), Piece("second", (), 0, 4, 0)])
    given = [(p.name, p.slice, s["exp_avg"].shape) for p, _, s in saved_pieces(tmp_path, 4, live)]
    assert given == [("first", (0, 2, 4), (2,)), ("second", (), (4,)), ("first", (2, 4, 4), (2,))]
