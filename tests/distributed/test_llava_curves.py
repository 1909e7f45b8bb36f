"""Training gives the curves of LLaVA's own trainer: every step's loss, gradient norm and learning rates.

See ../model/goldens/README.md for where the numbers come from.
"""

import itertools
import json
from pathlib import Path

import like_llava
import pytest
from known_flags import known
from launching import ds_config, run_many

CURVES = json.loads((Path(__file__).parent / "goldens" / "curves.json").read_text())
CURVES = {name: curve for name, curve in CURVES.items() if known(curve["flags"])}
# One of each kind of setting, several of them in one run where that shows as much.
EVERY_KIND = [
    name for name in ("adapter", "halves", "uneven", "random_epochs", "frozen", "next", "lora") if name in CURVES
]
# With micro-batches of two samples, two a step: on one rank or on two.
ON_TWO_RANKS = ["halves", "halves_adapter"]
LOSS, NORM = 5e-6, 5e-6  # absolute, relative
RATE = 5e-7  # relative: seven digits are logged


def flags_of(name: str, base: dict, folder: Path, stage: int, ranks: int) -> dict[str, object]:
    """The run that LLaVA's trainer did."""
    curve = CURVES[name]
    records = like_llava.records(curve["data"])[: curve["records"]]
    flags = {"pretrain_mm_mlp_adapter": "mm_projector.safetensors", **curve["flags"]}
    for starts_from in {"pretrain_mm_mlp_adapter", "lora_weight_path"} & set(flags):
        flags[starts_from] = like_llava.GOLDENS / flags[starts_from]
    accumulated = curve["flags"].get("gradient_accumulation_steps", 1)
    return {
        **base,
        "per_device_train_batch_size": 4,
        "learning_rate": 2e-3,
        "warmup_ratio": 0.1,
        "loss_reduction": "micro_batch",
        "shuffle": False,
        "save_strategy": "no",
        **flags,
        "gradient_accumulation_steps": accumulated // ranks if name in ON_TWO_RANKS else accumulated,
        "data_path": like_llava.write_records(folder / f"{name}.json", records),
        "cache_dir": folder / "cache",
        "deepspeed_config": ds_config(stage),
        "output_dir": folder / f"{name}-{stage}-{ranks}",
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """trained(names, stage, ranks) -> output folders by name, from one launch."""
    folder = tmp_path_factory.mktemp("curves")
    base = like_llava.write_base(folder)

    def launched(names: list[str], stage: int, ranks: int) -> dict[str, Path]:
        runs = {name: flags_of(name, base, folder, stage, ranks) for name in names}
        run_many(ranks, folder / f"launch-{stage}-{ranks}", list(runs.values()))
        return {name: flags["output_dir"] for name, flags in runs.items()}

    return launched


def compare(name: str, output_dir: Path) -> None:
    curve = CURVES[name]
    rows = [json.loads(line) for line in (output_dir / "run" / "metrics.jsonl").read_text().splitlines()]
    size = len(curve["losses"]) // len(rows)  # micro-batches of a step
    steps = [slice(first, first + size) for first in range(0, len(curve["losses"]), size)]
    assert len(rows) == len(steps) and len(rows) >= 6
    # Rows hold them by rank; LLaVA on one rank did every micro-batch of a step in turn.
    ours = [mean for row in rows for means in zip(*row["micro_batch_losses"]) for mean in means]
    assert ours == pytest.approx(curve["losses"], rel=0, abs=LOSS), name
    losses = [sum(curve["losses"][step]) / size for step in steps]
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=0, abs=LOSS), name
    assert [row["supervised_tokens"] for row in rows] == [sum(curve["targets"][step]) for step in steps], name
    last = [step.stop - 1 for step in steps]
    for row, i in zip(rows, last):
        assert sorted(set(row["lr"]), reverse=True) == pytest.approx(curve["lr"][i], rel=RATE), name
        if row["grad_norm"] is not None:  # the engine gives none at stage 0
            assert row["grad_norm"] == pytest.approx(curve["gradient_norms"][i], rel=NORM), name


@pytest.mark.long
def test_training_gives_llavas_curves(trained):
    for name, output_dir in trained(EVERY_KIND, 2, 1).items():
        compare(name, output_dir)


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_gives_llavas_curves(trained, stage):
    for name, output_dir in trained(list(CURVES), stage, 1).items():
        compare(name, output_dir)


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_give_llavas_curves(trained, stage):
    for name, output_dir in trained(ON_TWO_RANKS, stage, 2).items():
        compare(name, output_dir)


def test_every_setting_shows_in_its_curve():
    """A run that ignored one of them would not pass as another."""
    settings = {
        name: (json.dumps([curve["flags"], curve["data"], curve["records"]]), curve["losses"])
        for name, curve in CURVES.items()
    }
    for (one, (flags, losses)), (other, (others, theirs)) in itertools.combinations(settings.items(), 2):
        assert flags != others, (one, other)
        furthest = max(abs(a - b) for a, b in zip(losses, theirs))
        assert furthest > 50 * LOSS, (one, other)
