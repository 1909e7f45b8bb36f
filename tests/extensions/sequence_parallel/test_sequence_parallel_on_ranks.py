"""Ranks that share samples: losses, gradients, eval loss and books are those of one rank that has them all."""

import json
from pathlib import Path

import pytest
import toys
from known_flags import known_cases
from launching import TRAIN, command_line, ds_config, launch, losses, run_many, toy_run
from sharing import (
    OFFLOAD,
    STEPS,
    TORN,
    TRAINED_TOWER,
    check_same,
    relative_difference,
    sgd,
    train_all,
    write_data,
)

pytestmark = pytest.mark.long  # test_meshes.py has a little of it for every day

SHARED = {"sequence_parallel_size": 2}
PACKED = {"tokens_per_micro_batch": 250}  # of each rank
LORA = {"lora_enable": True, "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0}
AUTO = {"tokens_per_micro_batch": "auto", "gradient_checkpointing": "auto", "activation_memory_gb": 0.004}
# More of the DeepSpeed JSON, in the place of a stage.
IN_JSON = {"zero_optimization": {"stage": 1}, "sequence_parallel_size": 2}
IN_CPU = {"zero_optimization": {"stage": 3}, "activation_checkpointing": {"cpu_checkpointing": True}}
VIDEO = {"image_aspect_ratio": "anyres", "mm_patch_merge_type": "spatial_unpad", "mm_spatial_pool_stride": 2}

# Name of a run: ranks, ZeRO stage and flags. Those of one rank are what the others are compared with.
ONE_RANK = {
    "plain": (1, 0, TRAINED_TOWER),
    "video": (1, 0, {**VIDEO, **TRAINED_TOWER}),
    "torn": (1, 0, TORN),
}
FEW = {
    "plain-sp2": (2, 0, {**SHARED, **TRAINED_TOWER}),
    "plain-sp2-packed": (2, 3, {**SHARED, **PACKED, **TRAINED_TOWER}),
    "torn-sp2": (2, 2, {**SHARED, **PACKED, **TORN, "dataloader_num_workers": 1}),
}
MORE = {
    "stream": (1, 0, {"stream": True}),
    "stream-sp2": (2, 2, {"stream": True, **SHARED, **PACKED}),
    "plain-sp2-auto": (2, 3, {**SHARED, **TRAINED_TOWER, **AUTO}),
    "lora": (1, 0, LORA),
    "lora-sp2": (2, 3, {**SHARED, **LORA}),
    "bf16": (1, 1, {"bf16": True}),
    "bf16-dp2": (2, 1, {"bf16": True, **PACKED}),
    "bf16-sp2": (2, 1, {"bf16": True, **PACKED, **SHARED}),
    "plain-sp2-offload": (2, OFFLOAD, {**SHARED, **TRAINED_TOWER}),
    "plain-sp2-in-json": (2, IN_JSON, TRAINED_TOWER),
    "plain-sp2-tiled": (2, 3, {**SHARED, **TRAINED_TOWER, "mlp_tile_tokens": 100}),
    "plain-sp2-checkpoints-in-cpu": (2, IN_CPU, {**SHARED, **TRAINED_TOWER}),
    **{f"plain-sp2-zero{stage}": (2, stage, {**SHARED, **TRAINED_TOWER}) for stage in (1, 2, 3)},
    **{f"plain-2x2-zero{stage}": (4, stage, {**SHARED, **PACKED, **TRAINED_TOWER}) for stage in range(4)},
    # Two key heads on four ranks.
    **{
        f"plain-1x4-zero{stage}": (4, stage, {"sequence_parallel_size": 4, **PACKED, **TRAINED_TOWER})
        for stage in range(4)
    },
    "video-sp2": (2, 2, {**SHARED, **VIDEO, **TRAINED_TOWER}),
    "video-1x4": (4, 3, {"sequence_parallel_size": 4, **PACKED, **VIDEO, **TRAINED_TOWER}),
    "plain-sp2-recomputed": (2, 3, {**SHARED, **TRAINED_TOWER, "gradient_checkpointing": True}),
    "plain-sp2-compiled": (2, 1, {**SHARED, **TRAINED_TOWER, "torch_compile": True, "torch_compile_backend": "eager"}),
    "plain-sp2-micro_batch": (2, 2, {**SHARED, **TRAINED_TOWER, "loss_reduction": "micro_batch"}),
}
FEW, MORE = known_cases(FEW), known_cases(MORE)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("shared")
    toys.write_base(folder / "base")
    return train_all(folder, write_data(folder), {**ONE_RANK, **FEW})


@pytest.fixture(scope="module")
def more_runs(runs) -> dict[str, Path]:
    folder = runs["plain"].parent
    data = {
        name: {"data_path": str(folder / name / "data.json"), "image_folder": str(folder / name / "images")}
        for name in ("plain", "video", "torn")
    }
    data |= dict.fromkeys(("stream", "lora", "bf16"), data["plain"])
    # By count there is one micro-batch a step, whose mean is the step's.
    return runs | train_all(folder, data, MORE)


@pytest.mark.parametrize("name", [name for name in FEW if name.startswith("plain")])
def test_losses_and_gradients_are_those_of_one_rank(runs, name):
    check_same(runs["plain"], runs[name])


def test_in_bf16_ranks_round_as_those_with_samples_of_their_own_do(more_runs):
    one, own, shared = (more_runs[name] for name in ("bf16", "bf16-dp2", "bf16-sp2"))
    assert 0 < relative_difference(one, shared) <= 4 * relative_difference(one, own)  # two draws of rounding
    differences = [max(abs(a - b) for a, b in zip(losses(one), losses(run), strict=True)) for run in (own, shared)]
    assert differences[1] <= 2 * differences[0]


@pytest.mark.parametrize("name", [name for name in MORE if "-" in name and not name.startswith("bf16")])
def test_losses_and_gradients_are_those_of_one_rank_on_any_mesh(more_runs, name):
    check_same(more_runs[name.split("-")[0]], more_runs[name])


def test_images_in_their_own_shape_are_those_of_one_rank(runs):
    """An image whose tokens are on two ranks is encoded whole by both."""
    folder = runs["plain"].parent
    toys.write_tower(folder / "siglip2", "siglip2")
    given = {"model_name_or_path": str(folder / "base/llama"), "vision_tower": str(folder / "siglip2")}
    given |= toys.write_data(folder / "shapes", "iitiitiiitii")
    flags = {
        "mm_native_resolution": True, **TRAINED_TOWER, "max_steps": STEPS, "train_batch_size": 4,
        "per_device_train_batch_size": 4, "learning_rate": 0.02, "mm_projector_lr": 0.02,
        "lr_scheduler_type": "constant",
    }  # fmt: skip
    for ranks, stage, more in ((1, 0, {}), (2, 3, SHARED)):
        todo = toy_run(given, folder / f"shapes-{ranks}", sgd(folder, stage), **flags, **more)
        run_many(ranks, folder / f"launch-shapes-{ranks}", [todo])
    check_same(folder / "shapes-1", folder / "shapes-2")


def test_ranks_that_share_a_long_sample_keep_half_of_it_each(runs):
    base = runs["plain"].parent / "base"
    done = launch(2, Path(__file__).with_name("shared_sample.py"), str(base), "8192")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert len(found["shared"]) == 2
    assert max(found["shared"]) <= 0.6 * found["alone"]


@pytest.mark.parametrize(
    ("ranks", "flags", "said"),
    [
        (2, {"sequence_parallel_size": 3}, "--sequence_parallel_size 3 does not divide 2 ranks: give one of 1, 2"),
        (1, {"sp_size": 2}, "--sequence_parallel_size 2 does not divide 1 ranks"),
    ],
)
def test_meshes_that_do_not_fit_are_refused(runs, ranks, flags, said):
    folder = runs["plain"].parent
    data = {"data_path": str(folder / "plain/data.json"), "image_folder": str(folder / "plain/images")}
    base = {"model_name_or_path": str(folder / "base/llama"), "vision_tower": str(folder / "base/clip")}
    run = toy_run(base | data, folder / "refused", ds_config(2), **flags)
    done = launch(ranks, TRAIN, *command_line(run))
    assert done.returncode == 2 and said in done.stdout + done.stderr and "Traceback" not in done.stderr
