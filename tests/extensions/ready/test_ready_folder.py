"""Folders of ready models: what is read from them, and what is refused with one message."""

import dataclasses
import json

import pytest
import torch
import toys
from extension_there import needs_extension
from known_flags import needs
from ready_models import FAMILIES, turn_experts, write_ready
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments, trained_parts
from llava_ds.constants import ConfigError
from llava_ds.extensions.ready.architecture import COMPOSING_FLAGS
from llava_ds.extensions.ready.tensor_names import ReadyNames, names_in_folder
from llava_ds.extensions.table import EXTENSIONS
from llava_ds.model.open.folder import read_folder, take_from_model
from llava_ds.model.open.model_plan import plan_model


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    write_ready(path, request.param)
    return path


def taken(folder, **flags):
    """take_from_model's flags for a folder and given flags."""
    args = Arguments(ModelArguments(), DataArguments(), TrainingArguments(), frozenset(flags))
    args = args.replaced(model_name_or_path=str(folder), **flags)
    return take_from_model(args)[0]


def test_every_tensor_has_its_part_and_its_name(folder):
    read = read_folder(str(folder))
    names = ReadyNames(read.architecture, read.text_config)
    on_disk = load_file(folder / "model.safetensors").keys()
    known = names_in_folder(names, on_disk)
    beside = {name for name in on_disk if names.is_unused_part(names.to_memory(name))}
    assert any("audio_tower" in name for name in beside) == (
        read.architecture.config.to_dict().get("audio_config") is not None
    )
    assert sorted(known.values()) == sorted(on_disk - beside)
    assert {names.to_memory(name): names.from_part(part) for part, name in known.items()} == {
        name: name
        for name in names.in_memory
        if not names.is_unused_part(name) and not (read.text_config.tie_word_embeddings and name == "lm_head.weight")
    }
    for part, prefix in (("vision_tower", "tower."), ("projector", "connector."), ("language_model", "")):
        source = getattr(read, part)
        assert set(source.files().shapes) == {
            name.removeprefix(f"{part}.") for name in known if name.startswith(f"{part}.{prefix}")
        }


@needs_extension("mixtures")
def test_experts_are_read_in_either_order_of_their_axes(tmp_path):
    """As published, and as transformers 5 saves them."""
    write_ready(tmp_path, "qwen3_vl_moe")
    config = read_folder(str(tmp_path)).text_config
    name, inner, width = "model.layers.0.mlp.experts.gate_up_proj", config.moe_intermediate_size, config.hidden_size
    found = []
    for rows in (width, 2 * inner):
        on_disk = load_file(tmp_path / "model.safetensors")[name.replace("model.", "model.language_model.", 1)]
        assert on_disk.shape[1] == rows
        weights = read_folder(str(tmp_path)).language_model.open()
        assert weights.shapes[name] == (config.num_experts, 2 * inner, width)
        found.append({name: read() for name, read in weights.tensors()})
        turn_experts(tmp_path)
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path).model.language_model.state_dict()
    for tensors in found:
        assert all(torch.equal(tensors[f"model.{name}"], tensor) for name, tensor in theirs.items())


@needs_extension("mixtures")
def test_experts_in_separate_tensors_are_refused(tmp_path):
    """As transformers saves Qwen3.5-MoE by default; published folders have one tensor for a layer's experts."""
    write_ready(tmp_path, "qwen3_5_moe")
    AutoModelForImageTextToText.from_pretrained(tmp_path).save_pretrained(tmp_path, save_original_format=False)
    read_folder(str(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    stacked = tensors.pop("model.language_model.layers.0.mlp.experts.down_proj")
    for i, matrix in enumerate(stacked):
        tensors[f"model.language_model.layers.0.mlp.experts.{i}.down_proj.weight"] = matrix.clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"its experts are separate tensors \(.*expected one tensor for all"):
        read_folder(str(tmp_path))


def test_heads_for_several_tokens_are_left_out(tmp_path):
    """Which published folders of Qwen3.5 have, and transformers' class has not."""
    given = write_ready(tmp_path, "qwen3_5")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["mtp.fc.weight"] = torch.zeros(32, 64)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    read = read_folder(str(tmp_path))
    known = names_in_folder(ReadyNames(read.architecture, read.text_config), tensors)
    assert set(tensors) - set(known.values()) == {"mtp.fc.weight"}
    plan_model(ModelArguments(**given, version="processor"), 512)


def test_the_folder_gives_the_template(folder):
    assert taken(folder).model.version == "processor"
    assert taken(folder, version="processor").model.version == "processor"


def test_flags_of_llavas_own_composition_are_refused(folder):
    values = {"version": "v1", "vision_tower": str(folder), "image_aspect_ratio": "pad", "s2": True}
    with pytest.raises(ConfigError) as refused:
        taken(folder, **values)
    for name in values:
        assert name in COMPOSING_FLAGS
        assert f"--{name}" in str(refused.value)
    assert "leave them out" in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        pytest.param({"ep_size": 2}, "a ready model needs .* leave --ep_size 2 out", marks=needs("ep_size")),
        pytest.param({"moe_enable": True}, "a ready model .* leave --moe_enable True out", marks=needs("moe_enable")),
    ],
)
def test_what_is_not_tried_is_refused(folder, flags, message):
    with pytest.raises(ConfigError, match=message):
        taken(folder, **flags)


@pytest.mark.parametrize("kind", ["glm4v", "gemma4_unified", "mllama"])
def test_other_ready_models_are_refused_by_name(tmp_path, kind):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(ConfigError, match=f"is a {kind}, but these can't be trained here yet .*: give one of idefics3"):
        read_folder(str(tmp_path))


def test_experts_without_the_extension_for_them_are_refused(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl_moe"}))
    monkeypatch.delitem(EXTENSIONS, "mixtures", raising=False)
    with pytest.raises(
        ConfigError, match="is a qwen3_vl_moe and needs llava_ds/extensions/mixtures, which was not found"
    ):
        read_folder(str(tmp_path))


def test_a_folder_without_a_chat_template_is_refused(tmp_path):
    write_ready(tmp_path, "smolvlm")
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="has no chat template"):
        plan_model(ModelArguments(model_name_or_path=str(tmp_path), version="processor"), 512)


def test_a_config_without_a_part_is_refused(tmp_path):
    write_ready(tmp_path, "internvl")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["vision_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="has no vision_config: copy it again"):
        read_folder(str(tmp_path))


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ({"tune_mm_llm": True}, {"language_model"}),
        ({"tune_mm_vision": False, "tune_mm_mlp": True, "tune_mm_llm": True}, {"projector", "language_model"}),
        ({"tune_mm_vision": True}, {"vision_tower"}),
        ({"mm_tunable_parts": "mm_vision_tower,mm_mlp_adapter"}, {"vision_tower", "projector"}),
        ({}, {"projector", "language_model"}),
    ],
)
def test_the_vendors_flags_say_what_trains(flags, parts):
    assert trained_parts(dataclasses.replace(ModelArguments(), **flags)) == parts


def test_a_language_model_with_embeddings_of_layers_has_no_place_in_a_llava(tmp_path, tokenizer):
    """transformers' Llava gives a language model no ids; as a part of the whole Gemma 4 it is trained."""
    text = {
        "vocab_size": len(tokenizer),
        "vocab_size_per_layer_input": len(tokenizer),
        "hidden_size_per_layer_input": 8,
    }
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16, "global_head_dim": 16}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma4_text", **sizes, **text))
    model.save_pretrained(tmp_path / "llm")
    tokenizer.save_pretrained(tmp_path / "llm")
    given = {"model_name_or_path": str(tmp_path / "llm"), **toys.write_tower(tmp_path / "tower")}
    with pytest.raises(ConfigError, match="gemma4_text: its layers have their own token embeddings"):
        plan_model(ModelArguments(**given), 512)
