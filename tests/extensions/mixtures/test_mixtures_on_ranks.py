"""Mixtures of experts through the real launcher: the loss of routers, and the load of experts in the log."""

from pathlib import Path

import pytest
import toys
from known_flags import known_cases
from launching import ds_config, run_many, toy_run

from llava_ds.files.jsonl import read_metrics

STEPS = 3
LOSS = {"router_aux_loss_coef": 0.1}
RUNS = {
    "plain": (0, {}),
    **{f"zero{stage}": (stage, LOSS) for stage in range(4)},
    "recomputed": (3, {**LOSS, "gradient_checkpointing": True}),
    "compiled": (2, {**LOSS, "torch_compile": True, "torch_compile_backend": "aot_eager"}),
    "by_count": (2, {"per_device_train_batch_size": 1}),
    "by_count_with_loss": (2, {**LOSS, "per_device_train_batch_size": 1}),
}


RUNS = known_cases(RUNS)
DAILY = ("plain", "zero0", "zero3", "by_count")


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> dict[str, list[dict]]:
    """metrics.jsonl of the daily runs, of Qwen3-MoE on two ranks."""
    return train(tmp_path_factory.mktemp("daily"), 2, DAILY)


@pytest.fixture(scope="module", params=[1, 2])
def all_rows(request, tmp_path_factory) -> dict[str, list[dict]]:
    """The same of every run, on one rank or two."""
    return train(tmp_path_factory.mktemp(f"ranks{request.param}"), request.param, tuple(RUNS))


def train(folder: Path, num_ranks: int, names: tuple[str, ...]) -> dict[str, list[dict]]:
    given = toys.write_base(folder / "base", family="qwen3_moe") | toys.write_data(folder / "data", "itii" * 3)
    run_many(num_ranks, folder, [a_run(given, folder / name, *RUNS[name]) for name in names])
    return {name: read_metrics(folder / name / "run" / "metrics.jsonl") for name in names}


def a_run(given: dict[str, str], out: Path, stage: int, more: dict) -> dict:
    return toy_run(given, out, ds_config(stage), max_steps=STEPS, **more)


def differ(one: list[dict], other: list[dict]) -> float:
    assert len(one) == len(other) == STEPS
    names = ("loss", "grad_norm", "experts/aux_loss")
    return max(abs(a[name] - b[name]) / max(1, abs(a[name])) for a, b in zip(one, other) for name in names)


def test_the_loss_of_routers_trains_alike_at_zero_3(rows):
    assert differ(rows["zero0"], rows["zero3"]) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [name for name in RUNS if name not in ("plain", "zero0") and not name.startswith("by_")]
)
def test_the_loss_of_routers_trains_alike_in_every_way(all_rows, name):
    assert differ(all_rows["zero0"], all_rows[name]) < 1e-5


def check_routers_move(rows: dict[str, list[dict]]) -> None:
    plain, pushed = rows["plain"], rows["zero0"]
    assert plain[0]["loss"] == pytest.approx(pushed[0]["loss"], abs=1e-6)
    assert plain[0]["grad_norm"] != pytest.approx(pushed[0]["grad_norm"], abs=1e-6)
    assert pushed[-1]["experts/aux_loss"] < plain[-1]["experts/aux_loss"]


def check_layouts(rows: dict[str, list[dict]]) -> None:
    for a, b in zip(rows["plain"], rows["by_count"]):
        assert a["loss"] == pytest.approx(b["loss"], abs=2e-6)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)


def test_it_moves_the_routers_and_is_no_part_of_the_loss_that_is_logged(rows):
    check_routers_move(rows)


def test_without_it_the_layout_makes_no_difference(rows):
    check_layouts(rows)


def test_the_log_has_the_load(rows):
    for row in rows["zero3"]:
        assert 1 <= row["experts/max_over_mean"] <= 4 and 0 < row["experts/entropy"] <= 1


@pytest.mark.long
def test_with_it_the_layout_does(all_rows):
    check_routers_move(all_rows)
    check_layouts(all_rows)
    assert all_rows["by_count_with_loss"][0]["grad_norm"] != pytest.approx(all_rows["zero2"][0]["grad_norm"], rel=1e-5)
