"""A run goes on whatever was done to its logs: what is damaged is kept beside, and said."""

import json
import os

import pytest
import torch

from llava_ds.files.jsonl import MetricsLog, read_metrics
from llava_ds.files.writing import RUN_FOLDER, run_folder
from llava_ds.runtime.ranks import Ranks
from llava_ds.tracking.mending import mend_side_files

RANKS = Ranks(0, 0, 1, torch.device("cpu"))
NAMES = ("metrics.jsonl", "evaluation*.json", "loss.png")


def row(step: int) -> dict:
    return {"step": step, "loss": 1.0, "epoch": 0.1 * step, "lr": [1e-3], "tokens": 7, "grad_norm": None}


@pytest.mark.parametrize("damage", [b"\xff\xfe\x00", b"{}", b"[1]", b'{"step": "3"}', b"[" * 100_000, b"null"])
def test_sound_rows_go_on_and_the_damaged_file_is_kept(tmp_path, capsys, damage):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps(row(step)).encode() for step in (1, 2, 3)]
    path.write_bytes(b"\n".join([*lines[:2], damage, lines[2], b""]))
    before = path.read_bytes()
    mend_side_files(tmp_path, NAMES, RANKS)
    assert "1 lines are not valid rows (3) and are removed, 3 are kept" in capsys.readouterr().out
    (kept,) = tmp_path.glob("metrics.jsonl.damaged-*")
    assert kept.read_bytes() == before
    MetricsLog(path, 2)
    assert [each["step"] for each in read_metrics(path)] == [1, 2]
    mend_side_files(tmp_path, NAMES, RANKS)
    assert not capsys.readouterr().out


def test_what_is_no_file_gives_way(tmp_path, capsys):
    (tmp_path / "run.json").mkdir()
    (tmp_path / "data_files.parquet").mkdir()
    os.mkfifo(tmp_path / "metrics.jsonl")
    (tmp_path / "evaluation-a.json").symlink_to("/dev/zero")
    (tmp_path / "mine").mkdir()  # nobody's name
    mend_side_files(tmp_path, NAMES, RANKS)
    assert len(capsys.readouterr().out.splitlines()) == 4
    left = sorted(path.name.partition(".damaged-")[0] for path in tmp_path.iterdir())
    assert left == ["data_files.parquet", "evaluation-a.json", "metrics.jsonl", "mine", "run.json"]
    assert not any((tmp_path / name).exists() for name in ("run.json", "metrics.jsonl", "evaluation-a.json"))


def test_the_folder_of_the_books_is_mended_as_well(tmp_path):
    (tmp_path / RUN_FOLDER).write_text("no folder")
    mend_side_files(tmp_path, NAMES, RANKS)
    assert run_folder(tmp_path) == tmp_path / RUN_FOLDER and not run_folder(tmp_path).exists()
    (tmp_path / RUN_FOLDER / "run.json").mkdir(parents=True)
    mend_side_files(tmp_path, NAMES, RANKS)
    assert [path.name.partition("-")[0] for path in run_folder(tmp_path).iterdir()] == ["run.json.damaged"]
    (tmp_path / "metrics.jsonl").write_text("")  # as earlier versions left it
    assert run_folder(tmp_path) == tmp_path
