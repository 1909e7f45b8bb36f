"""Two towers side by side: the features of each, as it gives them alone, and all that names a tower's folder."""

import json
import shutil

import pytest
import torch
import toys
from exporting import RANKS, export
from llavas import opened
from towers import built

from llava_ds.checkpoint.base_weights import weight_hashes
from llava_ds.checkpoint.run_identity import towers_digest
from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.config.model_flags import tower_folders
from llava_ds.config.rules import missing_path
from llava_ds.constants import ConfigError, DataError
from llava_ds.data.collate import LoadedSample, collate
from llava_ds.engine.construct import build_model
from llava_ds.export.export_plan import export_format
from llava_ds.export.from_checkpoint import located
from llava_ds.extensions.infer.load import load_model
from llava_ds.geometry import media_layout
from llava_ds.model.heads import Logits
from llava_ds.model.open.hf import embed_batch
from llava_ds.model.open.model_plan import plan_model
from llava_ds.model.open.tower import read_tower


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A SigLIP, a DINOv2 with registers, which takes images of any size, a wider CLIP, and a language model."""
    folder = tmp_path_factory.mktemp("two")
    torch.manual_seed(0)
    toys.write_tower(folder / "siglip", "siglip")
    toys.write_tower(folder / "dino", "dinov2_with_registers", image_size=40, hidden_size=24)
    toys.write_tower(folder / "clip", "clip", image_size=32)
    toys.write_base(folder / "base")
    return folder


def arguments(folders, pair: str, **model: object) -> Arguments:
    flags = {"model_name_or_path": str(folders / "base" / "llama"), "vision_tower": pair, **model}
    return Arguments(ModelArguments(**flags), DataArguments(), TrainingArguments(), frozenset())


def pair_of(folders, *names: str) -> str:
    return ",".join(str(folders / name) for name in names)


def test_features_of_both_lie_beside_each_other_in_every_format(folders, tmp_path):
    args = arguments(folders, pair_of(folders, "siglip", "dino"), mm_projector_type="mlp2x_gelu_ps3")
    plan = plan_model(args.model, 512)
    options = plan.tower.image_options(args.replaced(mm_spatial_pool_stride=1))
    model = build_model(plan, args.model, {"zero_optimization": {"stage": 0}}, torch.float32, 0, RANKS).eval()
    pixels = torch.randint(0, 256, (2, 3, 24, 24), dtype=torch.uint8)
    alone = [built(folders / name) for name in ("siglip", "dino")]
    assert alone[1].plan.images.size == 24 and plan.tower.width == 16 + 24
    with torch.no_grad():
        torch.testing.assert_close(model.vision_tower(pixels), torch.cat([each(pixels) for each in alone], 2))

    form, [line] = export_format(args, plan, options)
    assert form == "llava" and "no class with --mm_projector_type" in line
    export(model, plan, args.model, options, tmp_path / "out", form="llava")
    layout = media_layout("image", ((40, 30),), 1, options)
    ids = torch.tensor([1, 5, *[-200] * layout.num_tokens, 9, 8])
    batch = collate([LoadedSample(ids, ids.clamp(min=-100), [(pixels[:1], layout)])], options)
    with torch.no_grad():
        logits = model(batch, Logits(torch.arange(len(ids))))
        again, plan_again, _ = opened({"model_name_or_path": str(tmp_path / "out")})  # which names both
        assert torch.equal(again.eval()(batch, Logits(torch.arange(len(ids)))), logits)
        loaded = load_model(tmp_path / "out")
        shown = (batch.pixel_values.float() / 255 - model.vision_tower.mean) / model.vision_tower.std
        torch.testing.assert_close(embed_batch(loaded.model, batch, shown), model.embed(batch))
    whole = {name for name in plan_again.sources.whole_tower().shapes}
    assert {"tower.encoder.layers.2.mlp.fc1.bias", "tower.second.tower.encoder.layer.2.mlp.fc1.bias"} <= whole


@pytest.mark.parametrize(
    ("names", "flags", "message"),
    [
        (("siglip", "clip"), {}, "makes 9 patches of 24 x 24 pixels, the second 16 of 32 x 32, but their features"),
        (("siglip", "dino", "clip"), {}, "names 3 towers: give one or two"),
        (
            ("dino", "siglip"),
            {"mm_vision_select_feature": "cls_patch"},
            "combined with --mm_vision_select_feature cls_patch",
        ),
        (
            ("siglip", "dino"),
            {"s2": True, "s2_scales": "24,48"},
            "two towers can't be combined with --s2 True: leave it out",
        ),
        (
            ("siglip", "dino"),
            {"unfreeze_topk_vision": 1},
            "combined with --unfreeze_topk_vision 1: leave it out",
        ),
    ],
)
def test_two_that_do_not_go_together_are_refused(folders, names, flags, message):
    with pytest.raises(ConfigError, match=message):
        read_tower(pair_of(folders, *names), ModelArguments(**flags))


def test_transformers_has_no_place_for_the_second(folders):
    args = arguments(folders, pair_of(folders, "siglip", "dino"))
    plan = plan_model(args.model, 512)
    form, [line] = export_format(args, plan, plan.tower.image_options(args))
    assert form == "llava" and "transformers' classes have one tower: give one --vision_tower" in line
    assert "LLaVA's own code has no place for a second tower: only llava_ds opens the model" in line


def test_both_folders_are_looked_for_and_remembered(folders, tmp_path):
    pair = pair_of(folders, "siglip", "dino")
    assert missing_path("vision_tower", pair, "model") is None and tower_folders(pair) == tuple(pair.split(","))
    assert missing_path("vision_tower", f"{pair}x", "model") == f": {folders / 'dino'}x: no such folder"
    assert missing_path("vision_tower", "nowhere", "model") == ": no such folder"
    assert towers_digest(pair) == f"{towers_digest(str(folders / 'siglip'))},{towers_digest(str(folders / 'dino'))}"
    args = arguments(folders, pair)
    found = weight_hashes(args, tmp_path, None)
    assert found["vision_tower"].keys() == found["vision_tower (the second)"].keys() == {"model.safetensors"}
    assert found["vision_tower"] != found["vision_tower (the second)"]


def test_a_tensor_that_the_second_lacks_is_named(folders, tmp_path):
    shutil.copytree(folders / "dino", tmp_path / "dino")
    config = json.loads((tmp_path / "dino" / "config.json").read_text())
    (tmp_path / "dino" / "config.json").write_text(json.dumps(config | {"num_register_tokens": 2}))
    pair = f"{folders / 'siglip'},{tmp_path / 'dino'}"
    with pytest.raises(DataError, match=r"second\.tower\.embeddings\.register_tokens"):
        plan_model(arguments(folders, pair).model, 512)


def test_both_are_found_where_a_run_was_moved_with_them(tmp_path):
    for name in ("siglip", "dino", "run"):
        (tmp_path / "new" / name).mkdir(parents=True)
    model = ModelArguments(vision_tower="siglip,dino")
    args = Arguments(model, DataArguments(), TrainingArguments(output_dir="run"), frozenset())
    record = {"folder": str(tmp_path / "old")}
    found = located(args, record, tmp_path / "new" / "run").model.vision_tower
    assert found == pair_of(tmp_path / "new", "siglip", "dino")
