"""A run that goes on with other ranks, at another ZeRO stage, or both: the same samples in the same order, the same
model but for rounding, every group's rates, and frozen weights as they were."""

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
import toys
from checkpoints import break_off
from launching import ds_config, run_many
from safetensors.torch import load_file

STEPS, SAVED = 6, 3
STAGES, SIZES = (0, 1, 2, 3), (1, 2, 4)
# Every ordered pair of sizes with every stage before, and the stage after it as well as stage 3 or 0; at two ranks
# every ordered pair of stages.
MOVES = [
    (size, stage, other, after)
    for size, other in itertools.permutations(SIZES, 2)
    for stage in STAGES
    for after in sorted({(stage + 1) % 4, 3 if stage != 3 else 2})
] + [(2, stage, 2, after) for stage, after in itertools.permutations(STAGES, 2)]
PRECISIONS = ("fp32", "bf16")
pytestmark = pytest.mark.faults


def name_of(move) -> str:
    size, stage, other, after = move
    return f"{size}-zero{stage}-to-{other}-zero{after}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sizes")
    base = toys.write_base(folder / "base")
    data = toys.write_data(folder / "data", "iitiitittiitiitii")
    flags = {
        **base,
        **data,
        "cache_dir": folder / "cache",
        "model_max_length": 512,
        "learning_rate": 2e-3,
        "mm_projector_lr": 1e-3,
        "weight_decay": 0.1,
        "warmup_ratio": 0.3,
        "max_grad_norm": 1.0,
        "max_steps": STEPS,
        "save_steps": SAVED,
    }
    kinds = {"fp32": {}, "bf16": {"bf16": True}}
    for size in SIZES:
        runs = [
            {
                **flags,
                **kinds[precision],
                "per_device_train_batch_size": 4 // size,
                "gradient_accumulation_steps": 2,
                "deepspeed_config": ds_config(stage),
                "output_dir": folder / precision / f"{size}-zero{stage}",
            }
            for stage in STAGES
            for precision in PRECISIONS
        ]
        run_many(size, folder / f"launch-{size}", runs, timeout_s=1800)
    for size in SIZES:
        runs = []
        for move in (move for move in MOVES if move[2] == size):
            for precision in PRECISIONS:
                whole = folder / precision / f"{move[0]}-zero{move[1]}"
                runs.append(
                    {
                        **flags,
                        **kinds[precision],
                        "per_device_train_batch_size": 8,
                        "deepspeed_config": ds_config(move[3]),
                        "output_dir": break_off(whole, folder / precision / name_of(move), SAVED),
                    }
                )
        said = run_many(size, folder / f"launch-to-{size}", runs, timeout_s=1800)
        assert said.count("cut anew") == len(runs)
    yield folder
    shutil.rmtree(folder)


def compared(folder: Path, precision: str, move) -> tuple[dict, dict, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    whole, moved = (folder / precision / name for name in (f"{move[0]}-zero{move[1]}", name_of(move)))
    rows = [[json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()] for path in (whole, moved)]
    return *rows, *(load_file(path / "model.safetensors") for path in (whole, moved))


@pytest.mark.parametrize("move", MOVES, ids=name_of)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_run_goes_on_as_if_nothing_had_changed(folder, precision, move):
    before, after, expected, found = compared(folder, precision, move)
    assert [row["step"] for row in after] == list(range(1, STEPS + 1))
    for name in ("lr", "samples", "tokens", "supervised_tokens"):
        assert [row[name] for row in after] == [row[name] for row in before]
    assert len(before[0]["lr"]) > 2 and len(set(before[-1]["lr"])) > 1  # groups with rates of their own
    worst = max(abs(a["loss"] - b["loss"]) for a, b in zip(before, after))
    assert worst <= (1e-6 if precision == "fp32" else 2e-2), worst
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        if name.startswith("vision_tower."):
            assert torch.equal(weight, found[name]), name  # frozen
        else:
            difference = (weight.float() - found[name].float()).abs().max()
            assert difference <= (1e-5 if precision == "fp32" else 2e-2), (name, difference)
