"""One model in every format and spelling that --model_name_or_path takes: the same weights, flags and logits."""

import json
from pathlib import Path

import llavas
import pytest
import torch
import toys
from exporting import export
from llavas import arguments, opened
from transformers import LlavaConfig

from llava_ds.constants import ConfigError, DataError
from llava_ds.data.collate import LoadedSample, collate
from llava_ds.geometry import ImageOptions, media_layout
from llava_ds.model.heads import Logits
from llava_ds.model.open.folder import read_folder, take_from_model
from llava_ds.model.open.model_plan import plan_model


def expected(model) -> dict[str, torch.Tensor]:
    """A Hugging Face model's tensors by the names here, of the tower what runs."""
    renamed = {}
    for name, tensor in llavas.tensors_of(model).items():
        if name.startswith("lm_head."):
            name = f"language_model.{name}"
        name = name.replace("model.language_model.", "language_model.model.", 1)
        name = name.replace("model.vision_tower.", "vision_tower.tower.", 1)
        name = name.replace("model.multi_modal_projector.linear_1", "projector.layers.0")
        name = name.replace("model.multi_modal_projector.linear_2", "projector.layers.2")
        renamed[name.replace("model.image_newline", "newline.embedding")] = tensor
    return renamed


def assert_equal(model, reference) -> None:
    want = expected(reference)
    have = dict(model.named_parameters())
    assert {name.split(".")[0] for name in have} == {name.split(".")[0] for name in want if name in have}
    assert [name for name, tensor in have.items() if not torch.equal(tensor, want[name])] == []
    assert any(name.startswith("projector.") for name in have)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> dict[str, str]:
    return toys.write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def llava(base):
    return llavas.hf_model(base)


WRITERS = {
    "hf": lambda folder, base, model: llavas.write_hf(folder, base, model),
    "hf, version 4's names": lambda folder, base, model: llavas.write_hf(folder, base, model, old=True),
    "hf, four pickles": lambda folder, base, model: llavas.write_hf(folder, base, model, suffix=".bin", shards=4),
    "hf as transformers saves it": lambda folder, base, model: saved(folder, base, model),
    "llava": lambda folder, base, model: llavas.write_llava(folder, base, model),
    "llava, as published": lambda folder, base, model: llavas.write_llava(
        folder, base, model, llavas.llava_config(base, "llava"), shards=3
    ),
    "llava, without its tower": lambda folder, base, model: llavas.write_llava(folder, base, model, with_tower=False),
    "llava, four pickles": lambda folder, base, model: llavas.write_llava(folder, base, model, suffix=".bin", shards=4),
    "llava, a pickle": lambda folder, base, model: llavas.write_llava(folder, base, model, suffix=".bin"),
}


def saved(folder: Path, base: dict[str, str], model) -> dict[str, str]:
    flags = llavas.write_hf(folder, base, model)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)
    return flags


@pytest.mark.parametrize("kind", WRITERS)
def test_every_parameter_arrives_whatever_the_format(kind, base, llava, tmp_path):
    model, plan, args = opened(WRITERS[kind](tmp_path / "model", base, llava))
    assert_equal(model, llava)
    assert plan.text_config.to_dict()["hidden_size"] == 32
    assert args.data.image_aspect_ratio == ("square" if kind.startswith("hf") else "pad")


def batch_for(plan, image_options: ImageOptions, ids: list[int], size: tuple[int, int] = (30, 22)):
    """A sample with one picture."""
    layout = media_layout("image", (size,), 1, image_options)
    generator = torch.Generator().manual_seed(3)
    side = plan.images.size
    pixels = torch.randint(0, 256, (layout.num_tiles, 3, side, side), dtype=torch.uint8, generator=generator)
    ids = torch.tensor([1, *ids, *[-200] * layout.num_tokens, 9, 8])
    return collate([LoadedSample(ids, ids, [(pixels, layout)])], image_options)


def test_the_same_batch_gives_the_same_logits_whatever_the_format(base, llava, tmp_path):
    flags = [write(tmp_path / f"m{i}", base, llava) for i, write in enumerate(WRITERS.values())]
    logits = []
    for given in flags:
        model, plan, _ = opened(given)
        image_options = ImageOptions(plan.images.size, plan.images.patch_size, plan.images.mean)
        batch = batch_for(plan, image_options, [5, 6])
        with torch.no_grad():
            logits.append(model(batch, Logits(torch.arange(batch.input_ids.shape[1]))))
    assert all(torch.equal(logits[0], other) for other in logits[1:])
    ids = batch.input_ids.clone()
    ids[0, batch.placing.positions] = 3
    pixels = (batch.pixel_values.float() / 255 - model.vision_tower.mean) / model.vision_tower.std
    with torch.no_grad():
        theirs = llava(input_ids=ids, pixel_values=pixels).logits[0]
    torch.testing.assert_close(logits[0], theirs, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("form", ["hf", "hf, version 4's names", "llava, as published"])
def test_tied_embeddings_and_qwen(form, tmp_path):
    base = toys.write_qwen_base(tmp_path / "base")
    model = llavas.hf_model(base)
    assert "lm_head.weight" not in llavas.tensors_of(model)
    config = llavas.llava_config(base, "llava", architectures=["LlavaQwenForCausalLM"])
    if form == "llava, as published":
        flags = llavas.write_llava(tmp_path / "model", base, model, config)
    else:
        flags = WRITERS[form](tmp_path / "model", base, model)
    loaded, plan, _ = opened(flags)
    assert plan.text_config.model_type == "qwen2" and plan.text_config.tie_word_embeddings
    text = loaded.language_model
    assert text.get_output_embeddings().weight is text.get_input_embeddings().weight
    assert_equal(loaded, model)


def test_files_with_an_output_layer_of_their_own_are_not_tied_by_half_a_configuration(base, llava, tmp_path):
    """Folders of transformers 4 often say tie_word_embeddings of one part and leave it out of the other."""
    flags = llavas.write_hf(tmp_path, base, llava)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"] = True, False
    file.write_text(json.dumps(config))
    model, plan, _ = opened(flags)
    assert not plan.text_config.tie_word_embeddings
    assert_equal(model, llava)


@pytest.mark.parametrize("kind", ["llava_next", "llava_onevision"])
@pytest.mark.parametrize("tower", ["clip", "siglip"])
def test_models_of_tiles_say_how_they_are_shown_pictures(kind, tower, base, tmp_path):
    base = {**base, "vision_tower": base["vision_tower"] if tower == "clip" else llavas.write_siglip(tmp_path / "s")}
    theirs = llavas.hf_model(base, kind)
    model, plan, args = opened(llavas.write_hf(tmp_path / "model", base, theirs, old=kind == "llava_next"))
    assert_equal(model, theirs)
    assert args.model.mm_patch_merge_type == "spatial_unpad"
    assert args.data.image_aspect_ratio == {"llava_next": "anyres", "llava_onevision": "anyres_max_9"}[kind]
    assert args.data.image_grid_pinpoints == "[(48,24),(24,48),(48,48)]"  # width first
    assert args.model.mm_vision_select_layer == (-2 if tower == "clip" else -1)
    image_options = plan.tower.image_options(args)
    size = (45, 46)
    batch = batch_for(plan, image_options, [5, 6], size)
    pixels = (batch.pixel_values.float() / 255 - model.vision_tower.mean) / model.vision_tower.std
    with torch.no_grad():
        logits = model(batch, Logits(torch.arange(batch.input_ids.shape[1])))
        more = {"batch_num_images": torch.tensor([1])} if kind == "llava_onevision" else {}
        ids = batch.input_ids.clone()
        ids[0, batch.placing.positions] = 3
        wanted = theirs(input_ids=ids, pixel_values=pixels[None], image_sizes=torch.tensor([size[::-1]]), **more)
    torch.testing.assert_close(logits, wanted.logits[0], atol=5e-5, rtol=5e-5)


def test_flags_are_taken_from_the_model_unless_they_are_given(base, llava, tmp_path):
    pinpoints = [[24, 48], [48, 24]]
    config = llavas.llava_config(
        base, image_aspect_ratio="anyres", image_grid_pinpoints=pinpoints, mm_patch_merge_type="spatial_unpad"
    )
    flags = llavas.write_llava(tmp_path, base, llava, config)
    args, lines = take_from_model(arguments(flags))
    assert args.data.image_grid_pinpoints == "[(24,48),(48,24)]"
    assert f"{tmp_path} is a LLaVA in LLaVA's format; taken from it: --mm_projector_type mlp2x_gelu" in lines[0]
    assert "--image_aspect_ratio anyres" in lines[0] and len(lines) == 1
    args, _ = take_from_model(arguments({**flags, "image_aspect_ratio": "pad", "mm_patch_merge_type": "flat"}))
    assert args.data.image_aspect_ratio == "pad" and args.data.image_grid_pinpoints is None
    assert args.model.mm_patch_merge_type == "flat"


def test_our_own_exports_say_the_template_and_the_pictures(base, llava, tmp_path):
    flags = llavas.write_hf(tmp_path, base, llava)
    file = tmp_path / "config.json"
    pictures = {"aspect_ratio": "pad", "pinpoints": [], "merge_type": "flat", "pool_stride": 1, "pool_mode": "average"}
    file.write_text(
        json.dumps({**json.loads(file.read_text()), "llava_ds_version": "chatml", "llava_ds_pictures": pictures})
    )
    args, _ = take_from_model(arguments(flags))
    assert (args.model.version, args.data.image_aspect_ratio) == ("chatml", "pad")
    assert (args.data.mm_spatial_pool_stride, args.data.mm_spatial_pool_mode) == (1, "average")


def test_a_flag_that_contradicts_the_projector_is_refused_unless_another_projector_is_brought(base, llava, tmp_path):
    flags = {**llavas.write_llava(tmp_path, base, llava), "mm_projector_type": "linear", "mm_vision_select_layer": -1}
    with pytest.raises(ConfigError) as caught:
        take_from_model(arguments(flags))
    first, second = str(caught.value).splitlines()
    assert first.startswith(f"--mm_projector_type linear contradicts the projector in {tmp_path}, trained with")
    assert second.startswith("--mm_vision_select_layer -1 contradicts")
    torch.save(
        {"model.mm_projector.weight": torch.ones(32, 16), "model.mm_projector.bias": torch.ones(32)}, tmp_path / "p.bin"
    )
    model, _, _ = opened({**flags, "pretrain_mm_mlp_adapter": str(tmp_path / "p.bin")})
    assert torch.equal(model.projector.layers[0].weight, torch.ones(32, 16))
    assert torch.equal(model.language_model.model.norm.weight, llava.model.language_model.norm.weight)


def test_a_llava_without_its_tower_wants_one_and_says_which(base, llava, tmp_path):
    flags = llavas.write_llava(tmp_path / "m", base, llava, with_tower=False)
    tower = flags.pop("vision_tower")
    with pytest.raises(ConfigError, match="it was trained with openai/clip-vit-large-patch14-336: name the tower's"):
        opened(flags)
    with pytest.raises(ConfigError, match="is a language model, and its tower is not on this machine: name"):
        opened({"model_name_or_path": base["model_name_or_path"]})
    config = llavas.llava_config(base, mm_vision_tower=tower)
    flags = llavas.write_llava(tmp_path / "m", base, llava, config, with_tower=False)
    del flags["vision_tower"]
    model, _, args = opened(flags)
    assert args.model.vision_tower == tower
    assert_equal(model, llava)


def test_a_trained_tower_in_the_models_folder_wins_over_the_towers(base, llava, tmp_path):
    tensors = llavas.llava_names(llavas.tensors_of(llava))
    name = "model.vision_tower.vision_tower.vision_model.pre_layrnorm.weight"
    tensors[name] = torch.full_like(tensors[name], 7.0)
    flags = llavas.write_llava(tmp_path, base, llava)
    llavas.write_tensors(tmp_path, tensors)
    model, plan, _ = opened(flags)
    assert (model.vision_tower.tower.pre_layrnorm.weight == 7).all()
    whole = {name: read() for name, read in plan.sources.whole_tower().tensors()}
    assert (whole["tower.pre_layrnorm.weight"] == 7).all() and "tower.encoder.layers.2.mlp.fc1.bias" in whole


def test_a_tower_of_another_width_or_shape_is_refused(base, llava, tmp_path):
    other = toys.write_base(tmp_path / "other", clip={"hidden_size": 32})["vision_tower"]
    flags = llavas.write_llava(tmp_path / "llava", base, llava)
    with pytest.raises(ConfigError, match=r"has features 32 wide, .*, 16 wide: give that one"):
        opened({**flags, "vision_tower": other})
    flags = llavas.write_hf(tmp_path / "hf", base, llava)
    with pytest.raises(ConfigError, match=r"is not the tower in .*: hidden_size 32 for 16: leave it out"):
        opened({**flags, "vision_tower": other})
    _, lines = take_from_model(arguments({**flags, "vision_tower": base["vision_tower"]}))
    assert lines[-1] == f"--vision_tower {base['vision_tower']} is not read: the model has its own tower weights"
    assert_equal(opened({**flags, "vision_tower": base["vision_tower"]})[0], llava)


def test_what_was_loaded_and_what_was_left_is_said(base, llava, tmp_path, capsys):
    tensors = llavas.llava_names(llavas.tensors_of(llava))
    tensors["model.vision_resampler.layers.0.weight"] = tensors["model.vision_resampler.layers.1.weight"] = torch.ones(
        2
    )
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    flags = llavas.write_llava(tmp_path, base, llava)
    llavas.write_tensors(tmp_path, tensors)
    opened(flags)
    said = capsys.readouterr().out
    assert f"projector: 4 tensors from {tmp_path}" in said
    assert f"language model: 21 tensors from {tmp_path}" in said
    assert "18 more belong to layers that never run" in said
    assert f"not used from {tmp_path}: model.vision_resampler.layers.* (2 tensors), computed tables (1 tensors)" in said


def test_a_newline_that_nobody_brings_starts_fresh_and_a_brought_one_arrives(base, llava, tmp_path, capsys):
    config = llavas.llava_config(base, mm_patch_merge_type="spatial_unpad", image_aspect_ratio="anyres")
    flags = llavas.write_llava(tmp_path, base, llava, config)
    model, _, _ = opened(flags)
    assert "the newline starts from random numbers" in capsys.readouterr().out
    tensors = {**llavas.llava_names(llavas.tensors_of(llava)), "model.image_newline": torch.arange(32.0)}
    llavas.write_tensors(tmp_path, tensors)
    model, _, _ = opened(flags)
    assert torch.equal(model.newline.embedding, torch.arange(32.0))


@pytest.mark.parametrize("form", ["hf", "llava"])
@pytest.mark.parametrize("lost", ["projector.linear_1.bias", "language_model.norm.weight", "layers.0.mlp.fc1.weight"])
def test_a_missing_weight_is_refused_before_data_are_read(form, lost, base, llava, tmp_path):
    tensors = llavas.tensors_of(llava)
    [name] = [name for name in tensors if name.endswith(lost)]
    del tensors[name]
    flags = WRITERS[form](tmp_path, base, llava)
    llavas.write_tensors(tmp_path, tensors if form == "hf" else llavas.llava_names(tensors))
    args, _ = take_from_model(arguments(flags))
    with pytest.raises(DataError, match=f"--model_name_or_path {tmp_path} does not fit the model: 1 tensors missing"):
        plan_model(args.model, 512)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("[1]", "config.json can't be read"),
        ("{", "config.json can't be read"),
        ('{"model_type": "llava_mpt"}', "is LLaVA's MPT: it is not supported"),
        ('{"model_type": "llava", "architectures": ["X"]}', "architectures is 'X', expected one of LlavaLlama"),
        (
            '{"model_type": "llava_llama", "num_attention_heads": 0, "rope_scaling": {"type": "x"}}',
            "config.json says num_attention_heads 0: expected a whole number from 1",
        ),
        (
            '{"model_type": "llava_llama", "hidden_size": "x"}',
            "config.json is not what transformers expects",
        ),
        (
            '{"model_type": "llava", "text_config": {"model_type": "x"}}',
            "config.json is not what transformers expects (Unrecognized model type",
        ),
        ('{"model_type": "llama", "quantization_config": {"bits": 4}}', "is quantized: give the unquantized model"),
        ('{"model_type": "t5"}', "is a t5: expected a causal language model"),
        (None, "has no config.json: expected the folder of a language model or of a LLaVA"),
    ],
)
def test_folders_that_hold_nothing_usable_are_refused_in_one_message(config, expected, llava, base, tmp_path):
    llavas.write_llava(tmp_path, base, llava)
    (tmp_path / "config.json").unlink()
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(ConfigError) as caught:
        read_folder(str(tmp_path))
    assert str(caught.value).startswith(f"--model_name_or_path {tmp_path}") and expected in str(caught.value)


def test_the_folder_of_stage_1_names_the_flag_that_takes_it(tmp_path):
    torch.save({}, tmp_path / "mm_projector.bin")
    with pytest.raises(ConfigError, match="it is stage 1's output: name it in --pretrain_mm_mlp_adapter"):
        read_folder(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llava_llama"}')  # as stage 1 does leave it
    with pytest.raises(ConfigError, match="holds only a projector: it is stage 1's output"):
        read_folder(str(tmp_path))


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"projector_hidden_act": "relu"}, "its projector is not two layers with biases around a GELU"),
        ({"multimodal_projector_bias": False}, "its projector is not two layers with biases around a GELU"),
        ({"vision_feature_layer": [-2, -3]}, "vision_feature_layer is [-2, -3], several layers at once"),
    ],
)
def test_hugging_faces_llavas_of_another_make_are_refused(changed, expected, llava, base, tmp_path):
    flags = llavas.write_hf(tmp_path, base, llava)
    LlavaConfig.from_dict({**llava.config.to_dict(), **changed}).save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as caught:
        take_from_model(arguments(flags))
    assert f"--model_name_or_path {tmp_path} can't be trained here: " in str(caught.value)
    assert expected in str(caught.value)


def test_values_that_are_not_here_ask_for_the_flag(llava, base, tmp_path):
    flags = llavas.write_llava(tmp_path, base, llava, llavas.llava_config(base, mm_patch_merge_type="spatial_max"))
    with pytest.raises(
        ConfigError, match=r"says mm_patch_merge_type 'spatial_max': Input should be 'flat'.*; give --mm_patch"
    ):
        take_from_model(arguments(flags))
    assert take_from_model(arguments({**flags, "mm_patch_merge_type": "flat"}))[0].model.mm_patch_merge_type == "flat"
    flags = llavas.write_llava(tmp_path, base, llava, llavas.llava_config(base, mm_resampler_type="perceiver"))
    with pytest.raises(ConfigError, match="has a perceiver resampler between tower and projector"):
        take_from_model(arguments(flags))


@pytest.mark.parametrize("family", ["qwen3", "phi3", "gpt2"])
def test_families_without_a_class_of_llavas_are_read_again_from_its_format(family, tmp_path):
    """Also where transformers' own reading of the tokenizer's folder trips over the rotary angles (Phi-3)."""
    flags = {**toys.write_language_model(tmp_path / "llm", family), **toys.write_tower(tmp_path / "tower")}
    model, plan, args = opened({**flags, "version": "v1"})
    export(model, plan, args.model, plan.tower.image_options(args), tmp_path / "llava", "llava")
    again, _, said = opened({**flags, "model_name_or_path": str(tmp_path / "llava")})
    assert said.model.version == "v1" and said.model.mm_projector_type == args.model.mm_projector_type
    assert dict(again.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters()))
