"""--enable_ema: the exported average is that of the weights after every step, at any ZeRO stage, resumed or not."""

import json
import shutil
from pathlib import Path

import pytest
import toys
from launching import ds_config, run_many, toy_run
from safetensors.torch import load_file

STEPS, SAVED, DECAY = 4, 2, 0.6
FLAGS = {
    "max_steps": STEPS,
    "enable_ema": True,
    "ema_decay": DECAY,
    "save_strategy": "steps",
    "save_steps": SAVED,
    "check_export": "off",
    "report_to": "none",
}
PLACES = {"zero0": (2, 0), "zero1": (2, 1), "zero2": (2, 2), "zero3": (2, 3), "alone": (1, 2)}
OTHERS = ("SGD", "Muon", "Adafactor")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Folders of runs on two ranks and one, of each resumed at its middle, some elsewhere, and of two that leave
    the weights after every step."""
    folder = tmp_path_factory.mktemp("averages")
    given = {**toys.write_base(folder / "base"), **toys.write_data(folder / "data", "iitiitii")}

    def start(ranks: int, name: str, todo: dict[str, int], **more: object) -> None:
        runs = [toy_run(given, folder / one, ds_config(stage), **FLAGS | more) for one, stage in todo.items()]
        run_many(ranks, folder / f"launch-{name}", runs)

    for ranks in (1, 2):
        whole = {name: stage for name, (number, stage) in PLACES.items() if number == ranks}
        start(ranks, f"whole-{ranks}", whole)
    # On as many ranks as the averages: Adam amplifies the rounding of gradients that are nearly zero.
    for ranks in (1, 2):
        start(ranks, f"every-{ranks}", {f"every-{ranks}": 2}, save_only_model=True, save_steps=1)
    for stage in (1, 3):
        for name in OTHERS:
            config = json.loads(Path(ds_config(stage)).read_text()) | {"zero_allow_untested_optimizer": True}
            config["optimizer"] = {"type": name, "params": {"lr": "auto"}}
            config["zero_optimization"]["reduce_scatter"] = False
            (folder / f"{name}-{stage}.json").write_text(json.dumps(config))
            todo = toy_run(given, folder / f"{name}-{stage}", folder / f"{name}-{stage}.json", **FLAGS)
            run_many(2, folder / f"launch-{name}-{stage}", [todo])
    moves = {"zero2-again": "zero2", "zero3-again": "zero3", "from-alone": "alone"}
    for to, came_from in moves.items():
        shutil.copytree(folder / came_from / f"checkpoint-{SAVED}", folder / to / f"checkpoint-{SAVED}")
    start(2, "again", {"zero2-again": 2, "zero3-again": 3, "from-alone": 3})
    return folder


def averages(folder: Path, name: str) -> dict:
    return load_file(folder / name / "ema" / "model.safetensors")


@pytest.mark.long
@pytest.mark.parametrize("name", PLACES)
def test_the_average_is_the_textbooks(runs, name):
    every = runs / f"every-{PLACES[name][0]}"
    weights = [load_file(every / f"checkpoint-{step}" / "model.safetensors") for step in range(1, STEPS + 1)]
    found, moved = averages(runs, name), 0.0
    assert found.keys() == weights[-1].keys()
    for key, value in found.items():
        expected = weights[0][key].double()
        for after in weights[1:]:
            expected = DECAY * expected + (1 - DECAY) * after[key].double()
        assert (value - expected).abs().max() < 2e-6, key
        moved = max(moved, (value - weights[-1][key]).abs().max().item())
    assert moved > 3e-4


@pytest.mark.long
@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_a_resumed_run_has_the_same_average(runs, name):
    found, expected = averages(runs, f"{name}-again"), averages(runs, name)
    assert all((found[key] == expected[key]).all() for key in expected)


@pytest.mark.long
def test_the_average_moves_to_other_ranks_and_stages(runs):
    found, expected = averages(runs, "from-alone"), averages(runs, "alone")
    assert all((found[key] - expected[key]).abs().max() < 2e-6 for key in expected)


@pytest.mark.long
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", OTHERS)
def test_averages_beside_other_optimizers(runs, name, stage):
    found, last = averages(runs, f"{name}-{stage}"), load_file(runs / f"{name}-{stage}" / "model.safetensors")
    assert 0 < max((found[key] - last[key]).abs().max() for key in last) < 0.1


@pytest.mark.long
def test_the_model_itself_is_exported_as_ever(runs):
    last = load_file(runs / "every-2" / f"checkpoint-{STEPS}" / "model.safetensors")
    found = load_file(runs / "zero2" / "model.safetensors")
    assert all((found[key] - last[key]).abs().max() < 2e-6 for key in last)
