"""The parts that flags let train are those that change, alike at ZeRO-0 on one rank and partitioned over two."""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import toys
from launching import ds_config, losses, run_many, toy_run
from safetensors.torch import load_file

STEPS = 6
KINDS = "iittttiitiit" * 2  # with two samples a rank, ranks with text only
CASES = {
    "everything": {"unfreeze_mm_vision_tower": True, "mm_vision_tower_lr": 5e-4},
    "tower_and_projector": {"mm_tunable_parts": "mm_vision_tower,mm_mlp_adapter"},
    "no_projector": {"freeze_mm_mlp_adapter": True, "mm_projector_lr": None},
    "output_layer": {"freeze_backbone": True, "gradient_checkpointing": True},
    "tower_recomputed": {
        "mm_tunable_parts": "mm_vision_tower",
        "mm_projector_lr": None,
        "gradient_checkpointing": True,
    },
}
PARTS = ("vision_tower", "multi_modal_projector", "language_model.model", "language_model.lm_head")
TRAINED = {
    "everything": set(PARTS),
    "tower_and_projector": {"vision_tower", "multi_modal_projector"},
    "no_projector": {"language_model.model", "language_model.lm_head"},
    "output_layer": {"multi_modal_projector", "language_model.lm_head"},
    "tower_recomputed": {"vision_tower"},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[tuple[str, int], Path]:
    return trained(tmp_path_factory.mktemp("what_trains"), CASES)


def trained(folder: Path, cases: Iterable[str]) -> dict[tuple[str, int], Path]:
    """Output folders by (case, ranks): ZeRO-0 on one, ZeRO-3 on two; and one that learns nothing, as it started."""
    given = toys.write_base(folder / "base") | toys.write_data(folder / "data", KINDS)
    outputs = {(case, ranks): folder / f"{case}-{ranks}" for case in cases for ranks in (1, 2)}
    outputs["start", 1] = folder / "start"
    for ranks, stage in ((1, 0), (2, 3)):
        todo = [
            {
                name: value
                for name, value in toy_run(
                    given, outputs[case, ranks], ds_config(stage), max_steps=STEPS, weight_decay=0.1, **more
                ).items()
                if value is not None
            }
            for case in cases
            for more in (CASES[case],)
        ]
        if ranks == 1:
            still = {"max_steps": 1, "learning_rate": 0.0, "mm_projector_lr": 0.0}
            todo.append(toy_run(given, outputs["start", 1], ds_config(0), **still))
        run_many(ranks, folder / f"launch-{ranks}", todo)
    return outputs


def check(runs: dict[tuple[str, int], Path], case: str) -> None:
    """Partitioned over two ranks it is the same training, and what trains changes and nothing else."""
    one, two = losses(runs[case, 1]), losses(runs[case, 2])
    assert len(one) == STEPS and max(abs(a - b) for a, b in zip(one, two)) < 1e-5

    before = load_file(runs["start", 1] / "model.safetensors")
    for ranks in (1, 2):
        moved = {part: 0 for part in PARTS}
        for name, tensor in load_file(runs[case, ranks] / "model.safetensors").items():
            moved[next(part for part in PARTS if name.startswith(part))] += not torch.equal(tensor, before[name])
        assert {part for part, count in moved.items() if count} == TRAINED[case]


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_what_trains(runs, case):
    check(runs, case)
