"""Ranks that have stages of a pipeline: losses and gradients are those of one rank that has all layers."""

from pathlib import Path

import pytest
import toys
from launching import TRAIN, command_line, ds_config, launch, losses, toy_run
from sharing import (
    STEPS,
    TOLERANCE,
    TRAINED_TOWER,
    check_same,
    relative_difference,
    rows,
    train_all,
    write_data,
)

PP = {"pipeline_parallel_size": 2}
PACKED = {"tokens_per_micro_batch": 400}
ONE_BY_ONE = {"per_device_train_batch_size": 1}

# Name of a run: ranks, ZeRO stage and flags. Those of one rank are what the others are compared with.
ONE_RANK = {"plain": (1, 0, TRAINED_TOWER)}
DAILY = {
    "plain-pp2": (2, 0, {**PP, **ONE_BY_ONE, **TRAINED_TOWER}),
    "plain-pp2-packed": (2, 1, {**PP, **PACKED, **TRAINED_TOWER}),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("stages")
    toys.write_base(folder / "base")
    return train_all(folder, write_data(folder), {**ONE_RANK, **DAILY})


@pytest.mark.parametrize("name", DAILY)
def test_losses_and_gradients_are_those_of_one_rank(runs, name):
    check_same(runs["plain"], runs[name])
