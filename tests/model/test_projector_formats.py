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
from transformers.models.idefics3.modeling_idefics3 import Idefics3Connector

from llava_ds.config.arguments import ModelArguments
from llava_ds.constants import ConfigError
from llava_ds.model.open import names as formats
from llava_ds.model.open.tower import plan_tower, read_vision_config
from llava_ds.model.open.weights import Source
from llava_ds.model.projector import Newline, build_projector
from llava_ds.model.vision import VisionTower

LLAVA_KEYS = {
    "mlp2x_gelu": [
        "model.mm_projector.0.weight",
        "model.mm_projector.0.bias",
        "model.mm_projector.2.weight",
        "model.mm_projector.2.bias",
    ],
    "linear": ["model.mm_projector.weight", "model.mm_projector.bias"],
    "mlp3x_gelu": [f"model.mm_projector.{layer}.{kind}" for layer in (0, 2, 4) for kind in ("weight", "bias")],
    "mlp2x_res1x_gelu": [
        f"model.mm_projector.{layer}.{kind}"
        for layer in ("0", "2", "3.pre_norm", "3.proj.0", "3.proj.2")
        for kind in ("weight", "bias")
    ],
    "mlp2x_res1x_gelu_ps2": [
        f"model.mm_projector.{layer}.{kind}"
        for layer in ("0", "2", "3.pre_norm", "3.proj.0", "3.proj.2")
        for kind in ("weight", "bias")
    ],
    "mlp1x_gelu_avg2": [f"model.mm_projector.0.{kind}" for kind in ("weight", "bias")],
    "pooler": [
        f"model.mm_projector.{layer}.{kind}" for layer in ("conv_pool", "proj.1") for kind in ("weight", "bias")
    ],
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


@pytest.mark.parametrize("kind", ["linear", "mlp2x_gelu"])
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


def test_a_pooler_makes_one_feature_of_each_square_of_four():
    torch.manual_seed(0)
    projector = build_projector("pooler", 5, 7)
    features = torch.randn(2, 25, 5)  # 5 x 5: the last row and column are left out
    pool, linear = projector.layers.conv_pool, projector.layers.proj[1]
    grid = features.view(2, 5, 5, 5)[:, :4, :4]
    squares = grid.reshape(2, 2, 2, 2, 2, 5).permute(0, 1, 3, 5, 2, 4).reshape(2, 4, -1)  # (N, squares, C * 4)
    pooled = squares @ pool.weight.reshape(7, -1).T + pool.bias
    torch.testing.assert_close(projector(features), linear(torch.nn.functional.gelu(pooled)))


def test_a_pixel_shuffle_is_that_of_transformers():
    torch.manual_seed(0)
    features = torch.randn(2, 36, 5)
    for stride in (2, 3):
        projector, plain = (build_projector(f"mlp2x_gelu{end}", *sizes) for end, *sizes in (
            (f"_ps{stride}", 5, 7), ("", 5 * stride**2, 7)
        ))  # fmt: skip
        plain.load_state_dict(projector.state_dict())
        theirs = Idefics3Connector.pixel_shuffle(None, features, stride)
        torch.testing.assert_close(projector(features), plain(theirs), rtol=0, atol=0)
        assert projector(features).shape == (2, 36 // stride**2, 7)


def test_an_average_takes_the_mean_of_each_square():
    torch.manual_seed(0)
    projector = build_projector("mlp1x_gelu_avg3", 5, 7)
    features = torch.randn(2, 36, 5)  # 6 x 6
    grid = features.view(2, 6, 6, 5)
    corners = [(row, column) for row in (0, 3) for column in (0, 3)]
    means = torch.stack([grid[:, row : row + 3, column : column + 3].mean((1, 2)) for row, column in corners], 1)
    torch.testing.assert_close(projector(features), projector.layers[0](means))


def test_a_residual_block_adds_to_what_it_has_normalised():
    torch.manual_seed(0)
    projector = build_projector("mlp1x_res1x_gelu", 5, 7)
    features = torch.randn(2, 3, 5)
    first, block = projector.layers
    normalised = block.pre_norm(first(features))
    inner = block.proj[2](torch.nn.functional.gelu(block.proj[0](normalised)))
    torch.testing.assert_close(projector(features), normalised + inner)  # as LLaVA's; not first(features)


def test_identity_needs_equal_widths():
    assert torch.equal(build_projector("identity", 5, 5)(torch.ones(1, 2, 5)), torch.ones(1, 2, 5))
    with pytest.raises(ConfigError, match="needs a tower as wide as the language model, but the widths are 5 and 7"):
        build_projector("identity", 5, 7)


@pytest.mark.parametrize(
    "kind",
    [
        "mlp9",
        "mlp0x_gelu",
        "mlp2x_gelu_ps1",
        "linear_ps2",
        "mlp2x_gelu_avg1",
        "mlp2x_res0x_gelu",
        "mlp2x_gelu ",
        "mlp2x_relu",
        "",
    ],
)
def test_an_unknown_projector_names_the_known_ones(kind):
    with pytest.raises(
        ConfigError, match=r"is unknown: give linear, mlpNx_gelu, mlpNx_resMx_gelu, either followed by _psK or _avgK"
    ):
        build_projector(kind, 5, 7)


def tower(config, select_layer: int = -2) -> VisionTower:
    args = ModelArguments(mm_vision_select_layer=select_layer)
    return VisionTower(plan_tower(config, {}, "here", args), torch.zeros(3), torch.ones(3))


def test_a_clip_folder_fills_the_truncated_tower_exactly(toy_base):
    path = toy_base["vision_tower"]
    config = read_vision_config(path)
    for select_layer, layers in ((-2, 2), (-1, 3), (1, 1)):
        source = Source("--vision_tower", path, formats.tower_from_disk)
        files = source.open(lambda name, layers=layers: formats.runs_in_tower(name, layers))
        assert files.shapes == {name: tuple(p.shape) for name, p in tower(config, select_layer).named_parameters()}


def test_clip_names_are_read_with_and_without_prefix_and_beside_a_text_model():
    vision = CLIPVisionConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=3, num_attention_heads=2, image_size=8, patch_size=4
    )
    text = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
    both = CLIPModel(CLIPConfig(text_config=text, vision_config=vision.to_dict(), projection_dim=4))
    expected = {name for name, _ in tower(vision).named_parameters()}
    names = {formats.tower_from_disk(name) for name in both.state_dict()} - {None}
    assert {name for name in names if formats.runs_in_tower(name, 2)} == expected
    assert {name for name in names - expected} >= {"tower.post_layernorm.weight", "tower.encoder.layers.2.mlp.fc1.bias"}
    bare = {name.removeprefix("tower.") for name in expected}
    for prefix in ("", "vision_model."):
        assert {formats.tower_from_disk(prefix + name) for name in bare} == expected
        assert formats.tower_from_disk(f"{prefix}embeddings.position_ids") is None
    assert not formats.runs_in_tower("tower.encoder.layers.10.mlp.fc1.weight", 2)


def test_hugging_faces_names():
    assert formats.to_hf("projector.layers.0.weight") == "multi_modal_projector.linear_1.weight"
    assert formats.to_hf("projector.layers.2.bias") == "multi_modal_projector.linear_2.bias"
    assert formats.to_hf("vision_tower.tower.pre_layrnorm.bias") == "vision_tower.vision_model.pre_layrnorm.bias"
    assert formats.to_hf("language_model.model.norm.weight") == "language_model.model.norm.weight"
    assert formats.to_hf("language_model.lm_head.weight") == "language_model.lm_head.weight"


def test_what_is_written_under_hugging_faces_names_opens_with_nothing_missing_or_left_over(toy_base, tmp_path):
    text = AutoConfig.from_pretrained(toy_base["model_name_or_path"])
    vision = read_vision_config(toy_base["vision_tower"])
    parts = {
        "vision_tower": tower(vision, -1),
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
    final_norm = {f"model.vision_tower.post_layernorm.{kind}" for kind in ("weight", "bias")}  # runs in no tower here
    assert set(report["missing_keys"]) == final_norm and not report["unexpected_keys"] and not report["mismatched_keys"]
