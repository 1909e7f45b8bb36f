"""Ranks that have stages of a pipeline: losses and gradients are those of one rank that has all layers."""

from pathlib import Path

import pytest
import toys
from extension_there import if_there, needs_extension
from known_flags import known_cases
from launching import TRAIN, command_line, ds_config, launch, losses, run_many, toy_run
from safetensors.torch import load_file
from sharing import (
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

PP = {"pipeline_parallel_size": 2}
PACKED = {"tokens_per_micro_batch": 400}
ONE_BY_ONE = {"per_device_train_batch_size": 1}
CLIPPED = {"max_grad_norm": 0.05}
IN_JSON = {"zero_optimization": {"stage": 1}, "pipeline": {"stages": 2}}
IN_CPU = {"zero_optimization": {"stage": 1}, "activation_checkpointing": {"cpu_checkpointing": True}}
PP4 = {"pipeline_parallel_size": 4}
FAMILIES = (
    "qwen3",
    "mistral",
    "qwen2_5",
    "qwen2",
)  # norms of heads; windows; windows in some of three layers; ends tied

# Name of a run: ranks, ZeRO stage and flags. Those of one rank are what the others are compared with.
ONE_RANK = {"plain": (1, 0, TRAINED_TOWER)}
FEW = {
    "plain-pp2": (2, 0, {**PP, **ONE_BY_ONE, **TRAINED_TOWER}),
    "plain-pp2-packed": (2, 1, {**PP, **PACKED, **TRAINED_TOWER}),
}
MORE_ONE_RANK = {
    "clipped": (1, 0, {**CLIPPED, **TRAINED_TOWER}),
    "frozen": (1, 0, {}),
    "video": (1, 0, TRAINED_TOWER),
    "torn": (1, 0, TORN),
    "deep": (1, 0, TRAINED_TOWER),  # five layers
    "tied": (1, 0, TRAINED_TOWER),  # five layers, and an output layer that is the embedding
    **{family: (1, 0, ONE_BY_ONE) for family in FAMILIES},
}
MORE = {
    **{f"deep-pp4-zero{stage}": (4, stage, {**PACKED, **TRAINED_TOWER, **PP4}) for stage in (0, 1)},
    "deep-pp4-one-by-one": (4, 1, {**ONE_BY_ONE, **TRAINED_TOWER, **PP4}),
    "tied-pp4": (4, 1, {**PACKED, **TRAINED_TOWER, **PP4}),
    **{f"tied-pp2xdp2-zero{stage}": (4, stage, {**PP, **PACKED, **TRAINED_TOWER}) for stage in (0, 1)},
    "plain-pp2-inputs-in-cpu": (2, IN_CPU, {**PP, **PACKED, **TRAINED_TOWER, "gradient_checkpointing": True}),
    "plain-pp2-one-pack": (2, 1, {**PP, **TRAINED_TOWER}),  # fewer micro-batches than stages
    **{f"clipped-pp2-zero{stage}": (2, stage, {**PP, **PACKED, **CLIPPED, **TRAINED_TOWER}) for stage in (0, 1)},
    **{f"frozen-pp2-zero{stage}": (2, stage, {**PP, **PACKED}) for stage in (0, 1)},
    **{f"video-pp2-zero{stage}": (2, stage, {**PP, **PACKED, **TRAINED_TOWER}) for stage in (0, 1)},
    **{f"{family}-pp2": (2, 1, {**PP, **ONE_BY_ONE}) for family in FAMILIES},
    "torn-pp2": (2, 1, {**PP, **PACKED, **TORN, "dataloader_num_workers": 1}),
    "plain-pp2-in-json": (2, IN_JSON, {**PACKED, **TRAINED_TOWER}),
    "plain-pp2-tiled": (2, 0, {**PP, **PACKED, **TRAINED_TOWER, "mlp_tile_tokens": 100}),
    "plain-pp2-recomputed": (2, 1, {**PP, **PACKED, **TRAINED_TOWER, "gradient_checkpointing": True}),
    **{f"plain-pp2xdp2-zero{stage}": (4, stage, {**PP, **PACKED, **TRAINED_TOWER}) for stage in (0, 1)},
    **{
        f"plain-pp2xsp2-zero{stage}": (4, stage, {**PP, **PACKED, "sequence_parallel_size": 2, **TRAINED_TOWER})
        for stage in (0, 1)
    },
    "torn-pp2xsp2": (4, 1, {**PP, **PACKED, **TORN, "sequence_parallel_size": 2}),
    "bf16": (1, 1, {"bf16": True}),
    "bf16-dp2": (2, 1, {"bf16": True, **PACKED}),
    **{f"bf16-pp2-zero{stage}": (2, stage, {**PP, "bf16": True}) for stage in (0, 1)},
}
FEW, MORE = known_cases(FEW), known_cases(MORE)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("stages")
    toys.write_base(folder / "base")
    return train_all(folder, write_data(folder), {**ONE_RANK, **FEW})


@pytest.fixture(scope="module")
def more_runs(runs) -> dict[str, Path]:
    folder = runs["plain"].parent
    data = {
        name: {"data_path": str(folder / name / "data.json"), "image_folder": str(folder / name / "images")}
        for name in ("plain", "video", "torn")
    }
    data |= dict.fromkeys(("clipped", "frozen", "bf16"), data["plain"])
    for family in FAMILIES:
        data[family] = data["plain"] | toys.write_language_model(folder / "base" / family, family)
    data["deep"] = data["plain"] | toys.write_language_model(folder / "base/deep", num_hidden_layers=5)
    data["tied"] = data["plain"] | toys.write_language_model(folder / "base/tied", "qwen2", num_hidden_layers=5)
    wanted = MORE_ONE_RANK | MORE
    # A process has the groups of one mesh: those that share nothing have a launch of their own.
    staged = {name: run for name, run in wanted.items() if "-pp" in name}
    whole = {name: run for name, run in wanted.items() if name not in staged}
    return runs | train_all(folder, data, whole) | train_all(folder, data, staged)


@pytest.mark.parametrize("name", FEW)
def test_losses_and_gradients_are_those_of_one_rank(runs, name):
    check_same(runs["plain"], runs[name])


@pytest.mark.parametrize("name", [name for name in MORE if "-" in name and not name.startswith("bf16")])
def test_losses_and_gradients_are_those_of_one_rank_on_any_mesh(more_runs, name):
    check_same(more_runs[name.split("-")[0]], more_runs[name])


@pytest.mark.parametrize("stage", (0, 1))
def test_in_bf16_stages_round_as_ranks_with_samples_of_their_own_do(more_runs, stage):
    one, own, staged = (more_runs[name] for name in ("bf16", "bf16-dp2", f"bf16-pp2-zero{stage}"))
    assert relative_difference(one, staged) <= 2 * relative_difference(one, own)


@pytest.mark.parametrize("name", ("torn-pp2", "torn-pp2xsp2"))
def test_eval_loss_books_and_answers_are_those_of_one_rank(more_runs, name):
    one, staged = more_runs["torn"], more_runs[name]
    assert sum(row["broken_samples"] for row in rows(one)) > 1
    assert rows(one, "skipped.jsonl") == rows(staged, "skipped.jsonl")
    (whole,), (shared,) = (rows(path, "evals.jsonl") for path in (one, staged))
    assert shared["loss"] == pytest.approx(whole["loss"], rel=TOLERANCE) and whole.keys() == shared.keys()
    answers = [[row["answer"] for row in rows(path, "samples.jsonl")] for path in (one, staged)]
    assert answers[0] and answers[0] == answers[1]


@pytest.fixture(scope="module")
def guarded(runs) -> Path:
    """Output folders of runs with torch's AdamW, whose steps are judged by a norm over all stages."""
    folder = runs["plain"].parent
    data = {"data_path": str(folder / "plain/data.json"), "image_folder": str(folder / "plain/images")}
    base = {"model_name_or_path": str(folder / "base/llama"), "vision_tower": str(folder / "base/clip")}
    more = {"max_steps": STEPS, "train_batch_size": 8, "max_grad_norm": 0.5, "learning_rate": 1e-3} | if_there(
        "ema", enable_ema=True
    )
    for pp in (1, 2):
        todo = [
            toy_run(
                base | data,
                folder / f"adamw{pp}-{stage}-{bf16}",
                ds_config(stage),
                **more,
                **PACKED,
                pipeline_parallel_size=pp,
                bf16=bf16,
                model_max_length=6000,
                **if_there("replicas", check_divergence_steps=2),
            )
            for stage in (0, 1)
            for bf16 in (False, True)
        ]
        run_many(2, folder / f"adamw-{pp}", todo)
    return folder


@pytest.mark.parametrize("stage", (0, 1))
@pytest.mark.parametrize("bf16", [False, True])
def test_the_norm_is_over_all_stages(guarded, stage, bf16):
    one, staged = (guarded / f"adamw{pp}-{stage}-{bf16}" for pp in (1, 2))
    norms = [[row["grad_norm"] for row in rows(path)] for path in (one, staged)]
    assert min(norms[0]) > 0.5  # so that it is clipped
    assert norms[1] == pytest.approx(norms[0], rel=0.02 if bf16 else 1e-5)
    assert losses(staged) == pytest.approx(losses(one), rel=0.01 if bf16 else 1e-5)


@needs_extension("ema")
@pytest.mark.parametrize("stage", (0, 1))
def test_the_averaged_weights_are_those_of_ranks_that_have_all(guarded, stage):
    one, staged = (load_file(guarded / f"adamw{pp}-{stage}-False/ema/model.safetensors") for pp in (1, 2))
    assert one.keys() == staged.keys()
    for name, weight in one.items():
        assert (weight - staged[name]).abs().max() <= 1e-5, name


def test_what_does_not_go_is_refused(runs):
    """The reasons are in test_pipeline_flags.py."""
    folder = runs["plain"].parent
    data = {"data_path": str(folder / "plain/data.json"), "image_folder": str(folder / "plain/images")}
    base = {"model_name_or_path": str(folder / "base/llama"), "vision_tower": str(folder / "base/clip")}
    run = toy_run(base | data, folder / "refused", ds_config(2), **PP)
    done = launch(2, TRAIN, *command_line(run))
    said = "--pipeline_parallel_size is 2, but zero_optimization.stage is 2"
    assert done.returncode == 2 and said in done.stdout + done.stderr and "Traceback" not in done.stderr
