"""Towers give the hidden state that transformers' own class gives, and S2 what s2wrapper's definition says."""

import json

import pytest
import torch
import torch.nn.functional as F
import toys
from towers import built, noise
from transformers import (
    AutoImageProcessor,
    AutoModel,
    BitImageProcessorPil,
    CLIPImageProcessorPil,
    CLIPVisionModel,
    GotOcr2ImageProcessorPil,
    Siglip2Config,
    Siglip2Model,
    Siglip2VisionModel,
    SiglipVisionModel,
)

from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.constants import ConfigError, DataError
from llava_ds.data.images.resize import to_tile
from llava_ds.engine.activation_checkpointing import repeated_layers
from llava_ds.model.open import names as formats
from llava_ds.model.open.tower import read_tower
from llava_ds.model.open.weights import Source
from llava_ds.model.vision import VisionTower

SIZES = toys.TOWER
# By kind, the tokens before those of patches.
FIRST = {
    "clip": 1, "siglip": 0, "siglip2": 0, "dinov2": 1, "dinov2_with_registers": 4, "dinov3_vit": 5,
    "aimv2_vision_model": 0, "internvl_vision": 1,
}  # fmt: skip


def hidden_states(folder, kind: str, pixels: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """All hidden states of transformers' own class; pixels (N, 3, 24, 24), normalised."""
    if kind == "siglip2":
        patches = F.unfold(pixels, 8, stride=8).transpose(1, 2).unflatten(2, (3, 64)).transpose(2, 3).flatten(2)
        shapes, seen = torch.tensor([[3, 3]] * len(pixels)), torch.ones(len(pixels), 9, dtype=torch.int64)
        inputs = {"pixel_values": patches, "pixel_attention_mask": seen, "spatial_shapes": shapes}
        model = Siglip2VisionModel.from_pretrained(folder)
    else:
        inputs = {"pixel_values": pixels}
        model = {"clip": CLIPVisionModel, "siglip": SiglipVisionModel}.get(kind, AutoModel).from_pretrained(folder)
    with torch.no_grad():
        return model.eval()(**inputs, output_hidden_states=True).hidden_states


def shown(tower: VisionTower) -> tuple[torch.Tensor, torch.Tensor]:
    """Random pictures (N, 3, S, S) uint8, and the same normalised."""
    torch.manual_seed(1)
    pixels = torch.randint(0, 256, (2, 3, tower.plan.images.size, tower.plan.images.size), dtype=torch.uint8)
    return pixels, (pixels / 255 - tower.mean) / tower.std


@pytest.mark.parametrize("kind", FIRST)
def test_features_are_the_selected_hidden_state(kind, tmp_path):
    toys.write_tower(tmp_path, kind)
    for layer, layers in ((-1, 3), (-2, 2), (1, 1)):
        tower = built(tmp_path, mm_vision_select_layer=layer).train()  # without what pretraining does at random
        assert len(repeated_layers(tower)) == tower.plan.num_layers == layers
        pixels, normalised = shown(tower)
        expected = hidden_states(tmp_path, kind, normalised)[layer]
        with torch.no_grad():
            torch.testing.assert_close(tower(pixels), expected[:, FIRST[kind] :])
    assert tower.plan.images.num_tokens == 9 and tower.plan.num_positions == 9 + FIRST[kind]
    assert tower.plan.images.stretch == (kind in ("siglip", "siglip2", "dinov3_vit", "internvl_vision"))


@pytest.mark.parametrize("kind", ["clip", "siglip", "dinov2", "dinov3_vit"])
def test_the_class_token_comes_first_where_there_is_one_and_registers_never(kind, tmp_path):
    toys.write_tower(tmp_path, kind)
    tower = built(tmp_path, mm_vision_select_feature="cls_patch")
    pixels, normalised = shown(tower)
    expected = hidden_states(tmp_path, kind, normalised)[-2]
    kept = [0, *range(FIRST[kind], 9 + FIRST[kind])] if FIRST[kind] else range(9)
    with torch.no_grad():
        torch.testing.assert_close(tower(pixels), expected[:, list(kept)])
    assert tower.plan.images.num_tokens == len(kept)


@pytest.mark.parametrize("kind", toys.TOWERS)
def test_images_may_have_the_size_of_the_processor(kind, tmp_path):
    toys.write_tower(tmp_path, kind, image_size=40)  # what the tower was trained with; its processor makes 24
    tower = built(tmp_path)
    assert tower.plan.images.size == 24 and tower.plan.num_patches == 9
    pixels, normalised = shown(tower)
    with torch.no_grad():
        torch.testing.assert_close(tower(pixels), hidden_states(tmp_path, kind, normalised)[-2][:, FIRST[kind] :])


@pytest.mark.parametrize(
    ("kind", "processor"),
    [
        ("dinov2", BitImageProcessorPil),
        ("aimv2_vision_model", CLIPImageProcessorPil),
        ("internvl_vision", GotOcr2ImageProcessorPil),
    ],
)
def test_pixels_are_those_of_the_towers_own_processor(kind, processor, width_first, tmp_path):
    toys.write_tower(tmp_path, kind)
    plan = read_tower(tmp_path, ModelArguments())
    options = plan.image_options(Arguments(ModelArguments(), DataArguments(), TrainingArguments(), frozenset()))
    own = processor.from_pretrained(tmp_path)
    assert (plan.images.mean, plan.images.std) == (tuple(own.image_mean), tuple(own.image_std))
    for i, size in enumerate([(70, 41), (33, 90), (24, 24), (29, 31)]):
        image = noise(*size, i)
        ours = to_tile(image, "stretch" if options.stretch else "square", options)
        theirs = own(image, do_rescale=False, do_normalize=False, return_tensors="pt")["pixel_values"][0]
        assert torch.equal(ours.to(theirs.dtype), theirs), size


SQUARE, SHORT = {"height": 24, "width": 24}, {"shortest_edge": 24}


@pytest.mark.parametrize("crop", [None, False, True])
@pytest.mark.parametrize(
    "size", [None, SQUARE, SHORT, 24, {"shortest_edge": 24, "longest_edge": 40}, {"longest_edge": 24}]
)
@pytest.mark.parametrize("kind", ["clip", "siglip", "dinov2", "aimv2_vision_model"])
def test_pixels_are_transformers_or_the_processor_is_refused(kind, size, crop, width_first, tmp_path):
    """Of the settings that make images of other shapes, transformers' tower takes none."""
    toys.write_tower(tmp_path, kind)
    file = tmp_path / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    settings |= {} if size is None else {"size": size}
    settings |= {} if crop is None else {"do_center_crop": crop, "crop_size": SQUARE}
    file.write_text(json.dumps(settings))
    own, image = AutoImageProcessor.from_pretrained(tmp_path, backend="pil"), noise(70, 41, 0)
    try:
        theirs = own(image, do_rescale=False, do_normalize=False, return_tensors="pt")["pixel_values"][0]
    except ValueError:  # transformers' own refusal
        theirs = None
    try:
        plan = read_tower(tmp_path, ModelArguments())
    except ConfigError as refused:
        assert "its image processor says size" in str(refused)
        # A long image, scaled to its longer side, is smaller than what is cropped: transformers adds a black border.
        assert theirs is None or theirs.shape != (3, 24, 24) or "longest_edge" in size
        return
    options = plan.image_options(Arguments(ModelArguments(), DataArguments(), TrainingArguments(), frozenset()))
    ours = to_tile(image, "stretch" if options.stretch else "square", options)
    assert torch.equal(ours.to(theirs.dtype), theirs)


def test_a_square_that_is_stretched_and_then_cropped_is_refused(tmp_path):
    toys.write_tower(tmp_path, "clip")
    file = tmp_path / "preprocessor_config.json"
    settings = {"size": {"height": 32, "width": 32}, "crop_size": SQUARE, "do_center_crop": True}
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    with pytest.raises(ConfigError, match=r"says size .* and do_center_crop true: images don't come out square"):
        read_tower(tmp_path, ModelArguments())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"crop_size": {"height": 24, "width": 16}}, "makes images of .*, expected a square of up to 4096"),
        ({"crop_size": {"height": 10**6, "width": 10**6}}, "makes images of 1000000 pixels, expected a square of up"),
        (
            {"size": {"shortest_edge": 20}},
            "scales images to 20 pixels, but crops them to 24: expected a scaled size",
        ),
        ({"resample": 1}, r"says resample 1, expected one of \(2, 3\)"),
    ],
)
def test_processors_that_make_other_images_are_refused(settings, message, tmp_path):
    toys.write_tower(tmp_path, "dinov2")
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    with pytest.raises(ConfigError, match=message):
        read_tower(tmp_path, ModelArguments())


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("internvl_vision", {"patch_size": [0, 0]}, "config.json says patch_size 0, expected a whole number"),
        ("internvl_vision", {"image_size": [24, 16]}, r"says image_size .24, 16., expected a whole number"),
        ("dinov3_vit", {"num_register_tokens": -1}, "num_register_tokens -1: expected a whole number from 0 to 4096"),
        ("dinov2", {"mlp_ratio": "wide"}, "config.json is not what transformers expects"),
    ],
)
def test_damaged_configurations_are_refused(kind, settings, message, tmp_path):
    toys.write_tower(tmp_path, kind)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    with pytest.raises((ConfigError, DataError), match=message):
        read_tower(tmp_path, ModelArguments())


def test_gates_of_the_largest_dinov2_are_refused(tmp_path):
    toys.write_tower(tmp_path, "dinov2")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_swiglu_ffn": True}))
    with pytest.raises(ConfigError, match=r"its MLPs have gates \(use_swiglu_ffn\): these are not supported: take"):
        read_tower(tmp_path, ModelArguments())


def test_s2_lays_the_features_of_every_scale_beside_each_other(tmp_path):
    toys.write_tower(tmp_path, "clip")
    tower = built(tmp_path, s2=True, s2_scales="48,24")
    plain = built(tmp_path)
    assert (tower.plan.images.size, tower.plan.images.num_tokens, tower.plan.width) == (48, 9, 32)
    pixels, normalised = shown(tower)
    with torch.no_grad():
        found = tower(pixels)
        small = plain._features(F.interpolate(normalised, size=(24, 24), mode="bicubic"))
        quarters = [plain._features(normalised[:, :, y : y + 24, x : x + 24]) for y in (0, 24) for x in (0, 24)]
    torch.testing.assert_close(found[..., :16], small)
    grid = torch.zeros(2, 6, 6, 16)
    for i, quarter in enumerate(quarters):
        y, x = 3 * (i // 2), 3 * (i % 2)
        grid[:, y : y + 3, x : x + 3] = quarter.view(2, 3, 3, 16)
    averaged = grid.view(2, 3, 2, 3, 2, 16).mean((2, 4)).view(2, 9, 16)
    torch.testing.assert_close(found[..., 16:], averaged)


def test_a_model_of_pictures_and_texts_gives_its_vision_half(tmp_path):
    text = {**SIZES, "vocab_size": 9, "projection_size": 16}
    config = Siglip2Config(text_config=text, vision_config={"num_patches": 9, "patch_size": 8, **SIZES})
    Siglip2Model(config).save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    plan = read_tower(tmp_path, ModelArguments())
    files = Source("--vision_tower", str(tmp_path), formats.tower_from_disk).open(
        lambda name: formats.runs_in_tower(name, 2)
    )
    tower = VisionTower(plan, torch.zeros(3), torch.ones(3))
    assert set(files.shapes) == {name for name, _ in tower.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "flags", "message"),
    [
        ("clip", {"mm_vision_select_layer": 4}, "--mm_vision_select_layer 4: the tower has 3 layers, give -3 to 3"),
        ("clip", {"mm_vision_select_layer": -4}, "--mm_vision_select_layer -4: the tower has 3 layers, give -3 to 3"),
        ("clip", {"s2": True}, "--s2_scales 336,672,1008: give multiples of the tower's 24 pixels, itself first"),
        ("clip", {"s2": True, "s2_scales": "24;48"}, "--s2_scales 24;48: give sizes in pixels"),
        (
            "clip",
            {"s2": True, "s2_scales": "24,48", "mm_vision_select_feature": "cls_patch"},
            "--s2 True needs --mm_vision_select_feature patch",
        ),
        (
            "clip",
            {"s2": True, "s2_scales": "24,48", "mm_patch_merge_type": "spatial_unpad"},
            "--s2 True needs --mm_patch_merge_type flat",
        ),
        (
            "clip",
            {"mm_projector_type": "pooler", "mm_vision_select_feature": "cls_patch"},
            "--mm_projector_type pooler needs --mm_vision_select_feature patch",
        ),
        (
            "clip",
            {"mm_projector_type": "mlp2x_gelu_ps3", "mm_vision_select_feature": "cls_patch"},
            "--mm_projector_type mlp2x_gelu_ps3 needs --mm_vision_select_feature patch",
        ),
        (
            "siglip",
            {"mm_projector_type": "mlp2x_gelu_ps2"},
            "--mm_projector_type mlp2x_gelu_ps2: .* 3 x 3 patches, but squares of 2 x 2 don't fill the grid: give _ps3",
        ),
        (
            "siglip",
            {"mm_projector_type": "mlp2x_gelu_avg2"},
            "--mm_projector_type mlp2x_gelu_avg2: .* 3 x 3 patches, .* don't fill the grid: give _avg3, or take",
        ),
    ],
)
def test_flags_that_do_not_fit_the_tower_are_refused(kind, flags, message, tmp_path):
    toys.write_tower(tmp_path, kind)
    with pytest.raises(ConfigError, match=f"^{message.split('(')[0]}"):
        read_tower(tmp_path, ModelArguments(**flags))


def test_other_models_are_no_towers(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(ConfigError, match="model_type is 'vit', expected one of clip, siglip, siglip2, aimv2, clip"):
        read_tower(tmp_path, ModelArguments())


def test_a_class_token_has_no_place_in_a_grid(tmp_path):
    toys.write_tower(tmp_path, "clip")
    model = ModelArguments(mm_vision_select_feature="cls_patch", mm_patch_merge_type="spatial")
    args = Arguments(model, DataArguments(), TrainingArguments(), frozenset())
    with pytest.raises(ConfigError, match="give --mm_patch_merge_type flat, not spatial"):
        read_tower(tmp_path, model).image_options(args)
