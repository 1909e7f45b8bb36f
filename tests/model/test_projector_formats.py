"""The same tensor under its three names, and the projector that LLaVA's files fit."""

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from llava_ds import formats
from llava_ds.constants import ConfigError
from llava_ds.model.projector import Newline, build_projector
from llava_ds.model.vision import VisionTower, read_vision_config
from llava_ds.model.weights import WeightFiles

LLAVA_KEYS = {
    "mlp2x_gelu": [
        "model.mm_projector.0.weight",
        "model.mm_projector.0.bias",
        "model.mm_projector.2.weight",
        "model.mm_projector.2.bias",
    ],
    "linear": ["model.mm_projector.weight", "model.mm_projector.bias"],
}
KINDS = list(LLAVA_KEYS)


def names_here(kind: str) -> list[str]:
    return [f"projector.{name}" for name, _ in build_projector(kind, 5, 7).named_parameters()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_projector_file_has_llavas_keys_and_reads_back(kind):
    written = [formats.projector_to_llava(name, kind) for name in names_here(kind)]
    assert written == LLAVA_KEYS[kind]
    assert [f"projector.{formats.projector_from_llava(name)}" for name in written] == names_here(kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefix", ["", "model.", "base_model.model.model.", "base_model.model.", "module.model."])
def test_a_projector_is_found_behind_any_prefix(kind, prefix):
    names = [prefix + name.removeprefix("model.") for name in LLAVA_KEYS[kind]]
    assert [f"projector.{formats.projector_from_llava(name)}" for name in names] == names_here(kind)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.up_proj.weight",
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.image_newline",
        "base_model.model.model.mm_projector.0.lora_A.weight",
        "model.other_mm_projector.weight",
        "model.mm_projector_extra.weight",
    ],
)
def test_other_tensors_of_a_checkpoint_are_left_out(name):
    assert formats.projector_from_llava(name) is None


def test_the_newline_under_its_three_names():
    [(name, _)] = Newline(3).named_parameters()
    here = f"newline.{name}"
    assert formats.projector_to_llava(here, "linear") == "model.image_newline"
    assert formats.to_hf(here) == "image_newline"
    for prefix in ("", "model.", "base_model.model.model."):
        assert formats.newline_from_llava(f"{prefix}image_newline") == name
    for other in ("model.mm_projector.0.weight", "model.my_image_newline", "model.image_newline.weight"):
        assert formats.newline_from_llava(other) is None


@pytest.mark.parametrize("kind", KINDS)
def test_the_projector_computes_what_llavas_does(kind):
    torch.manual_seed(0)
    projector = build_projector(kind, 5, 7)
    weights = dict(projector.named_parameters())
    features = torch.randn(2, 3, 5)
    expected = features @ weights["layers.0.weight"].T + weights["layers.0.bias"]
    if kind == "mlp2x_gelu":
        expected = torch.nn.functional.gelu(expected)  # the exact one, as torch.nn.GELU() in LLaVA
        expected = expected @ weights["layers.2.weight"].T + weights["layers.2.bias"]
    assert projector(features).shape == (2, 3, 7)
    torch.testing.assert_close(projector(features), expected)


def test_an_unknown_projector_names_the_known_ones():
    with pytest.raises(ConfigError, match=r"--mm_projector_type 'mlp9' is unknown: choose from linear, mlp2x_gelu"):
        build_projector("mlp9", 5, 7)


def test_a_clip_folder_fills_the_truncated_tower_exactly(toy_base):
    path = toy_base["vision_tower"]
    config = read_vision_config(path)
    for select_layer, layers in ((-2, 2), (-1, 3), (1, 1)):
        tower = VisionTower(config, select_layer, torch.zeros(3), torch.ones(3))
        files = WeightFiles(path, lambda name, layers=layers: formats.clip_from_disk(name, layers))
        assert files.shapes == {name: tuple(p.shape) for name, p in tower.named_parameters()}


def test_clip_names_are_read_with_and_without_prefix_and_beside_a_text_model():
    vision = CLIPVisionConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=3, num_attention_heads=2, image_size=8, patch_size=4
    )
    text = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
    both = CLIPModel(CLIPConfig(text_config=text, vision_config=vision.to_dict(), projection_dim=4))
    tower = VisionTower(vision, -2, torch.zeros(3), torch.ones(3))
    expected = {name for name, _ in tower.named_parameters()}
    names = {formats.clip_from_disk(name, 2) for name in both.state_dict()} - {None}
    assert names == expected
    bare = {name.removeprefix("clip.") for name in expected}
    for prefix in ("", "vision_model."):
        assert {formats.clip_from_disk(prefix + name, 2) for name in bare} == expected
        assert formats.clip_from_disk(f"{prefix}encoder.layers.2.mlp.fc1.weight", 2) is None
        assert formats.clip_from_disk(f"{prefix}encoder.layers.10.mlp.fc1.weight", 2) is None
        assert formats.clip_from_disk(f"{prefix}embeddings.position_ids", 2) is None


def test_hugging_faces_names():
    assert formats.to_hf("projector.layers.0.weight") == "multi_modal_projector.linear_1.weight"
    assert formats.to_hf("projector.layers.2.bias") == "multi_modal_projector.linear_2.bias"
    assert formats.to_hf("vision_tower.clip.pre_layrnorm.bias") == "vision_tower.vision_model.pre_layrnorm.bias"
    assert formats.to_hf("language_model.model.norm.weight") == "language_model.model.norm.weight"
    assert formats.to_hf("language_model.lm_head.weight") == "language_model.lm_head.weight"


def test_what_is_written_under_hugging_faces_names_opens_with_nothing_missing_or_left_over(toy_base, tmp_path):
    text = AutoConfig.from_pretrained(toy_base["model_name_or_path"])
    vision = read_vision_config(toy_base["vision_tower"])
    parts = {
        "vision_tower": VisionTower(vision, -1, torch.zeros(3), torch.ones(3)),
        "projector": build_projector("mlp2x_gelu", vision.hidden_size, text.hidden_size),
        "language_model": LlamaForCausalLM(text),
    }
    tensors = {
        formats.to_hf(f"{part}.{name}"): torch.zeros_like(parameter)
        for part, module in parts.items()
        for name, parameter in module.named_parameters()
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = LlavaConfig(vision_config=vision.to_dict(), text_config=text.to_dict(), image_token_index=3)
    config.save_pretrained(tmp_path)
    _, report = LlavaForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
