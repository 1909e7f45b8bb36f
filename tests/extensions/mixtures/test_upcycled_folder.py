"""The folder of an upcycled model opens again, for training and for answers, and computes what the model did."""

import json
from pathlib import Path

import pytest
import torch
import toys
from exporting import export
from llavas import opened
from safetensors.torch import load_file

from llava_ds.constants import ConfigError
from llava_ds.export.export_plan import hf_kind
from llava_ds.extensions.infer.load import load_model
from llava_ds.extensions.mixtures.upcycled import expert_layers

MOE = {"moe_enable": True, "num_experts": 4, "top_k_experts": 2}
# Name: family, flags, form, model_type of what is written.
KINDS = {
    "all": ("llama", {"moe_mode": "dense"}, "llava", "moe_llava_llama"),
    "some": ("llama", {"moe_mode": "sparse"}, "llava", "moe_llava_llama"),
    "residual": ("qwen2", {"use_residual": True}, "llava", "moe_llava_qwen"),
    "phi": ("phi3", {"top_k_experts": 3}, "llava", "moe_llava_phi3"),
    "mixtral": ("llama", {"moe_mode": "dense"}, "hf", "mixtral"),
    "qwen3_moe": ("qwen3", {"moe_mode": "sparse"}, "hf", "qwen3_moe"),
}


@pytest.fixture(scope="module", params=KINDS)
def written(request, tmp_path_factory):
    """Name, folder, the flags that name it, and the logits of the model that was written."""
    family, flags, form, _ = KINDS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    base = toys.write_base(folder / "base", family=family)
    model, plan, args = opened({**base, **MOE, **flags})
    with torch.no_grad():
        for parameter in model.language_model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    export(model, plan, args.model, plan.tower.image_options(args), folder / "out", form)
    given = {"model_name_or_path": str(folder / "out")}
    given |= {} if form == "hf" else {"vision_tower": base["vision_tower"]}
    return request.param, folder / "out", given, logits(model.language_model.eval())


@torch.no_grad()
def logits(language_model: torch.nn.Module) -> torch.Tensor:
    ids = torch.arange(5, 45)[None]
    segments = {"cu_seqlens": torch.tensor([0, 40], dtype=torch.int32), "max_seqlen": 40}
    options = segments if "llava_ds" in str(language_model.config._attn_implementation) else {}
    return language_model(input_ids=ids, position_ids=torch.arange(40)[None], use_cache=False, **options).logits


def test_training_goes_on_from_it(written):
    name, _, given, expected = written
    model, plan, _ = opened(given)
    assert plan.text_config.model_type in (KINDS[name][0], KINDS[name][3])
    assert bool(expert_layers(model)) == (KINDS[name][2] == "llava")
    found = logits(model.language_model.eval())[..., : expected.shape[-1]]  # a llava-hf folder has a row for <image>
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_it_answers(written):
    _, folder, given, expected = written
    moved = {name: path for name, path in given.items() if name == "vision_tower"}
    model = load_model(folder, "cpu", moved=moved).model
    with torch.no_grad():
        found = model(input_ids=torch.arange(5, 45)[None]).logits[..., : expected.shape[-1]]
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


def test_its_names_are_those_of_its_format(written):
    name, folder, *_ = written
    config = json.loads((folder / "config.json").read_text())
    form, model_type = KINDS[name][2:]
    names = set(load_file(folder / "model.safetensors"))
    if form == "hf":
        assert config["text_config"]["model_type"] == model_type and "moe" not in config["text_config"]
        assert not any("deepspeed" in each for each in names)
        return
    assert config["model_type"] == model_type and config["moe"]["num_experts"][0] == 4
    layer = config["moe"]["moe_layers_idx"][0]
    assert f"model.layers.{layer}.mlp.deepspeed_moe.gate.wg.weight" in names
    assert (f"model.layers.{layer}.mlp.coefficient.weight" in names) == (name == "residual")


def test_experts_over_experts_are_refused(written):
    _, _, given, _ = written
    with pytest.raises(ConfigError, match="already has experts: leave --moe_enable out"):
        opened({**given, **MOE})


def test_the_reason_for_llavas_format_is_said(tmp_path):
    _, plan, args = opened({**toys.write_base(tmp_path), **MOE})
    kind, why = hf_kind(plan, args.model, plan.tower.image_options(args))
    assert kind is None and "a llama with experts in only some of its layers" in why
    assert Path(args.model.model_name_or_path).is_dir()
