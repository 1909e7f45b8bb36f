"""The value head reads the last hidden state, travels with the model, and starts from zeros."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import toys
from exporting import export, export_plan
from llavas import arguments, hf_model
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from llava_ds.config.arguments import ModelArguments
from llava_ds.constants import ConfigError
from llava_ds.data.collate import collate
from llava_ds.engine.construct import build_model
from llava_ds.engine.param_groups import choose_trainable, parameter_groups
from llava_ds.export.from_folder import open_folder
from llava_ds.export.output_folder import write_folder
from llava_ds.export.trial import try_export
from llava_ds.model.open.model_plan import plan_model
from llava_ds.model.open.names import VALUE_HEAD_FILE
from llava_ds.model.open.value_head import Values
from llava_ds.runtime.ranks import Ranks
from llava_ds.second_models.frozen import open_frozen, plan_frozen

RANKS = Ranks(0, 0, 1, torch.device("cpu"))
STAGE_0 = {"zero_optimization": {"stage": 0}}


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    base = toys.write_base(folder / "base")
    args = arguments(base)
    plan = plan_model(args.model, 512, value_head=True)
    model = build_model(plan, args.model, STAGE_0, torch.float32, 0, RANKS)
    fresh = model.value_head.weight.detach().clone()
    torch.manual_seed(3)
    torch.nn.init.normal_(model.value_head.weight)
    images = plan.tower.image_options(args)
    data = toys.encoded(
        **toys.write_data(folder / "data", "iti"), tokenizer=plan.tokenizer, cache_dir=folder / "cache", images=images
    )
    batch = collate([data[i] for i in range(3)], images)
    for form in ("hf", "llava"):
        export(model, plan, args.model, images, folder / form, form)
    return SimpleNamespace(
        folder=folder, base=base, args=args, plan=plan, model=model, fresh=fresh, images=images, data=data, batch=batch
    )


def test_it_starts_from_zeros_whatever_its_constructor_left(toy):
    assert toy.fresh.shape == (1, 32) and not toy.fresh.any()


def test_it_takes_the_last_hidden_state_at_the_positions(toy):
    """Of transformers' own model, one sample at a time; the model's last layer is computed at the positions alone."""
    reference = hf_model(toy.base)
    last = toy.batch.cu_seqlens[1:].long() - 1
    found = toy.model(toy.batch, Values(last))
    assert found.dtype == torch.float32 and found.shape == (3,)
    whole = []
    for i in (0, 1, 2):
        sample = toy.data[i]
        embeds = toy.model.embed(collate([sample], toy.images))
        hidden = reference.model.language_model(inputs_embeds=embeds).last_hidden_state[0]  # (T, D)
        whole.append(hidden[-1] @ toy.model.value_head.weight[0])
    torch.testing.assert_close(found, torch.stack(whole), rtol=0, atol=1e-5)
    assert toy.plan.whole_last_layer is None  # else nothing was tried


def test_a_rank_without_positions_takes_part_with_gradients_of_zero(toy):
    toy.model.zero_grad()
    toy.model(toy.batch, Values(toy.batch.target_positions[:0])).sum().backward()
    assert toy.model.value_head.weight.grad.abs().sum() == 0
    layer = toy.model.language_model.model.layers[0].self_attn.q_proj.weight
    assert layer.grad is not None and not layer.grad.any()
    toy.model.zero_grad()


@pytest.mark.parametrize("form", ["hf", "llava"])
def test_an_exported_folder_has_it_beside_what_others_open(toy, form):
    folder = toy.folder / form
    assert torch.equal(load_file(folder / VALUE_HEAD_FILE)["weight"], toy.model.value_head.weight)
    assert not any("value_head" in name for name in load_file(folder / "model.safetensors"))
    if form == "hf":
        _, report = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"]


@pytest.mark.parametrize("form", ["hf", "llava"])
def test_a_frozen_model_from_the_folder_gives_the_same_values(toy, form, tmp_path):
    folder = toy.folder / form
    if form == "llava":  # through the conversion, which takes the head along
        plan, entries, _ = open_folder(folder, {"vision_tower": toy.base["vision_tower"]}, None, "hf")
        folder = tmp_path / "converted"
        folder.mkdir()
        write_folder(plan, entries, folder)
    planned = plan_frozen("--reward_model_name_or_path", str(folder), toy.plan, toy.images, 512, value_head=True)
    frozen = open_frozen(planned, torch.float32, RANKS)
    assert not frozen.training and not any(p.requires_grad for p in frozen.parameters())
    at = toy.batch.target_positions
    with torch.no_grad():
        assert torch.equal(frozen(toy.batch, Values(at)), toy.model(toy.batch, Values(at)))


def test_a_reference_needs_no_head(toy):
    planned = plan_frozen("--ref_model_name_or_path", str(toy.folder / "hf"), toy.plan, toy.images, 512)
    assert not hasattr(open_frozen(planned, torch.float32, RANKS), "value_head")


def test_a_reference_without_rows_for_the_runs_tokens_is_refused(tmp_path):
    """The same tokenizer over an embedding that was not grown."""
    base = toys.write_base(tmp_path / "base")
    toys.add_plain_tokens(Path(base["model_name_or_path"]), "<left>", "<right>")
    plans = {}
    for name, flags in (("short", {}), ("grown", {"resize_token_embeddings": True})):
        args = arguments({**base, **flags})
        plan = plan_model(args.model, 512)
        images = plan.tower.image_options(args)
        plans[name] = plan, images
        model = build_model(plan, args.model, STAGE_0, torch.float32, 0, RANKS)
        export(model, plan, args.model, images, tmp_path / name, "llava")
    config = json.loads((tmp_path / "short" / "config.json").read_text())
    for name in plans:  # as they lie beside each other on a user's machine
        file = tmp_path / name / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "mm_vision_tower": base["vision_tower"]}))
    assert config["vocab_size"] == 400
    plan_frozen("--ref_model_name_or_path", str(tmp_path / "grown"), *plans["grown"], 512)
    plan_frozen("--ref_model_name_or_path", str(tmp_path / "short"), *plans["short"], 512)
    with pytest.raises(ConfigError, match="its embedding has no row for 2 tokens, the first is '<left>'"):
        plan_frozen("--ref_model_name_or_path", str(tmp_path / "short"), *plans["grown"], 512)


def test_a_frozen_model_that_reads_something_else_is_refused(toy, tmp_path):
    plain = build_model(plan_model(toy.args.model, 512), toy.args.model, STAGE_0, torch.float32, 0, RANKS)
    export(plain, plan_model(toy.args.model, 512), toy.args.model, toy.images, tmp_path / "plain")
    refused = {
        "has no value_head.safetensors": (str(tmp_path / "plain"), toy.plan, toy.images),
        "aspect_ratio of images is square, and pad here": (
            str(toy.folder / "hf"),
            toy.plan,
            dataclasses.replace(toy.images, aspect_ratio="pad"),
        ),
    }
    other = toys.write_base(tmp_path / "other")
    toys.add_tokens(Path(other["model_name_or_path"]), "<new>")
    refused["here (1 tokens, the first is '<new>')"] = (
        str(toy.folder / "hf"),
        dataclasses.replace(toy.plan, tokenizer=plan_model(ModelArguments(**other), 512).tokenizer),
        toy.images,
    )
    for message, given in refused.items():
        with pytest.raises(ConfigError, match="--reward_model_name_or_path") as raised:
            plan_frozen("--reward_model_name_or_path", *given, 512, value_head=True)
        assert message in str(raised.value)


def test_it_trains_at_the_language_models_rate_and_the_output_layer_does_not(toy):
    choose_trainable(toy.model, toy.args)
    groups = parameter_groups(toy.model, toy.args)
    of_language = next(group for group in groups if group["name"] == "language_model")
    assert any(p is toy.model.value_head.weight for p in of_language["params"])
    assert not toy.model.language_model.get_output_embeddings().weight.requires_grad
    toy.model.requires_grad_(True)


def test_the_trial_counts_it(toy, tmp_path):
    line = try_export(export_plan(toy.model, toy.plan, toy.args.model, toy.images), tmp_path)
    plain = dataclasses.replace(toy.plan, has_value_head=False)
    without = try_export(export_plan(toy.model, plain, toy.args.model, toy.images), tmp_path)
    count = [int(text.split("will have ")[1].split()[0]) for text in (line, without)]
    assert count[0] == count[1] + 1
