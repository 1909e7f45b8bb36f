"""Ready models whose ranks share the tokens of every sample: losses, gradients and exports are those of one rank."""

import json
from pathlib import Path

import pytest
import ready_models
import toys
from extension_there import needs_extension
from known_flags import known_cases
from launching import ds_config, run_many, tight_config, toy_run
from sharing import rows, sgd, weights_of
from textbook_pairs import write_pairs

pytestmark = needs_extension("sequence_parallel")

QUICK = "qwen2_5_vl"
STEPS, BATCH, RATE = 3, 4, 0.02
FIRST, LATER = 1e-6, 2e-5  # relative differences of the first step, whose weights are equal, and of those that follow
KINDS, WITH_VIDEO = "itiititt", "itivtitt"
MAX_PIXELS = 2048  # of Qwen-VL's images
SHARED = {"sequence_parallel_size": 2}
EVERYTHING = {"tune_mm_vision": True, "tune_mm_mlp": True, "tune_mm_llm": True}
# Flags of a run on one rank, and of those that it is compared with: the ZeRO stage and further flags.
CASES = known_cases({
    "plain": (
        {
            "zero2": (2, {}),
            "zero2-recomputed": (2, {"gradient_checkpointing": "all"}),
            "zero3": (3, {"tokens_per_micro_batch": 150}),
        },
        EVERYTHING,
    ),
    "lora": ({"zero3": (3, {})}, {"lora_enable": True, "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0}),
    "dpo": ({"zero2": (2, {})}, {"objective": "dpo", "beta": 0.3, **EVERYTHING}),
})  # fmt: skip


def train(folder: Path, family: str, cases: list[str]) -> None:
    """Runs CASE-alone on one rank, and CASE-STAGE on two that share samples."""
    tied = {"tie_word_embeddings": family in ("qwen2_5_vl", "gemma3")}
    has_videos = family in ready_models.WITH_VIDEOS
    base = ready_models.write_ready(folder / "base", family, **tied)
    talks = toys.write_data(folder / "data", WITH_VIDEO if has_videos else KINDS)
    pairs = write_pairs(folder / "pairs", 8)
    bounds = {"video_fps": 2} if has_videos else {}
    if family in ready_models.QWEN_PROCESSORS:
        bounds |= {"max_pixels": MAX_PIXELS}

    def run(case: str, name: str, stage: int, **more: object) -> dict[str, object]:
        config = json.loads(Path(tight_config(folder) if stage == 3 else ds_config(stage)).read_text())
        flags = toy_run(
            base | (pairs if case == "dpo" else talks), folder / f"{case}-{name}", sgd(folder, config),
            max_steps=STEPS, train_batch_size=BATCH, per_device_train_batch_size=BATCH, learning_rate=RATE,
            lr_scheduler_type="constant", shuffle=False, **bounds, **CASES[case][1], **more,
        )  # fmt: skip
        return {name: value for name, value in flags.items() if name != "mm_projector_lr"}

    run_many(1, folder / "one", [run(case, "alone", 2) for case in cases])
    shared = [
        run(case, name, stage, **SHARED, **more) for case in cases for name, (stage, more) in CASES[case][0].items()
    ]
    run_many(2, folder / "two", shared)


def check(folder: Path, cases: list[str]) -> None:
    for case in cases:
        alone = folder / f"{case}-alone"
        for name in CASES[case][0]:
            shared = folder / f"{case}-{name}"
            for step, (one, two) in enumerate(zip(rows(alone), rows(shared), strict=True)):
                for key in ("loss", "grad_norm"):
                    allowed = LATER if step else FIRST
                    assert two[key] == pytest.approx(one[key], rel=allowed, abs=0), (case, name, step, key)
                assert all(one[key] == two[key] for key in ("samples", "tokens", "supervised_tokens"))
            expected, found = weights_of(alone), weights_of(shared)
            assert expected.keys() == found.keys()
            for key, weight in expected.items():
                # An SGD step moves a weight by its gradient: all of them together by at most the sum of their norms.
                moved = RATE * sum(row["grad_norm"] for row in rows(alone))
                assert (weight - found[key]).abs().max() <= LATER * moved + FIRST * weight.abs().max(), (
                    case,
                    name,
                    key,
                )


def test_tokens_of_a_ready_model_are_shared(tmp_path):
    train(tmp_path, QUICK, ["plain"])
    check(tmp_path, ["plain"])


@pytest.mark.long
@pytest.mark.parametrize("family", ready_models.FAMILIES)
def test_tokens_of_every_family_are_shared(family, tmp_path):
    """Of texts, images and videos, with a trained tower, LoRA and preferences."""
    train(tmp_path, family, list(CASES))
    check(tmp_path, list(CASES))
