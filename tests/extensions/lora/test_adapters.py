"""LoRA adapters to start from, against peft's own merge; and what LLaVA leaves beside them."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import llavas
import pytest
import torch
import toys
from llavas import arguments, opened
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from llava_ds.constants import ConfigError, DataError
from llava_ds.export import reload_check
from llava_ds.export.layer_by_layer import Deadline, NotCompared, TooSlow
from llava_ds.extensions.lora import adapter_export
from llava_ds.extensions.lora.merged_adapters import Adapter, read_adapter
from llava_ds.model.open.folder import take_from_model
from llava_ds.model.open.model_plan import plan_model

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
KINDS = {
    "plain": {},
    "every layer at its own rank and alpha": {
        "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 3}, "alpha_pattern": {"k_proj": 7}
    },
    "rank-stabilised, with biases": {"use_rslora": True, "bias": "lora_only"},
    "whole modules saved": {"modules_to_save": ["lm_head"]},
    "with lengths of rows": {"use_dora": True, "rank_pattern": {"q_proj": 2}},
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> dict[str, str]:
    return toys.write_base(tmp_path_factory.mktemp("base"), attention_bias=True)


def write_adapter(folder: Path, base_model, seed: int = 0, **config: object) -> dict[str, torch.Tensor]:
    """A random adapter as peft saves it; returns the merged weights that peft makes of it."""
    torch.manual_seed(seed)
    settings = {"r": 4, "lora_alpha": 6, "target_modules": LINEAR, "task_type": "CAUSAL_LM", **config}
    model = get_peft_model(base_model, LoraConfig(**settings))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn_like(parameter) * 0.2 if "lora_" in name else parameter.data + 0.5
    model.save_pretrained(folder)
    return {name: tensor.clone() for name, tensor in model.merge_and_unload().state_dict().items()}


def make_llavas(folder: Path, base: dict[str, str], **more: object) -> dict[str, torch.Tensor]:
    """Beside the adapter, what LLaVA's LoRA run leaves."""
    torch.manual_seed(1)
    projector = {
        f"base_model.model.model.mm_projector.{layer}.{kind}": torch.randn(shape)
        for layer, width in ((0, 16), (2, 32))
        for kind, shape in (("weight", (32, width)), ("bias", (32,)))
    }
    torch.save({**projector, **more}, folder / "non_lora_trainables.bin")
    (folder / "config.json").write_text(json.dumps(llavas.llava_config(base, image_aspect_ratio="pad")))
    return projector


def language_model(base: dict[str, str]):
    return AutoModelForCausalLM.from_pretrained(base["model_name_or_path"])


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_merged_as_peft_merges_it(kind, base, tmp_path, capsys):
    merged = write_adapter(tmp_path, language_model(base), **KINDS[kind])
    projector = make_llavas(tmp_path, base)
    flags = {"model_name_or_path": str(tmp_path), "vision_tower": base["vision_tower"]}
    model, plan, args = opened({**flags, "model_base": base["model_name_or_path"]})
    have = dict(model.language_model.named_parameters())
    plain = dict(language_model(base).named_parameters())
    for name, tensor in have.items():
        torch.testing.assert_close(tensor, merged[name], atol=1e-6, rtol=1e-6)
    assert any(not torch.allclose(tensor, plain[name]) for name, tensor in have.items())
    assert torch.equal(model.projector.layers[2].bias, projector["base_model.model.model.mm_projector.2.bias"])
    assert (args.data.image_aspect_ratio, args.model.mm_projector_type) == ("pad", "mlp2x_gelu")
    assert plan.tokenizer.name_or_path == base["model_name_or_path"]
    said = capsys.readouterr().out
    assert f"LoRA of {tmp_path}/adapter_model.safetensors merged into 14 tensors" in said


def test_the_base_is_the_one_that_the_adapter_names_unless_a_flag_does(base, tmp_path):
    merged = write_adapter(tmp_path, language_model(base))  # peft writes the path
    make_llavas(tmp_path, base)
    flags = {"model_name_or_path": str(tmp_path), "vision_tower": base["vision_tower"]}
    model, _, args = opened(flags)
    assert args.model.model_base == base["model_name_or_path"]
    name = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(dict(model.language_model.named_parameters())[name], merged[name])
    with pytest.raises(
        ConfigError, match=r"is a LoRA adapter itself, .* Continue training it with --lora_weight_path .* over"
    ):
        opened({**flags, "lora_enable": True})
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "lmsys/vicuna-7b-v1.5"
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"is a LoRA adapter of lmsys/vicuna-7b-v1.5, but that folder is not on"):
        opened(flags)
    with pytest.raises(ConfigError, match=r"--model_base .* needs an adapter, but --model_name_or_path"):
        opened({**flags, "model_name_or_path": base["model_name_or_path"], "model_base": str(tmp_path)})


def test_an_old_pickle_of_a_language_models_adapter_leaves_the_projector_to_chance(base, tmp_path, capsys):
    merged = write_adapter(tmp_path, language_model(base))
    from safetensors.torch import load_file

    torch.save(load_file(tmp_path / "adapter_model.safetensors"), tmp_path / "adapter_model.bin")
    (tmp_path / "adapter_model.safetensors").unlink()
    model, _, _ = opened({"model_name_or_path": str(tmp_path), "vision_tower": base["vision_tower"]})
    name = "model.layers.1.mlp.down_proj.weight"
    torch.testing.assert_close(dict(model.language_model.named_parameters())[name], merged[name])
    assert "the projector starts from random numbers" in capsys.readouterr().out


@pytest.mark.parametrize("old", [False, True])
def test_an_adapter_over_hugging_faces_llava(old, base, tmp_path):
    theirs = llavas.hf_model(base)
    llavas.write_hf(tmp_path / "hf", base, theirs, old=old)
    targets = r".*language_model.*\.(q_proj|v_proj)|.*multi_modal_projector\.linear_1"
    merged = write_adapter(tmp_path / "lora", theirs, target_modules=targets)
    model, _, _ = opened({"model_name_or_path": str(tmp_path / "lora"), "model_base": str(tmp_path / "hf")})
    want = merged["model.language_model.layers.1.self_attn.v_proj.weight"]
    torch.testing.assert_close(model.language_model.model.layers[1].self_attn.v_proj.weight, want)
    torch.testing.assert_close(model.projector.layers[0].weight, merged["model.multi_modal_projector.linear_1.weight"])


def test_a_lora_run_over_hugging_faces_llava_is_in_llavas_names(base, tmp_path):
    """What such a run of this package's leaves, with a tower that trained."""
    llava = llavas.hf_model(base)
    under = llavas.write_hf(tmp_path / "base", base, llava)
    adapter = tmp_path / "adapter"
    tensors = {name: tensor + 1 for name, tensor in llavas.llava_names(llavas.tensors_of(llava)).items()}
    beside = {name: tensor for name, tensor in tensors.items() if name.startswith(("model.mm_", "model.vision_"))}
    llavas.write_idle_adapter(adapter, under | {"vision_tower": base["vision_tower"]}, beside)
    config = llavas.llava_config(base, mm_vision_tower=None)
    (adapter / "config.json").write_text(json.dumps(config))
    model, _, _ = opened({"model_name_or_path": str(adapter)})
    found = dict(model.named_parameters())
    for there, here in (
        ("mm_projector.2.bias", "projector.layers.2.bias"),
        ("norm.weight", "language_model.model.norm.weight"),
    ):
        add = 1 if there.startswith("mm_") else 0
        assert torch.equal(found[here], tensors[f"model.{there}"] - 1 + add)
    embedding = "embeddings.patch_embedding.weight"
    assert torch.equal(
        found[f"vision_tower.tower.{embedding}"], tensors[f"model.vision_tower.vision_tower.vision_model.{embedding}"]
    )


def test_what_lies_beside_an_adapter_wins_over_the_base(base, tmp_path):
    llava = llavas.hf_model(base)
    llavas.write_llava(tmp_path / "llava", base, llava)
    write_adapter(tmp_path / "lora", language_model(base))
    more = {"base_model.model.model.norm.weight": torch.full((32,), 3.0)}
    projector = make_llavas(tmp_path / "lora", base, **more)
    flags = {"model_name_or_path": str(tmp_path / "lora"), "model_base": str(tmp_path / "llava")}
    model, _, _ = opened({**flags, "vision_tower": base["vision_tower"]})
    assert torch.equal(model.projector.layers[0].bias, projector["base_model.model.model.mm_projector.0.bias"])
    assert (model.language_model.model.norm.weight == 3).all()


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"peft_type": "IA3"}, "describes a IA3 adapter, expected LORA"),
        ({"use_qalora": True}, "says use_qalora, but that can't be merged here: merge the adapter with peft"),
        ({"fan_in_fan_out": True}, "says fan_in_fan_out, but that can't be merged here"),
        ({"lora_alpha": None}, "is not a valid LoRA configuration"),
    ],
)
def test_other_kinds_of_adapters_are_refused(changed, expected, base, tmp_path):
    write_adapter(tmp_path, language_model(base))
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    with pytest.raises(ConfigError, match=re.escape(expected)):
        opened({"model_name_or_path": str(tmp_path), "vision_tower": base["vision_tower"]})


HOSTILE = (".*a.*a.*b", "a?" * 40 + "a" * 40 + "b", "(a|a)" * 40 + "b", "a{1,99}a{1,99}a{1,99}b")


@pytest.mark.full
def test_a_pattern_of_layer_names_takes_time_in_proportion_to_them():
    """Names and patterns may both be a stranger's. In a process of its own: re does not let go of one."""
    code = f"""
from pathlib import Path
from llava_ds.extensions.lora.merged_adapters import Adapter
for pattern in {HOSTILE!r}:
    adapter = Adapter(Path("a"), Path("a/b"), None, 8.0, {{pattern: 4.0, "x.q": 2.0, "q": 1.0}}, False)
    print(adapter.alphas_of(["a" * 100_000, "x.q", "y.q", "xq", "layers.0.v"]))
"""
    ended = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines() == ["[8.0, 2.0, 1.0, 8.0, 8.0]"] * len(HOSTILE)


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ({"(a*)*b": 4}, "alpha_pattern '(a*)*b' has too many repeats, expected names of layers"),
        ({".{999}": 4}, "alpha_pattern '.{999}' has too many repeats"),
        ({"a" * 600: 4}, "can't be a layer name: it has 600 characters"),
        ({"(": 4}, "missing ): "),
    ],
)
def test_patterns_that_name_no_layers_are_refused(patterns, expected, base, tmp_path):
    write_adapter(tmp_path, language_model(base))
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "alpha_pattern": patterns}))
    with pytest.raises(ConfigError, match=rf"is not a valid LoRA configuration \(.*{re.escape(expected)}"):
        read_adapter(tmp_path)


def test_more_patterns_than_any_adapter_has_are_refused():
    adapter = Adapter(Path("a"), Path("a/b"), None, 8.0, {f"q{i}": 1.0 for i in range(1100)}, False)
    with pytest.raises(
        DataError, match=r"a: its alpha_pattern has 1,100 patterns for 2 layers with 100,000 characters"
    ):
        adapter.alphas_of(["a" * 50_000] * 2)


def test_an_adapter_of_another_model_and_one_with_parts_missing_are_refused(base, tmp_path):
    other = toys.write_base(tmp_path / "other", hidden_size=16, intermediate_size=24)
    write_adapter(tmp_path / "lora", language_model(base))
    flags = {"model_name_or_path": str(tmp_path / "lora"), "vision_tower": base["vision_tower"]}
    args, _ = take_from_model(arguments({**flags, "model_base": other["model_name_or_path"]}))
    with pytest.raises(DataError, match=r"adapter_model.safetensors does not fit .*, and the weight that they change"):
        plan_model(args.model, 512)
    make_llavas(tmp_path / "lora", base)
    (tmp_path / "lora" / "non_lora_trainables.bin").unlink()
    with pytest.raises(DataError, match=r"is LoRA of a LLaVA, but has no non_lora_trainables.bin with its projector"):
        opened(flags)
    (tmp_path / "lora" / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"but none of adapter_model.safetensors, adapter_model.bin"):
        opened(flags)
    make_llavas(tmp_path / "lora", base, **{"base_model.model.model.vision_resampler.weight": torch.ones(2)})
    write_adapter(tmp_path / "lora", language_model(base))
    with pytest.raises(DataError, match=r"contains base_model.model.model.vision_resampler.weight, but no part"):
        opened(flags)


def test_dequantising_a_reloaded_model_stops_without_memory_or_time(base, monkeypatch):
    """Its weights are no longer mapped from their files, so they need memory."""
    model = AutoModelForCausalLM.from_pretrained(base["model_name_or_path"])
    outer = torch.nn.ModuleDict({"language_model": model})
    export = SimpleNamespace(model=SimpleNamespace(text_config=model.config), args=None)
    monkeypatch.setattr(adapter_export, "layout_of", lambda _: SimpleNamespace(of_module=lambda name: name))
    monkeypatch.setattr(adapter_export, "own", lambda _: None)
    monkeypatch.setattr(adapter_export.quantize, "quantize_and_back", lambda weight, _: weight / 2)
    before = model.model.layers[1].mlp.up_proj.weight.clone()
    deadline = Deadline()
    with monkeypatch.context() as full:
        full.setattr(reload_check.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
        with pytest.raises(NotCompared, match=r"don't fit into the 0\.0 GB of free"):
            adapter_export.hold_packed(export, outer, deadline)
    with monkeypatch.context() as late:
        late.setattr(deadline, "_end", 0.0)
        with pytest.raises(TooSlow, match="only 0 of 14 layers were computed"):
            adapter_export.hold_packed(export, outer, deadline)
    assert torch.equal(model.model.layers[1].mlp.up_proj.weight, before)
    adapter_export.hold_packed(export, outer, deadline)
    assert torch.equal(model.model.layers[1].mlp.up_proj.weight, before / 2)
