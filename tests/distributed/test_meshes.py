"""Every axis on two ranks, a little of each: losses and gradients are those of one rank that has all of it.

The whole of it is in the tests of each axis.
"""

from pathlib import Path

import pytest
import toys
from extension_there import needs_extension
from known_flags import known_cases
from launching import losses
from sharing import LONG, TOLERANCE, TORN, TRAINED_TOWER, check_same, rows, train_all, write_data

SP, TP, PP = ({f"{axis}_parallel_size": 2} for axis in ("sequence", "tensor", "pipeline"))
PACKED = {"tokens_per_micro_batch": 250}  # of each rank

# Name of a run: ranks, ZeRO stage and flags. Those of one rank are what the others are compared with.
RUNS = {
    "plain": (1, 0, TRAINED_TOWER),
    "torn": (1, 0, TORN),
    "weighed": (1, 0, TORN),
    # Before tensor parallelism, of which DeepSpeed keeps something in a process.
    "weighed-dp2": (2, 2, {**PACKED, **TORN}),
    "weighed-sp2": (2, 1, {**SP, **PACKED, **TORN}),
    "plain-sp2": (2, 0, {**SP, **TRAINED_TOWER}),
    "torn-sp2": (2, 2, {**SP, **PACKED, **TORN, "dataloader_num_workers": 1}),
    "plain-tp2": (2, 3, {**TP, **PACKED, **TRAINED_TOWER}),
    "plain-pp2": (2, 1, {**PP, **PACKED, **TRAINED_TOWER}),
    "weighed-pp2": (2, 1, {**PP, **PACKED, **TORN}),
}
RUNS = known_cases(RUNS)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("meshes")
    toys.write_base(folder / "base")
    return train_all(folder, write_data(folder), RUNS)


@pytest.mark.parametrize("name", [name for name in RUNS if name.startswith("plain-")])
def test_losses_and_gradients_are_those_of_one_rank(runs, name):
    check_same(runs["plain"], runs[name])


def test_the_trained_data_hold_a_long_sample_and_packs_are_cut(runs):
    assert max(row["tokens"] for row in rows(runs["plain"])) > LONG


@needs_extension("sequence_parallel")
def test_a_sample_that_one_rank_cannot_decode_is_left_out_on_all(runs):
    one, shared = runs["torn"], runs["torn-sp2"]
    assert sum(row["broken_samples"] for row in rows(one)) > 1
    for key in ("samples", "tokens", "supervised_tokens", "broken_samples"):
        assert [row[key] for row in rows(one)] == [row[key] for row in rows(shared)], key
    assert max(abs(a - b) for a, b in zip(losses(one), losses(shared), strict=True)) <= TOLERANCE
    assert rows(one, "skipped.jsonl") == rows(shared, "skipped.jsonl")


@pytest.mark.parametrize("axis", [axis for axis in ("dp", "sp", "pp") if f"weighed-{axis}2" in RUNS])
def test_weighed_answers_train_as_on_one_rank(runs, axis):
    """Packed or not, and with samples left out whose images are torn."""
    one, shared = runs["weighed"], runs[f"weighed-{axis}2"]
    check_same(one, shared)
    assert sum(row["broken_samples"] for row in rows(one)) > 1
    (wanted,), (found,) = (rows(run, "evals.jsonl") for run in (one, shared))
    assert found["loss"] == pytest.approx(wanted["loss"], rel=TOLERANCE)


def test_weighed_answers_train_otherwise_than_others(runs):
    assert abs(losses(runs["weighed"])[0] - losses(runs["torn"])[0]) > 0.05


@needs_extension("sequence_parallel")
def test_the_eval_loss_is_that_of_one_rank(runs):
    (one,), (shared,) = ([row for row in rows(runs[name], "evals.jsonl")] for name in ("torn", "torn-sp2"))
    assert shared["loss"] == pytest.approx(one["loss"], rel=TOLERANCE)
    assert one.keys() == shared.keys()


@needs_extension("sequence_parallel")
@needs_extension("samples")
def test_sample_questions_are_answered_alike(runs):
    one, shared = (rows(runs[name], "samples.jsonl") for name in ("torn", "torn-sp2"))
    assert one and [row["answer"] for row in one] == [row["answer"] for row in shared]
