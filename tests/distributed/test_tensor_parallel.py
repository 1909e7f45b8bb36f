"""Ranks that share matrices: losses and gradients are those of one rank that has them whole."""

from pathlib import Path

import pytest
import toys
from sharing import check_same, train_all, write_data

TRAINED_TOWER = {"mm_tunable_parts": "mm_vision_tower,mm_mlp_adapter,mm_language_model"}
TP = {"tensor_parallel_size": 2}
PACKED = {"tokens_per_micro_batch": 500}
ONE_RANK = {"plain": (1, 0, TRAINED_TOWER)}
DAILY = {f"plain-tp2-zero{stage}": (2, stage, {**TP, **TRAINED_TOWER}) for stage in range(4)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("cut")
    toys.write_base(folder / "base")
    return train_all(folder, write_data(folder), {**ONE_RANK, **DAILY})


@pytest.mark.parametrize("name", DAILY)
def test_losses_and_gradients_are_those_of_one_rank(runs, name):
    check_same(runs["plain"], runs[name])
