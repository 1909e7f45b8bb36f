"""The same training at every ZeRO stage, on any number of ranks, in any layout, whatever the batches hold."""

from pathlib import Path

import pytest
import toys
from launching import ds_config, losses, run_many

from llava_ds.data.sampler import epoch_order

STEPS = 20
BATCH = 4


def flags_of(base: dict, data: dict, output_dir: Path, stage: int, **more: object) -> dict[str, object]:
    return {
        **base,
        **data,
        "deepspeed_config": ds_config(stage),
        "output_dir": output_dir,
        "cache_dir": output_dir.parent / "cache",
        "model_max_length": 512,
        "train_batch_size": BATCH,
        "learning_rate": 2e-3,
        "mm_projector_lr": 1e-3,
        "warmup_ratio": 0.1,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "max_steps": STEPS,
        "save_strategy": "no",
        **more,
    }


def kinds_for(steps: list[str]) -> str:
    """The kinds of all records in file order, for which the shuffled order shows the given batches in turn."""
    wanted = "".join(steps)
    kinds = [""] * len(wanted)
    for position, index in enumerate(epoch_order(len(wanted), seed=42, epoch=0)):
        kinds[index] = wanted[position]
    return "".join(kinds)


# Micro-batches of two samples go to the ranks in turn: what the first and the second rank see, step by step.
PATTERNS = {
    "mixed": ["itit", "iiti", "ttii", "itti", "iiii"] * 4,
    "all_text": ["tttt"] * STEPS,
    "one_rank_text": ["iitt"] * STEPS,
    "alternating": ["iitt", "ttii"] * (STEPS // 2),
}


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> dict[tuple[str, int, int], Path]:
    """Output folders by (pattern or layout, ZeRO stage, ranks), all trained from the same weights."""
    folder = tmp_path_factory.mktemp("stages")
    base = toys.write_base(folder / "base")
    data = {name: toys.write_data(folder / name, kinds_for(pattern)) for name, pattern in PATTERNS.items()}
    outputs: dict[tuple[str, int, int], Path] = {}
    for ranks in (1, 2):
        todo = []
        for stage in (0, 1, 2, 3):
            for name in PATTERNS if stage == 3 else ("mixed",):
                out = outputs[name, stage, ranks] = folder / f"{name}-{stage}-{ranks}"
                todo.append(flags_of(base, data[name], out, stage))
        for layout, stage, more in (
            ("accumulated", 2, {"per_device_train_batch_size": 1}),
            ("by_tokens", 3, {"tokens_per_micro_batch": 90}),
            ("recomputed", 3, {"gradient_checkpointing": True}),
            ("bf16", 1, {"bf16": True}),
            ("bf16", 3, {"bf16": True}),
        ):
            out = outputs[layout, stage, ranks] = folder / f"{layout}-{stage}-{ranks}"
            todo.append(flags_of(base, data["mixed"], out, stage, **more))
        run_many(ranks, folder / f"launch-{ranks}", todo)
    return outputs


def largest_difference(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other) == STEPS
    return max(abs(a - b) for a, b in zip(one, other))


def test_training_moves_the_loss(runs):
    curve = losses(runs["mixed", 0, 1])
    assert curve[-1] < curve[0] - 0.5


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_gives_the_same_curve(runs, stage, ranks):
    assert largest_difference(losses(runs["mixed", 0, 1]), losses(runs["mixed", stage, ranks])) < 1e-5


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("layout", "stage"), [("accumulated", 2), ("by_tokens", 3), ("recomputed", 3)])
def test_the_layout_changes_nothing(runs, layout, stage, ranks):
    assert largest_difference(losses(runs["mixed", 0, 1]), losses(runs[layout, stage, ranks])) < 1e-5


@pytest.mark.parametrize("ranks", [1, 2])
def test_bf16_follows_fp32_and_every_stage_follows_the_other(runs, ranks):
    reference = losses(runs["mixed", 0, 1])
    sharded, whole = losses(runs["bf16", 3, ranks]), losses(runs["bf16", 1, ranks])
    assert 1e-5 < largest_difference(reference, whole) < 0.1  # it is another precision, and the same training
    assert largest_difference(sharded, whole) < 0.05


@pytest.mark.parametrize("pattern", ["all_text", "one_rank_text", "alternating"])
def test_ranks_without_pictures_do_not_hang_and_learn_the_same(runs, pattern):
    assert largest_difference(losses(runs[pattern, 3, 1]), losses(runs[pattern, 3, 2])) < 1e-5
