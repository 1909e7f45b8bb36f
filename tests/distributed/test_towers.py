"""Both stages with other towers and projectors: one rank trains as two at ZeRO 2 and 3, and the models open again."""

from pathlib import Path

import pytest
import toys
from launching import ds_config, losses, run_many, toy_run
from llavas import opened
from safetensors.torch import load_file

pytestmark = pytest.mark.long

STEPS = 6
TRAINED = {"mm_tunable_parts": "mm_vision_tower,mm_mlp_adapter,mm_language_model"}
# Tower, flags of both stages, and the format that the second stage leaves.
CASES = {
    "dinov2": ("dinov2", {}, "LlavaForConditionalGeneration"),
    "dinov3": ("dinov3_vit", {"mm_projector_type": "mlp2x_gelu_ps3", "mm_spatial_pool_stride": 1}, "LLaVA"),
    "naflex": (
        "siglip2",
        {"mm_native_resolution": True, "tokens_per_micro_batch": 120, "gradient_checkpointing": True},
        "LLaVA",
    ),
    "two": ("siglip+dinov2", {}, "LLaVA"),
    "aimv2": ("aimv2_vision_model", {"tokens_per_micro_batch": 120}, "LlavaForConditionalGeneration"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Folders NAME-STAGE-RANKS of both stages: on one rank without ZeRO, on two at ZeRO 2 and then 3."""
    folder = tmp_path_factory.mktemp("towers")
    captions = toys.write_data(folder / "captions", "i" * 12, plain=True)
    talks = toys.write_data(folder / "talks", "iitiitiiitii")
    for ranks in (1, 2):
        todo = []
        for name, (kind, flags, _) in CASES.items():
            towers = {folder / f"{name}{i}": each for i, each in enumerate(kind.split("+"))}
            if ranks == 1:
                toys.write_base(folder / f"{name}-base")
                for tower, each in towers.items():
                    toys.write_tower(tower, each)
            base = {"model_name_or_path": str(folder / f"{name}-base" / "llama"), **flags}
            base["vision_tower"] = ",".join(map(str, towers))
            first, second = (folder / f"{name}-{stage}-{ranks}" for stage in (1, 2))
            stages = (0, 0) if ranks == 1 else (2, 3)
            common = {"max_steps": STEPS, "cache_dir": folder / f"cache-{name}"}
            stage1 = {"version": "plain", "tune_mm_mlp_adapter": True, "mm_projector_lr": 2e-3}
            stage2 = {"pretrain_mm_mlp_adapter": first / "mm_projector.bin", **TRAINED}
            todo.append(toy_run(base | captions, first, ds_config(stages[0]), **{**common, **stage1}))
            todo.append(toy_run(base | talks, second, ds_config(stages[1]), **{**common, **stage2}))
        printed = run_many(ranks, folder / f"launch-{ranks}", todo)
        assert printed.count("reloaded with transformers, logits differ by") == 2
    return folder


@pytest.mark.parametrize("case", CASES)
def test_both_stages_train_alike_on_two_ranks_and_the_model_opens(runs, case):
    kind, _, form = CASES[case]
    for stage in (1, 2):
        one, two = (losses(runs / f"{case}-{stage}-{ranks}") for ranks in (1, 2))
        assert len(one) == STEPS and max(abs(a - b) for a, b in zip(one, two)) < 1e-5
    out = runs / f"{case}-2-2"
    assert (form == "LLaVA") == ("model.mm_projector.0.weight" in load_file(out / "model.safetensors"))
    towers = [str(runs / f"{case}{i}") for i in range(len(kind.split("+")))]
    given = {"model_name_or_path": str(out)} | ({"vision_tower": ",".join(towers)} if form == "LLaVA" else {})
    _, plan, _ = opened(given)
    assert plan.tower.config.model_type.startswith(kind.split("+")[0])
    # Every tower trained, and what pretraining alone uses came through.
    after = load_file(out / "model.safetensors")
    for i, tower in enumerate(towers):
        before = load_file(f"{tower}/model.safetensors")
        patches = next(name for name in before if "patch_embed" in name and name.endswith("weight"))
        written = [name for name in after if name.endswith(patches) and ("second" in name) == (i == 1)]
        assert len(written) == 1 and not before[patches].equal(after[written[0]])
        as_in_memory = {name for name in before if "attention.attention" in name or ".output.dense" in name}
        lacking = {name for name in before if not any(each.endswith(name) for each in after)}
        assert {name for name in lacking - as_in_memory if not name.startswith("layer.")} == set()
