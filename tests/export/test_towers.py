"""Every tower and projector leaves a folder that opens again with equal logits: in transformers where it has a class
for it, and here, to train on and to ask, whatever it is."""

import dataclasses

import pytest
import torch
import toys
from exporting import RANKS, export, export_plan
from llavas import opened

from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.constants import ConfigError
from llava_ds.data.collate import LoadedSample, collate
from llava_ds.engine.construct import build_model
from llava_ds.export.export_plan import export_format
from llava_ds.export.reload_check import compare_reloaded
from llava_ds.export.trial import try_export
from llava_ds.extensions.benchmarks.benchmark_files import Given
from llava_ds.extensions.benchmarks.tasks import read_questions
from llava_ds.extensions.infer.generate import answer, prompt_ids
from llava_ds.extensions.infer.load import load_model
from llava_ds.geometry import media_layout
from llava_ds.model.heads import Logits
from llava_ds.model.open.hf import embed_batch
from llava_ds.model.open.model_plan import plan_model

PS2 = {"mm_projector_type": "mlp2x_gelu_ps2"}
# Tower and flags; and why transformers has no class, and LLaVA's code opens it neither, as far as that is so.
CASES = {
    "dinov2": ("dinov2", {}, None, "no class for a dinov2"),
    "aimv2": ("aimv2_vision_model", {}, None, "no class for a aimv2_vision_model"),
    "internvit, class token": (
        "internvl_vision", {"mm_vision_select_feature": "cls_patch"}, None, "no class for a internvl_vision",
    ),
    "registers": ("dinov2_with_registers", {}, "treat the registers of a dinov2_with_registers", "no class for a dino"),
    "dinov3": (
        "dinov3_vit", {"mm_projector_type": "mlp2x_gelu_ps3"}, "no class with --mm_projector_type mlp2x_gelu_ps3",
        "no --mm_projector_type mlp2x_gelu_ps3",
    ),
    "clip, pixel shuffle": ("clip", PS2, "no class with --mm_projector_type mlp2x_gelu_ps2", "no --mm_projector_type"),
    "clip, pooler": ("clip", {"mm_projector_type": "pooler"}, "no class with --mm_projector_type pooler", None),
    "s2": ("clip", {"s2": True, "s2_scales": "32,64", **PS2}, "no class with --mm_", "no --mm_projector_type"),
    "siglip2 in any shape": (
        "siglip2", {"mm_native_resolution": True, **PS2}, "no class with --mm_projector_type", "no --mm_projector_type",
    ),
    "siglip2": ("siglip2", {}, "don't cut images for a SigLIP 2", "no class for a siglip2_vision_model"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_was_trained_opens_again(case, tmp_path):
    kind, flags, no_class, not_llavas = CASES[case]
    size = {"image_size": 32} if kind == "clip" else {}
    base = {**toys.write_base(tmp_path / "base"), **toys.write_tower(tmp_path / kind, kind, **size)}
    model_args = ModelArguments(**base, **flags)
    plan = plan_model(model_args, 512)
    args = Arguments(model_args, DataArguments(mm_spatial_pool_stride=1), TrainingArguments(), frozenset())
    options = plan.tower.image_options(args)
    form, lines = export_format(args, plan, options)
    assert (form, lines) == ("hf", []) if no_class is None else form == "llava" and no_class in lines[0]
    check_notes(args, plan, options, not_llavas)
    model = build_model(plan, model_args, {"zero_optimization": {"stage": 0}}, torch.float32, 0, RANKS).eval()
    export(model, plan, model_args, options, tmp_path / "out", form=form)

    layout = media_layout("image", ((40, 30),), 1, options)
    tiles = torch.randint(256, (layout.num_tiles, 3, options.size, options.size), dtype=torch.uint8)
    ids = torch.tensor([1, 5, *[-200] * layout.num_tokens, 9, 8])
    batch = collate([LoadedSample(ids, ids.clamp(min=-100), [(tiles, layout)])], options)
    with torch.no_grad():
        logits = model(batch, Logits(torch.arange(len(ids))))
    tower, moved = model.vision_tower, {} if form == "hf" else {"vision_tower": base["vision_tower"]}
    if form == "hf":
        assert compare_reloaded(tmp_path / "out", batch, [layout], tower.mean, tower.std, logits) < 2e-5
    again, plan_again, args_again = opened({"model_name_or_path": str(tmp_path / "out"), **moved})
    assert plan_again.images == plan.images and args_again.model.mm_projector_type == model_args.mm_projector_type
    with torch.no_grad():
        found = again.eval()(batch, Logits(torch.arange(len(ids))))[:, : logits.shape[1]]  # <image> may have a row
    assert torch.equal(found, logits)
    loaded = load_model(tmp_path / "out", moved=moved)
    assert loaded.image_options == options
    pixels = (batch.pixel_values.float() / 255 - tower.mean) / tower.std
    with torch.no_grad():
        torch.testing.assert_close(embed_batch(loaded.model, batch, pixels), model.embed(batch))


def check_notes(args: Arguments, plan, options, not_llavas: str | None) -> None:
    """A run is told at its start that LLaVA's own code won't open its folder."""
    asked = dataclasses.replace(args, training=TrainingArguments(export_format="llava"))
    form, lines = export_format(asked, plan, options)
    assert form == "llava" and (lines == [] if not_llavas is None else not_llavas in lines[0])
    if not_llavas is not None:
        assert lines[0].endswith("only llava_ds opens the model")


def test_the_trial_opens_a_dinov2_before_anything_is_built(tmp_path):
    base = {**toys.write_base(tmp_path / "base"), **toys.write_tower(tmp_path / "dinov2", "dinov2")}
    args = ModelArguments(**base)
    plan = plan_model(args, 512)
    options = plan.tower.image_options(Arguments(args, DataArguments(), TrainingArguments(), frozenset()))
    model = torch.nn.Linear(1, 1)  # for its precision
    line = try_export(export_plan(model, plan, args, options), tmp_path / "out")
    assert "transformers opens its names and shapes" in line


def test_tiles_of_another_size_than_the_towers_are_refused_where_hf_is_asked_for(tmp_path):
    base = {**toys.write_base(tmp_path / "base"), **toys.write_tower(tmp_path / "dinov2", "dinov2", image_size=40)}
    model = ModelArguments(**base, mm_patch_merge_type="spatial_unpad")
    data, training = DataArguments(image_aspect_ratio="anyres"), TrainingArguments(export_format="hf")
    args = Arguments(model, data, training, frozenset({"export_format"}))
    plan = plan_model(model, 512)
    with pytest.raises(ConfigError, match=r"images for a dinov2 to have the size .* not 24 pixels: give"):
        export_format(args, plan, plan.tower.image_options(args))


def test_images_in_their_own_shape_are_asked_about_together_as_one_by_one(tmp_path):
    base = {**toys.write_base(tmp_path / "base"), **toys.write_tower(tmp_path / "siglip2", "siglip2")}
    args = ModelArguments(**base, mm_native_resolution=True)
    plan = plan_model(args, 512)
    options = plan.tower.image_options(Arguments(args, DataArguments(), TrainingArguments(), frozenset()))
    model = build_model(plan, args, {"zero_optimization": {"stage": 0}}, torch.float32, 0, RANKS)
    export(model, plan, args, options, tmp_path / "out", form="llava")
    loaded = load_model(tmp_path / "out")  # whose configuration says where the tower lies
    data = toys.write_data(tmp_path / "data", "iiti")
    given = Given(data["data_path"], image_folder=data["image_folder"])
    prompts = [question.prompt for question in read_questions("llava", given, None)]
    together = answer(loaded, prompts, max_new_tokens=5)
    assert together == [answer(loaded, [prompt], max_new_tokens=5)[0] for prompt in prompts]
    assert len({len(prompt_ids(loaded, prompt)) for prompt in prompts}) > 2
