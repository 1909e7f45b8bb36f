"""The trial of ready models: it finds nothing in a sound family, and refuses a copy that leaks, with the figure."""

import dataclasses
import json
import shutil

import pytest
import ready_models
import torch
from daily import few
from extension_there import if_there
from ready_models import FAMILIES, write_ready
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.constants import ConfigError
from llava_ds.engine.activation_checkpointing import checkpoint_layers
from llava_ds.extensions.ready import axes as native_resolution
from llava_ds.extensions.ready import delta_net, ready_trial
from llava_ds.extensions.ready import family as ready_family
from llava_ds.extensions.table import EXTENSIONS
from llava_ds.model import attention
from llava_ds.model.llava import LlavaModel
from llava_ds.model.open.model_plan import plan_model
from llava_ds.train.plan import _plan_model

DAILY = ("smolvlm", "qwen3_vl", "gemma4")  # of what is not tried with every family every day
QWEN_SETTINGS = ("patch_size 9, expected 8", "images of 9 to 9 pixels")


@pytest.fixture(scope="module", params=FAMILIES)
def planned(request, tmp_path_factory):
    """A family's plan and image options, and its folder."""
    folder = tmp_path_factory.mktemp(request.param)
    # Tied in one family, and another language model in another.
    text = {"tie_word_embeddings": request.param in ("smolvlm", "qwen2_5_vl")}
    if request.param == "internvl":
        text |= {"model_type": "qwen3", "head_dim": 16}
    model = ModelArguments(**write_ready(folder, request.param, **text), version="processor")
    plan = plan_model(model, 512)
    assert plan.text_config.tie_word_embeddings == text["tie_word_embeddings"]
    return plan, plan.tower.image_options(Arguments(model, DataArguments(), TrainingArguments(), frozenset())), folder


def test_a_pack_is_what_transformers_computes_one_by_one(planned):
    plan, images, folder = planned
    found = ready_trial.try_ready(plan, images, str(folder))
    assert found.problem() is None
    assert found.pixels == 0
    assert found.logits < 2e-5
    assert found.loss < 1e-6
    assert found.gradient < 1e-4


def test_tiles_that_patches_do_not_divide(monkeypatch, tmp_path):
    """As of SmolVLM 2.2B, whose tower leaves 6 of 384 pixels out."""
    monkeypatch.setitem(ready_models.VISION, "patch_size", 7)
    model = ModelArguments(**write_ready(tmp_path, "smolvlm"), version="processor")
    plan = plan_model(model, 512)
    images = plan.tower.image_options(Arguments(model, DataArguments(), TrainingArguments(), frozenset()))
    assert (images.side, plan.tower.num_patches) == (2, 16)
    assert ready_trial.try_ready(plan, images, str(tmp_path)).problem() is None


def test_a_leaking_copy_is_refused_with_the_figure(planned, monkeypatch, tmp_path):
    """One sample sees those before it in the pack, as where an attention does not know where samples begin."""
    plan, images, _folder = planned
    sound = attention.attend

    def leaking(query, key, value, bounds, rule, query_positions=None):
        whole = torch.tensor([0, int(bounds.queries[-1])], dtype=torch.int32)
        bounds, rule = attention.Bounds.of(whole, int(whole[-1])), rule._replace(lengths=None)
        return sound(query, key, value, bounds, rule, query_positions)

    monkeypatch.setattr(attention, "attend", leaking)
    monkeypatch.setattr("llava_ds.model.last_layer.attend", leaking)
    with pytest.raises(ConfigError, match=r"here: logits of a pack differ from single samples by (1 |[01]\.\d)"):
        ready_trial.check_ready(plan, images, str(tmp_path))
    assert not list(tmp_path.rglob("*.json"))  # a refusal is not remembered


@pytest.mark.parametrize("planned", few(FAMILIES, DAILY), indirect=True)
def test_wrong_features_are_refused(planned, tmp_path):
    """Of a family whose connector is called with the rows of an image in another order."""
    plan, images, _folder = planned
    family = plan.architecture.family

    def turned(connector, config, features):
        return family.connect(connector, config, features.flip(1 if features.shape[1] > 1 else 0))

    other = dataclasses.replace(plan.architecture, family=dataclasses.replace(family, connect=turned))
    wrong = dataclasses.replace(plan, tower=dataclasses.replace(plan.tower, architecture=other))
    with pytest.raises(ConfigError, match="logits of a pack differ"):
        ready_trial.check_ready(wrong, images, str(tmp_path))


@pytest.mark.parametrize("planned", ready_models.QWEN_PROCESSORS, indirect=True)
def test_positions_of_one_axis_are_refused(planned, monkeypatch, tmp_path):
    """As a trainer gives them that knows of one kind of positions only."""
    plan, images, _folder = planned

    def along_the_text(input_ids, cells):
        return torch.arange(len(input_ids)).expand(3, -1)

    monkeypatch.setattr(native_resolution, "axis_positions", along_the_text)
    with pytest.raises(ConfigError, match=r"logits of a pack differ from single samples by (1 |[01]\.\d)"):
        ready_trial.check_ready(plan, images, str(tmp_path))


@pytest.mark.parametrize("planned", [*ready_models.QWEN_PROCESSORS, "gemma4", "gemma4_e"], indirect=True)
def test_images_that_see_each_other_are_refused(planned, monkeypatch, tmp_path):
    """As where a tower is not told where an image ends."""
    plan, images, _folder = planned
    sound = attention.tower_attention

    def leaking(*args, cu_seq_lens_q, max_length_q, **options):
        whole = torch.tensor([0, int(cu_seq_lens_q[-1])], dtype=torch.int32)
        return sound(*args, cu_seq_lens_q=whole, max_length_q=int(whole[1]), **options)

    monkeypatch.setattr(attention, "tower_attention", leaking)
    with pytest.raises(ConfigError, match="logits of a pack differ"):
        ready_trial.check_ready(plan, images, str(tmp_path))


@pytest.mark.parametrize("planned", ["qwen3_5"], indirect=True)
def test_states_that_reach_the_next_sample_are_refused(planned, monkeypatch, tmp_path):
    """As of a trainer that tells attention alone where samples begin."""
    plan, images, _folder = planned
    monkeypatch.setattr(delta_net, "one_by_one", lambda forward, hidden_states, lengths: forward(hidden_states))
    with pytest.raises(ConfigError, match=r"here: logits of a pack differ from single samples by (1 |[01]\.\d)"):
        ready_trial.check_ready(plan, images, str(tmp_path))


@pytest.mark.parametrize("planned", ["gemma3", "gemma4"], indirect=True)
def test_images_that_see_what_is_before_them_alone_are_refused(planned, tmp_path):
    """As where a family's rule for image tokens is not known: causal as the text's."""
    plan, images, _folder = planned
    causal = dataclasses.replace(images, has_image_blocks=False)
    with pytest.raises(ConfigError, match=r"logits of a pack differ from single samples by (1 |[01]\.\d)"):
        ready_trial.check_ready(plan, causal, str(tmp_path))


@pytest.mark.parametrize("planned", ["gemma4"], indirect=True)
def test_images_that_see_each_other_in_every_layer_are_refused(planned, tmp_path):
    """As Gemma 3's, where Gemma 4's do in layers with a window alone."""
    plan, images, _folder = planned
    everywhere = dataclasses.replace(images, blocks_need_windows=False)
    with pytest.raises(ConfigError, match="logits of a pack differ"):
        ready_trial.check_ready(plan, everywhere, str(tmp_path))


@pytest.mark.parametrize("planned", ["gemma4_e"], indirect=True)
def test_embeddings_of_layers_are_paddings_at_images(planned, monkeypatch, tmp_path):
    """Not those of the id that a batch has there."""
    plan, images, _folder = planned
    monkeypatch.setattr(
        LlavaModel,
        "layer_inputs",
        lambda self, ids, places: {"per_layer_inputs": self.language_model.base_model.get_per_layer_inputs(ids)},
    )
    with pytest.raises(ConfigError, match="logits of a pack differ"):
        ready_trial.check_ready(plan, images, str(tmp_path))


@pytest.mark.parametrize("planned", ["gemma3", "gemma4"], indirect=True)
def test_images_without_their_windows_start_are_refused(planned, monkeypatch, tmp_path):
    """As where image tokens see all that is before them in layers with a window, too."""
    plan, images, _folder = planned
    sound = attention.attend_in_blocks

    def without_window(query, key, value, blocks, rule):
        return sound(query, key, value, blocks, rule._replace(window=None))

    monkeypatch.setattr(attention, "attend_in_blocks", without_window)
    with pytest.raises(ConfigError, match="logits of a pack differ"):
        ready_trial.check_ready(plan, images, str(tmp_path))


@pytest.mark.long
def test_layers_that_are_computed_once_more_have_the_same_gradients(planned, monkeypatch):
    """Of the tower, too, and of layers that read keys of others."""
    plan, images, folder = planned
    sound = ready_trial.assemble

    def checkpointed(*args):
        model = sound(*args).train()
        assert checkpoint_layers(model.language_model) and checkpoint_layers(model.vision_tower.tower)
        model.eval = lambda: model
        return model

    monkeypatch.setattr(ready_trial, "assemble", checkpointed)
    found = ready_trial.try_ready(plan, images, str(folder))
    assert found.problem() is None
    assert found.gradient < 1e-4


@pytest.mark.long
def test_a_frozen_tower_leaves_the_other_gradients(planned, monkeypatch):
    """They are transformers', and the tower has none."""
    plan, images, folder = planned
    sound = ready_trial.assemble

    def frozen(*args):
        model = sound(*args)
        model.vision_tower.requires_grad_(False)
        return model

    def of_the_rest(model, given, names):
        given = {name: parameter for name, parameter in given.items()}
        for name, parameter in model.vision_tower.named_parameters(prefix="vision_tower"):
            assert parameter.grad is None
            given[names.from_part(name)].grad = None
        return worst(model, given, names)

    worst = ready_trial._worst_gradient
    monkeypatch.setattr(ready_trial, "assemble", frozen)
    monkeypatch.setattr(ready_trial, "_worst_gradient", of_the_rest)
    found = ready_trial.try_ready(plan, images, str(folder))
    assert found.problem() is None
    assert found.gradient < 1e-4


@pytest.mark.parametrize("planned", few(FAMILIES, DAILY), indirect=True)
def test_the_result_is_kept(planned, monkeypatch, tmp_path):
    plan, images, folder = planned
    line = ready_trial.check_ready(plan, images, str(tmp_path))
    monkeypatch.setattr(ready_trial, "try_ready", None)
    assert ready_trial.check_ready(plan, images, str(tmp_path)) == f"{line} (tried before)"
    other = dataclasses.replace(images, resample=0)
    with pytest.raises(TypeError):  # tried again
        ready_trial.check_ready(plan, other, str(tmp_path))
    copied = tmp_path / "copied"
    shutil.copytree(folder, copied)
    again = plan_model(ModelArguments(model_name_or_path=str(copied), version="processor"), 512)
    again = dataclasses.replace(again, tokenizer=plan.tokenizer)  # with its template's variables
    assert ready_trial.check_ready(again, images, str(tmp_path)) == f"{line} (tried before)"
    settings = json.loads((copied / "processor_config.json").read_text())
    (copied / "processor_config.json").write_text(json.dumps({**settings, "new": 1}))
    with pytest.raises(TypeError):
        ready_trial.check_ready(again, images, str(tmp_path))
    with monkeypatch.context() as changed:
        changed.setattr(ready_trial, "OWN_CODE", ready_trial.OWN_CODE / "tracking")
        with pytest.raises(TypeError):
            ready_trial.check_ready(plan, images, str(tmp_path))
    assert ready_trial.check_ready(plan, images, str(tmp_path)) == f"{line} (tried before)"
    for library in ready_trial.LIBRARIES:
        monkeypatch.setattr(ready_trial, "versions_of", lambda names, other=library: [f"not this {other}"])
        with pytest.raises(TypeError):
            ready_trial.check_ready(plan, images, str(tmp_path))


@pytest.mark.parametrize("planned", few(FAMILIES, DAILY), indirect=True)
def test_settings_that_change_what_is_computed_are_refused(planned, tmp_path):
    plan, _, folder = planned
    kind = plan.architecture.config.model_type
    for name, value, wrong in (
        ("preprocessor_config.json", {"do_rescale": False}, "it says do_rescale false, expected true"),
        ("preprocessor_config.json", {"size": {"shortest_edge": 32}}, "expected"),
        ("preprocessor_config.json", {"do_image_splitting": 3, "max_patches": "x"}, "expected a value like"),
        ("preprocessor_config.json", {"do_pan_and_scan": True}, "do_pan_and_scan True, expected False"),
        (
            "processor_config.json",
            {ready_models.SAID_FEATURES.get(kind, "image_seq_len"): 9},
            "(a tile|an image) has 4",
        ),
        ("preprocessor_config.json", {"patch_size": 9}, "patch_size 9, expected 8"),
        ("preprocessor_config.json", {"min_pixels": 9, "max_pixels": 9}, "images of 9 to 9 pixels"),
    ):
        if (kind in ready_models.QWEN_PROCESSORS) != (wrong in QWEN_SETTINGS) and "do_rescale" not in wrong:
            continue
        if kind == "gemma4" and "do_rescale" not in wrong:
            continue
        if (kind == "gemma3" and "a value like" in wrong) or (kind != "gemma3" and "pan_and_scan" in wrong):
            continue
        for file in folder.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        if name == "processor_config.json":
            (tmp_path / name).write_text(json.dumps(json.loads((folder / name).read_text()) | value))
        else:
            ready_models.change_image_settings(tmp_path, **value)
        with pytest.raises(ConfigError, match=wrong):
            plan_model(ModelArguments(model_name_or_path=str(tmp_path), version="processor"), 512)
    assert ready_family.token_of(plan.tokenizer, plan.tokenizer.eos_token)


def test_ends_are_tied_as_transformers_ties_them(tmp_path):
    """A folder whose configuration ties both ends may hold both: they are one only where they are equal."""
    for name, equal in (("equal", True), ("other", False)):
        folder = tmp_path / name
        write_ready(folder, "internvl", tie_word_embeddings=True)
        tensors = load_file(folder / "model.safetensors")
        embedding = tensors["language_model.model.embed_tokens.weight"]
        tensors["language_model.lm_head.weight"] = embedding.clone() if equal else embedding + 1
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        plan = plan_model(ModelArguments(model_name_or_path=str(folder), version="processor"), 512)
        theirs = AutoModelForImageTextToText.from_pretrained(folder)
        tied = theirs.get_output_embeddings().weight is theirs.get_input_embeddings().weight
        assert plan.text_config.tie_word_embeddings == tied == equal


@pytest.mark.parametrize("planned", few(FAMILIES, DAILY), indirect=True)
@pytest.mark.parametrize("name", [*if_there("mixtures", ep_size=2)])
def test_ranks_that_share_are_refused_where_the_json_says_so(planned, name):
    """The JSON's sizes are known after the folder's flags."""
    _, _, folder = planned
    model = ModelArguments(model_name_or_path=str(folder), version="processor")
    args = Arguments(model, DataArguments(), TrainingArguments(), frozenset()).replaced(**{name: 2})
    with pytest.raises(ConfigError, match=f"a ready model needs .* leave --{name} 2 out"):
        _plan_model(args)


@pytest.mark.parametrize(
    ("file", "change", "wrong"),
    [
        ("preprocessor_config", {"patch_size": 9}, "cells of 2 x 2 patches of 9 pixels, but its vision_config says"),
        ("preprocessor_config", {"max_soft_tokens": 151}, "max_soft_tokens 151, expected 1 to 150"),
        ("preprocessor_config", {"do_normalize": True, "image_mean": [0.5, 0.5, 0.5]}, "image_mean"),
        ("text_config", {"use_bidirectional_attention": "all"}, "its attention has to be causal"),
        (
            "text_config",
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
            "llava_ds/extensions/mixtures was not found",
        ),
    ],
)
def test_what_of_gemma_4_is_refused(file, change, wrong, tmp_path, monkeypatch):
    monkeypatch.delitem(EXTENSIONS, "mixtures", raising=False)
    given = write_ready(tmp_path, "gemma4")
    if file == "text_config":
        content = json.loads((tmp_path / "config.json").read_text())
        content[file].update(change)
        (tmp_path / "config.json").write_text(json.dumps(content))
    else:
        ready_models.change_image_settings(tmp_path, **change)
    with pytest.raises(ConfigError, match=wrong):
        plan_model(ModelArguments(**given, version="processor"), 512)


def test_buffers_that_are_not_in_the_files_are_missed(tmp_path):
    """They are weights that no optimizer changes: a factor of every layer, and bounds of what a matrix is given."""
    given = write_ready(tmp_path, "gemma4_e")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.language_model.layers.1.layer_scalar"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"don't hold model\.language_model\.layers\.1\.layer_scalar"):
        plan_model(ModelArguments(**given, version="processor"), 512)


@pytest.mark.parametrize("flags", [{}, {"min_pixels": 2048, "max_pixels": 4096}])
def test_sizes_are_compared_with_the_processor_that_transformers_opens(tmp_path, flags):
    """And not with one that is told ours: with flags, with the one that opens from the files of the export."""
    model = ModelArguments(**write_ready(tmp_path / "model", "qwen3_vl"), version="processor")
    args = Arguments(model, DataArguments(), TrainingArguments(), frozenset(flags)).replaced(**flags)
    plan = plan_model(model, 512)
    images = plan.tower.image_options(args)
    assert ready_trial.try_ready(plan, images, "x").problem() is None
    wrong = dataclasses.replace(images.tiling, most=images.tiling.most // 2)
    if flags:  # as if an export wrote other bounds
        written = ready_trial.processor_files
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                ready_trial,
                "processor_files",
                lambda ready, options, *rest: written(ready, dataclasses.replace(options, tiling=wrong), *rest),
            )
            with pytest.raises(ConfigError, match=r"its image processor makes [\d,]+ patches of an image of .* report"):
                ready_trial.try_ready(plan, images, "x")
        return
    with pytest.MonkeyPatch.context() as patch:  # as if another file had been read
        patch.setattr(ready_trial, "sizes_differ", lambda *_: False)
        with pytest.raises(ConfigError, match=r"its image processor makes [\d,]+ patches of an image of .* report"):
            ready_trial.try_ready(plan, dataclasses.replace(images, tiling=wrong), "x")
