"""Ranks that share matrices: losses and gradients are those of one rank that has them whole."""

from pathlib import Path

import pytest
import toys
from extension_there import if_there, needs_extension
from known_flags import known_cases, needs
from launching import TRAIN, command_line, ds_config, launch, losses, run_many, toy_run
from safetensors.torch import load_file
from sharing import (
    OFFLOAD,
    STEPS,
    TOLERANCE,
    TORN,
    TRAINED_TOWER,
    check_same,
    relative_difference,
    rows,
    train_all,
    write_data,
)

pytestmark = pytest.mark.long  # test_meshes.py has a little of it for every day

TP = {"tensor_parallel_size": 2}
PACKED = {"tokens_per_micro_batch": 400}
CLIPPED = {"max_grad_norm": 0.05}
IN_JSON = {"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 2}}
FAMILIES = ("qwen2", "qwen3", "gemma2")  # biases; norms of heads; soft caps, and ends that are tied

# Name of a run: ranks, ZeRO stage and flags. Those of one rank are what the others are compared with.
ONE_RANK = {"plain": (1, 0, TRAINED_TOWER)}
FEW = {
    "plain-tp2": (2, 0, {**TP, **TRAINED_TOWER}),
    "plain-tp2-packed": (2, 3, {**TP, **PACKED, **TRAINED_TOWER}),
}
MORE_ONE_RANK = {
    "clipped": (1, 0, {**CLIPPED, **TRAINED_TOWER}),
    "torn": (1, 0, TORN),
    **{family: (1, 0, {}) for family in FAMILIES},
}
MORE = {
    **{f"plain-tp2-zero{stage}": (2, stage, {**TP, **TRAINED_TOWER}) for stage in (1, 2)},
    **{f"clipped-tp2-zero{stage}": (2, stage, {**TP, **CLIPPED, **TRAINED_TOWER}) for stage in range(4)},
    **{f"{family}-tp2-zero{stage}": (2, stage, TP) for family in FAMILIES for stage in (0, 3)},
    "qwen3-tp2-zero2": (2, 2, TP),
    "torn-tp2": (2, 2, {**TP, **PACKED, **TORN, "dataloader_num_workers": 1}),
    "plain-tp2-offload": (2, OFFLOAD, {**TP, **TRAINED_TOWER}),
    "plain-tp2-in-json": (2, IN_JSON, TRAINED_TOWER),
    "plain-tp2-tiled": (2, 3, {**TP, **TRAINED_TOWER, "mlp_tile_tokens": 100}),
    "plain-tp2-recomputed": (2, 3, {**TP, **TRAINED_TOWER, "gradient_checkpointing": True}),
    **{f"plain-2x2-zero{stage}": (4, stage, {**TP, **PACKED, **TRAINED_TOWER}) for stage in range(4)},
    **{
        f"plain-1x2x2-zero{stage}": (4, stage, {**TP, "sequence_parallel_size": 2, **TRAINED_TOWER})
        for stage in range(4)
    },
    "bf16": (1, 1, {"bf16": True}),
    "bf16-dp2": (2, 1, {"bf16": True, **PACKED}),
    "bf16-tp2": (2, 1, {**TP, "bf16": True}),
}
FEW, MORE = known_cases(FEW), known_cases(MORE)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("cut")
    toys.write_base(folder / "base")
    return train_all(folder, write_data(folder), {**ONE_RANK, **FEW})


@pytest.fixture(scope="module")
def more_runs(runs) -> dict[str, Path]:
    folder = runs["plain"].parent
    data = {
        name: {"data_path": str(folder / name / "data.json"), "image_folder": str(folder / name / "images")}
        for name in ("plain", "torn")
    }
    data |= dict.fromkeys(("clipped", "bf16"), data["plain"])
    for family in FAMILIES:
        data[family] = data["plain"] | toys.write_language_model(folder / "base" / family, family)
    wanted = MORE_ONE_RANK | MORE
    # A process has the groups of one mesh: those that share nothing have a launch of their own.
    cut = {name: run for name, run in wanted.items() if "tp2" in name or "x2" in name}
    whole = {name: run for name, run in wanted.items() if name not in cut}
    return runs | train_all(folder, data, whole) | train_all(folder, data, cut)


@pytest.mark.parametrize("name", FEW)
def test_losses_and_gradients_are_those_of_one_rank(runs, name):
    check_same(runs["plain"], runs[name])


@pytest.mark.parametrize("name", [name for name in MORE if "-" in name and not name.startswith("bf16")])
def test_losses_and_gradients_are_those_of_one_rank_on_any_mesh(more_runs, name):
    check_same(more_runs[name.split("-")[0]], more_runs[name])


def test_in_bf16_ranks_round_as_those_with_samples_of_their_own_do(more_runs):
    one, own, cut = (more_runs[name] for name in ("bf16", "bf16-dp2", "bf16-tp2"))
    assert 0 < relative_difference(one, cut) <= 2 * relative_difference(one, own)


def test_eval_loss_books_and_answers_are_those_of_one_rank(more_runs):
    one, cut = more_runs["torn"], more_runs["torn-tp2"]
    assert sum(row["broken_samples"] for row in rows(one)) > 1
    assert rows(one, "skipped.jsonl") == rows(cut, "skipped.jsonl")
    (whole,), (shared,) = (rows(path, "evals.jsonl") for path in (one, cut))
    assert shared["loss"] == pytest.approx(whole["loss"], rel=TOLERANCE) and whole.keys() == shared.keys()
    answers = [[row["answer"] for row in rows(path, "samples.jsonl")] for path in (one, cut)]
    assert answers[0] and answers[0] == answers[1]


@pytest.fixture(scope="module")
def guarded(runs) -> Path:
    """Output folders of runs with torch's AdamW, whose steps are judged by a norm over all parts."""
    folder = runs["plain"].parent
    data = {"data_path": str(folder / "plain/data.json"), "image_folder": str(folder / "plain/images")}
    base = {"model_name_or_path": str(folder / "base/llama"), "vision_tower": str(folder / "base/clip")}
    more = {"max_steps": STEPS, "train_batch_size": 8, "max_grad_norm": 0.5, "learning_rate": 1e-3} | if_there(
        "ema", enable_ema=True
    )
    for tp in (1, 2):
        todo = [
            toy_run(
                base | data,
                folder / f"adamw{tp}-{stage}-{bf16}",
                ds_config(stage),
                **more,
                tensor_parallel_size=tp,
                bf16=bf16,
                model_max_length=6000,
                **if_there("replicas", check_divergence_steps=2),
            )
            for stage in range(4)
            for bf16 in (False, True)
        ]
        run_many(2, folder / f"adamw-{tp}", todo)
    return folder


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("bf16", [False, True])
def test_the_norm_is_over_all_parts(guarded, stage, bf16):
    one, cut = (guarded / f"adamw{tp}-{stage}-{bf16}" for tp in (1, 2))
    norms = [[row["grad_norm"] for row in rows(path)] for path in (one, cut)]
    assert min(norms[0]) > 0.5  # so that it is clipped
    assert norms[1] == pytest.approx(norms[0], rel=0.02 if bf16 else 1e-5)
    assert losses(cut) == pytest.approx(losses(one), rel=0.01 if bf16 else 1e-5)


@needs_extension("ema")
@pytest.mark.parametrize("stage", range(4))
def test_the_averaged_weights_are_those_of_ranks_that_have_all(guarded, stage):
    one, cut = (load_file(guarded / f"adamw{tp}-{stage}-False/ema/model.safetensors") for tp in (1, 2))
    assert one.keys() == cut.keys()
    for name, weight in one.items():
        assert (weight - cut[name]).abs().max() <= 1e-5, name


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"tensor_parallel_size": 3}, "--tensor_parallel_size 3 does not divide 2 ranks: give one of 1, 2"),
        pytest.param(
            {**TP, "lora_enable": True},
            "--lora_enable True needs whole matrices on every rank",
            marks=needs("lora_enable"),
        ),
    ],
)
def test_what_does_not_go_is_refused(runs, flags, said):
    """The reasons are in test_tensor_parallel_flags.py."""
    folder = runs["plain"].parent
    data = {"data_path": str(folder / "plain/data.json"), "image_folder": str(folder / "plain/images")}
    base = {"model_name_or_path": str(folder / "base/llama"), "vision_tower": str(folder / "base/clip")}
    run = toy_run(base | data, folder / "refused", ds_config(2), **flags)
    done = launch(2, TRAIN, *command_line(run))
    assert done.returncode == 2 and said in done.stdout + done.stderr and "Traceback" not in done.stderr
