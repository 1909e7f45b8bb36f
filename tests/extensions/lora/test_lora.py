"""LoRA and QLoRA on toy models in one process: what gets it, where it begins, what it leaves, what merging gives."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import toys
from daily import rest
from exporting import export_plan
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
)

from llava_ds.config.arguments import ModelArguments
from llava_ds.constants import ConfigError, DataError
from llava_ds.data.collate import collate
from llava_ds.engine.construct import build_model
from llava_ds.engine.param_groups import describe_parts
from llava_ds.export import reload_check
from llava_ds.export.layer_by_layer import NotCompared
from llava_ds.export.tensors import Entry, read_entries
from llava_ds.extensions.lora import layers as lora
from llava_ds.extensions.lora import quantize
from llava_ds.extensions.lora.adapter_export import compare_reloaded_adapter, export_adapter, merged_entries
from llava_ds.model.heads import Logits
from llava_ds.model.open.model_plan import ModelPlan, part_weights, plan_model
from llava_ds.runtime.ranks import Ranks

peft = pytest.importorskip("peft")

RANKS = Ranks(0, 0, 1, torch.device("cpu"))
SMALL = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
# Language models whose linear layers are called otherwise: fused, with biases, tied to the output layer, projected.
KINDS = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "phi3": {},
    "gemma": {"head_dim": 8},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 16},
}
WIDTH = quantize.BLOCK  # rows of whole blocks, which bitsandbytes unpacks right on every CPU
QUANTIZED = [(4, "nf4", True), (4, "nf4", False), (4, "fp4", True), (8, "nf4", True)]


def language_model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SMALL, **KINDS[kind]})).eval()


def lora_args(**more: object) -> ModelArguments:
    defaults = {"lora_enable": True, "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0}
    return toys.model_arguments(**{**defaults, **more})


def names_with_lora(model: nn.Module) -> list[str]:
    return [name for name, _ in lora.lora_layers(model)]


@torch.no_grad()
def train_a_little(model: nn.Module) -> None:
    """Move everything that trains, so that B is not zero."""
    torch.manual_seed(7)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter += 0.1 * torch.randn_like(parameter)


@pytest.mark.parametrize("kind", KINDS)
def test_all_linear_layers_of_the_language_model_get_lora_by_full_name_but_the_output_layer(kind):
    model = language_model(kind)
    # LLaVA's find_all_linear_names: the last names of all linear layers, without lm_head.
    last = {n.split(".")[-1] for n, m in model.named_modules() if isinstance(m, nn.Linear)} - {"lm_head"}
    meant = [n for n, m in model.named_modules() if n.split(".")[-1] in last and isinstance(m, nn.Linear)]
    assert lora.linear_names(model) == meant and len(meant) >= 8
    before = type(model), model(input_ids=torch.arange(8)[None]).logits
    toys.add_lora(model, lora_args(), seed=42)
    assert names_with_lora(model) == meant
    assert type(model) is before[0] and torch.equal(model(input_ids=torch.arange(8)[None]).logits, before[1])
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {f"{n}.lora_{m}.default.weight" for n in meant for m in "AB"}


def test_a_model_without_linear_layers_is_refused():
    with pytest.raises(ConfigError, match="has no linear layers for LoRA except its output layer"):
        lora.linear_names(AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", n_embd=8, n_head=2, n_layer=1)))


def test_lora_begins_with_what_the_seed_draws_in_any_precision_and_with_zero():
    drawn = {}
    for key, dtype, seed in (("32", torch.float32, 1), ("16", torch.bfloat16, 1), ("other", torch.float32, 2)):
        model = language_model("llama").to(dtype)
        state = torch.get_rng_state()
        toys.add_lora(model, lora_args(), seed)
        assert torch.equal(torch.get_rng_state(), state)  # dropout's generator stays where it was
        drawn[key] = {n: p.detach() for n, p in model.named_parameters() if lora.is_lora(n)}
        assert {p.dtype for p in drawn[key].values()} == {dtype}
    assert all(torch.equal(p.bfloat16(), drawn["16"][n]) for n, p in drawn["32"].items())
    for name, parameter in drawn["32"].items():
        if ".lora_A." in name:  # kaiming_uniform with a = sqrt(5)
            assert 0.8 < parameter.abs().max() * parameter.shape[1] ** 0.5 <= 1
            assert not torch.equal(parameter, drawn["other"][name])
        else:
            assert not parameter.any()


@pytest.mark.parametrize("bias", ["none", "all", "lora_only"])
@pytest.mark.parametrize("kind", ["qwen2", "opt"])
def test_biases_train_as_peft_means_it(kind, bias):
    model, args = language_model(kind), lora_args(lora_bias=bias)
    theirs = language_model(kind)
    theirs = peft.get_peft_model(
        theirs, lora.peft_config(args, lora.linear_names(theirs), lora.own(args).lora_r, lora.own(args).lora_alpha)
    )
    toys.add_lora(model, args, seed=42)
    trained = {lora.PEFT_PREFIX + name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {name for name, p in theirs.named_parameters() if p.requires_grad}


# A whole LLaVA, what it leaves, and what opens that.


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("lora") / "base"
    return toys.write_base(folder, attention_bias=True, hidden_size=WIDTH, intermediate_size=2 * WIDTH)


@pytest.fixture(scope="module")
def batch(base, tmp_path_factory):
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("sample")
    dataset = toys.encoded(
        *toys.write_data(folder, "i").values(),
        tokenizer=AutoTokenizer.from_pretrained(base["model_name_or_path"]),
        cache_dir=folder / "cache",
    )
    return collate([dataset[0]], dataset.image_options)


def built(base: dict[str, str], **more: object):
    """(model, plan, flags) as run/train.py makes them."""
    args = lora_args(**base, **more)
    plan = plan_model(args, 512)
    model = build_model(plan, args, {"zero_optimization": {"stage": 0}}, torch.float32, 42, RANKS)
    if "vision" not in lora.own(args).lora_modules:
        model.vision_tower.requires_grad_(False)
    return model, plan, args


@torch.no_grad()
def logits_of(model: nn.Module, batch) -> torch.Tensor:
    with quantize.exact_products(model):
        return model.eval()(batch, Logits(torch.arange(batch.input_ids.shape[1])))


def written(model: nn.Module, plan, args: ModelArguments, folder: Path) -> Path:
    folder.mkdir(parents=True)
    export_adapter(export_plan(model, plan, args, toys.image_options()), model, folder, RANKS)
    assert len({file.stat().st_mode for file in folder.iterdir()}) == 1  # all readable to whom the umask lets read
    return folder


@pytest.mark.parametrize("bits", [16, *rest(8), 4])
@pytest.mark.parametrize("bias", ["none", *rest("all")])
def test_peft_opens_what_is_left_and_computes_the_same(base, batch, tmp_path, bits, bias):
    if bits < 16:
        pytest.importorskip("bitsandbytes")
    model, plan, args = built(base, bits=bits, lora_bias=bias)
    fresh = logits_of(model, batch)
    train_a_little(model)
    logits = logits_of(model, batch)
    assert (logits - fresh).abs().max() > 0.1
    folder = written(model, plan, args, tmp_path / "out")
    export = export_plan(model, plan, args, toys.image_options())
    assert compare_reloaded_adapter(folder, export, batch, logits) < 1e-5
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors["base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"] *= 1.01
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(RuntimeError, match="peft computes different logits"):
        compare_reloaded_adapter(folder, export, batch, logits)


def test_the_check_of_an_adapter_takes_the_first_positions_and_looks_for_room(base, batch, tmp_path, monkeypatch):
    model, plan, args = built(base)
    folder, export = written(model, plan, args, tmp_path / "out"), export_plan(model, plan, args, toys.image_options())
    with torch.no_grad():
        logits = logits_of(model, batch)[:3]
    assert compare_reloaded_adapter(folder, export, batch, logits) < 1e-5
    monkeypatch.setattr(reload_check.psutil, "virtual_memory", lambda: SimpleNamespace(available=10**5))
    with pytest.raises(NotCompared, match=r"GB don't fit into the 0\.0 GB of free memory"):
        compare_reloaded_adapter(folder, export, batch, logits)


# On any part, and peft's variants. tests/distributed/test_lora_variants.py trains them.
EVERY = {"lora_modules": "language,vision,projector", "mm_projector_type": "linear"}
VARIANTS = {
    "dora": {"use_dora": True},
    "pissa": {"init_lora_weights": "pissa_niter_4", "use_rslora": True, "lora_rank_pattern": '{"q_proj": 2}'},
    "olora": {"init_lora_weights": "olora", "use_dora": True},
    "chosen": {
        "lora_target_modules": r".*\.(q_proj|fc1|mm_projector)", "lora_alpha_pattern": '{"layers.1.*q_proj": 32}',
        "modules_to_save": "norm,encoder.layers.0.layer_norm1", "lora_bias": "all",
    },
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_on_every_part_is_opened_by_peft_and_merged_to_the_same(base, batch, tmp_path, variant):
    model, plan, args = built(base, **EVERY, **VARIANTS[variant])
    args_of_plain = ModelArguments(**base, mm_projector_type="linear")
    plain = build_model(plan, args_of_plain, {"zero_optimization": {"stage": 0}}, torch.float32, 42, RANKS)
    start = logits_of(model, batch)
    assert (start - logits_of(plain, batch)).abs().max() < 1e-4  # whatever a variant begins with
    train_a_little(model)
    logits = logits_of(model, batch)
    assert (logits - start).abs().max() > 0.1
    export = export_plan(model, plan, args, toys.image_options())
    folder = written(model, plan, args, tmp_path / "out")
    assert compare_reloaded_adapter(folder, export, batch, logits) < 2e-5
    tensors = load_file(folder / "adapter_model.safetensors")
    changed = next(name for name in tensors if "vision_tower" in name and "lora_B" in name)
    save_file({**tensors, changed: tensors[changed] * 2}, folder / "adapter_model.safetensors")
    with pytest.raises(RuntimeError, match="peft computes different logits"):
        compare_reloaded_adapter(folder, export, batch, logits)
    plain.load_state_dict(merged_tensors(model, plan, args), strict=False)
    assert (logits_of(plain, batch) - logits).abs().max() < 2e-5 * logits.abs().max()


def test_a_model_that_lora_took_parts_of_starts_again_from_them(base, batch, tmp_path):
    """What a resumed run does: not a second decomposition, which another machine computes otherwise."""
    model, plan, args = built(base, **EVERY, init_lora_weights="pissa")
    other = dict(model.lora_start)
    a, b = (next(name for name in other if f"lora_{half}" in name) for half in "AB")
    other[a], other[b] = -other[a], -other[b]
    torch.save(other, tmp_path / lora.START_FILE)
    resumed = replace(plan, checkpoint=tmp_path)
    again = build_model(resumed, args, {"zero_optimization": {"stage": 0}}, torch.float32, 42, RANKS)
    again.vision_tower.eval()
    assert again.lora_start.keys() == other.keys()
    assert all(torch.equal(again.lora_start[name], other[name]) for name in other)
    layer = a.split(".lora_")[0]
    assert torch.equal(again.get_parameter(f"{layer}.lora_A.default.weight"), other[a])
    assert torch.equal(*(m.get_parameter(f"{layer}.base_layer.weight") for m in (model, again)))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"lora_target_modules": "q_prj"}, r"no layer's name ends in q_prj: layers are called .*q_proj"),
        ({"lora_target_modules": "q.*"}, r"q\.\* matches no layer's whole name"),
        ({"lora_target_modules": "fc1"}, "no layer of language gets LoRA: leave it out, or name some of its linear"),
        ({"lora_rank_pattern": '{"fc1": 2}', "lora_modules": "language"}, "fc1 matches no layer"),
        ({"modules_to_save": "nor"}, "--modules_to_save: no module's name ends in nor"),
        ({"init_lora_weights": "olora", "lora_r": 17}, "a matrix of rank 16, and LoRA's rank is 17: lower --lora_r"),
        ({"modules_to_save": "up_proj", "bits": 4}, "--modules_to_save up_proj can't be used with --bits 4"),
    ],
)
def test_layers_that_are_not_there_are_refused_before_anything_is_built(base, flags, message):
    args = lora_args(**{**base, "lora_modules": "language,vision", **flags})
    with pytest.raises(ConfigError, match=message):
        plan_model(args, 512)


def test_a_tied_embedding_is_not_saved_apart():
    model = language_model("qwen2")
    with pytest.raises(ConfigError, match="embed_tokens shares its weight with the model's other end"):
        toys.add_lora(model, lora_args(modules_to_save="embed_tokens"), seed=1)


@pytest.mark.parametrize("bits", [4, 8])
def test_transformers_packs_the_base_to_the_same_weights(base, batch, tmp_path, bits):
    """What somebody does who opens the adapter over a quantized base: BitsAndBytesConfig and PeftModel."""
    pytest.importorskip("bitsandbytes")
    model, plan, args = built(base, bits=bits)
    train_a_little(model)
    folder = written(model, plan, args, tmp_path / "out")
    config = BitsAndBytesConfig(
        load_in_4bit=bits == 4,
        load_in_8bit=bits == 8,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    theirs = AutoModelForCausalLM.from_pretrained(
        args.model_name_or_path, dtype=torch.float32, quantization_config=config
    )
    theirs = peft.PeftModel.from_pretrained(theirs, folder).eval()
    for layer in theirs.modules():
        layer.support_avx512bf16_for_cpu = False  # bitsandbytes would compute in bfloat16 where the CPU can
    with torch.no_grad(), quantize.exact_products(theirs):
        again = theirs(inputs_embeds=model.embed(batch)).logits[0]
    logits = logits_of(model, batch)
    assert (again - logits).abs().max() < 1e-5 * logits.abs().max()


def test_what_is_left_has_llavas_names(base, tmp_path):
    model, plan, args = built(base)
    folder = written(model, plan, args, tmp_path / "out")
    assert {path.name for path in folder.iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "non_lora_trainables.bin", "config.json"
    }  # fmt: skip
    others = torch.load(folder / "non_lora_trainables.bin", weights_only=True)
    prefix = "base_model.model.model.mm_projector"
    assert set(others) == {f"{prefix}.0.weight", f"{prefix}.0.bias", f"{prefix}.2.weight", f"{prefix}.2.bias"}
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["bias"], config["task_type"]) == (4, 8, "none", "CAUSAL_LM")
    assert not {"use_dora", "lora_bias", "corda_config"} & set(config)  # which the peft of LLaVA's time does not know
    assert config["base_model_name_or_path"] == args.model_name_or_path and config["inference_mode"]
    assert config["target_modules"][0] == "model.layers.0.self_attn.q_proj" and len(config["target_modules"]) == 14
    fields = json.loads((folder / "config.json").read_text())
    assert fields["model_type"] == "llava_llama" and fields["mm_projector_type"] == "mlp2x_gelu"


def test_llavas_own_way_to_open_it_gives_the_same_model(base, batch, tmp_path):
    """What LLaVA's load_pretrained_model does with such a folder, over a model whose tower has a q_proj too."""
    model, plan, args = built(base)
    train_a_little(model)
    train_a_little(model.projector)
    folder = written(model, plan, args, tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(args.model_name_or_path)
    theirs.model.mm_projector = nn.Sequential(nn.Linear(16, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    theirs.model.vision_tower = CLIPVisionModel(CLIPVisionConfig.from_pretrained(args.vision_tower))
    others = torch.load(folder / "non_lora_trainables.bin", map_location="cpu")
    others = {(k[11:] if k.startswith("base_model.") else k): v for k, v in others.items()}
    if any(k.startswith("model.model.") for k in others):
        others = {(k[6:] if k.startswith("model.") else k): v for k, v in others.items()}
    assert not theirs.load_state_dict(others, strict=False).unexpected_keys
    theirs = peft.PeftModel.from_pretrained(theirs, folder)
    assert not any("vision_tower" in name or "mm_projector" in name for name in names_with_lora(theirs))
    theirs = theirs.merge_and_unload()
    ours = model.projector.layers
    assert all(torch.equal(a, b) for a, b in zip(theirs.model.mm_projector.parameters(), ours.parameters()))
    with torch.no_grad():
        again = theirs(inputs_embeds=model.embed(batch)).logits[0]
    assert (again - logits_of(model, batch)).abs().max() < 1e-4


def entries_of(model: nn.Module) -> list[Entry]:
    return [Entry(name, tuple(p.shape), p.detach) for name, p in model.named_parameters()]


def merged_tensors(model: nn.Module, plan: ModelPlan, args: ModelArguments) -> dict[str, torch.Tensor]:
    """The model with LoRA merged, as from a checkpoint, which holds what trains."""
    trained = [entry for entry, p in zip(entries_of(model), model.parameters()) if p.requires_grad]
    base = [e for part, _ in model.named_children() for e in read_entries(part, part_weights(part, plan, args, 42))]
    merged = merged_entries(trained, base, args, plan.own["lora"], model.lora_start)
    tensors = {entry.name: entry.read() for entry in merged}
    assert all(tensors[entry.name].shape == entry.shape for entry in merged)
    return tensors


@pytest.mark.full
@pytest.mark.parametrize("bits", [16, *rest(8), 4])
def test_merged_weights_compute_what_lora_beside_them_did(base, batch, bits):
    if bits < 16:
        pytest.importorskip("bitsandbytes")
    model, plan, args = built(base, bits=bits, lora_bias="all")
    train_a_little(model)
    merged = merged_tensors(model, plan, args)
    plain = build_model(plan, ModelArguments(**base), {"zero_optimization": {"stage": 0}}, torch.float32, 42, RANKS)
    assert {name: p.shape for name, p in plain.named_parameters()} == {n: t.shape for n, t in merged.items()}
    unmerged = logits_of(plain, batch)
    plain.load_state_dict(merged, strict=False)
    logits = logits_of(model, batch)
    assert (logits_of(plain, batch) - logits).abs().max() < 1e-5 * logits.abs().max()
    assert (unmerged - logits).abs().max() > 0.1


def test_a_merged_weight_is_rounded_once():
    model = language_model("llama").bfloat16()
    layout = toys.add_lora(model, lora_args(), seed=42)
    train_a_little(model)
    name, layer = next(lora.lora_layers(model))
    a, b = layer.lora_A.default.weight.double(), layer.lora_B.default.weight.double()
    exact = layer.base_layer.weight.double() + 2 * b @ a
    name = f"language_model.{name}"
    entries = [replace(entry, name=f"language_model.{entry.name}") for entry in entries_of(model)]
    base = [replace(entry, name=lora.plain_name(entry.name)) for entry in entries if not lora.is_lora(entry.name)]
    [merged] = [each for each in merged_entries(entries, base, lora_args(), layout) if each.name == f"{name}.weight"]
    found = merged.read()
    assert found.dtype == torch.bfloat16 and ((found.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()


def test_without_lora_merging_gives_the_parameters(base):
    model = build_model(
        plan_model(ModelArguments(**base), 512),
        ModelArguments(**base),
        {"zero_optimization": {}},
        torch.float32,
        1,
        RANKS,
    )
    nothing = lora.LoraLayout((), (), str, frozenset())
    entries = merged_entries([], entries_of(model), ModelArguments(**base), nothing)
    merged = {entry.name: entry.read() for entry in entries}
    assert merged.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(merged[name], p) for name, p in model.named_parameters())


# Starting from an adapter.


@pytest.fixture(scope="module")
def adapter(base, batch, tmp_path_factory):
    """An adapter's folder, and the logits of the model that left it."""
    model, plan, args = built(base, lora_bias="all")
    train_a_little(model)
    return written(model, plan, args, tmp_path_factory.mktemp("adapter") / "out"), logits_of(model, batch)


def test_a_run_starts_from_an_adapter_and_its_projector(base, batch, adapter, tmp_path):
    folder, logits = adapter
    model, *_ = built(base, lora_bias="all", lora_weight_path=str(folder))
    assert torch.equal(logits_of(model, batch), logits)
    # As peft once wrote it: a pickle, biases under their plain names, the adapter's name within.
    older = tmp_path / "older"
    shutil.copytree(folder, older)
    (older / "adapter_model.safetensors").unlink()
    tensors = load_file(folder / "adapter_model.safetensors")
    renamed = {
        name.replace(".base_layer.", ".").replace("lora_A.weight", "lora_A.default.weight"): tensor
        for name, tensor in tensors.items()
    }
    torch.save(renamed, older / "adapter_model.bin")
    model, *_ = built(base, lora_bias="all", lora_weight_path=str(older))
    assert torch.equal(logits_of(model, batch), logits)


def test_without_a_projector_of_its_own_an_adapter_starts_with_stage_1s(base, adapter, tmp_path):
    folder = tmp_path / "adapter"
    shutil.copytree(adapter[0], folder)
    projector = {
        name.removeprefix("base_model.model."): p for name, p in torch.load(folder / "non_lora_trainables.bin").items()
    }
    torch.save(projector, tmp_path / "mm_projector.bin")
    (folder / "non_lora_trainables.bin").unlink()
    first = str(tmp_path / "mm_projector.bin")
    flags = {**base, "lora_bias": "all", "pretrain_mm_mlp_adapter": first}
    with_own, without = (
        plan_model(lora_args(**flags, lora_weight_path=str(path)), 512).sources.projector
        for path in (adapter[0], folder)
    )
    assert without.path == first and with_own.path == str(adapter[0] / "non_lora_trainables.bin")


def test_a_tower_that_trained_beside_an_adapter_is_left_with_it_and_started_from(base, batch, tmp_path):
    model, plan, args = built(base, unfreeze_mm_vision_tower=True)
    model.vision_tower.requires_grad_(True)
    train_a_little(model)
    folder = written(model, plan, args, tmp_path / "out")
    others = torch.load(folder / "non_lora_trainables.bin", weights_only=True)
    name = "base_model.model.model.vision_tower.vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight"
    assert torch.equal(others[name], model.vision_tower.tower.encoder.layers[0].self_attn.q_proj.weight)
    again, *_ = built(base, unfreeze_mm_vision_tower=True, lora_weight_path=str(folder))
    assert torch.equal(logits_of(again, batch), logits_of(model, batch))


@pytest.mark.parametrize(
    ("change", "flags", "message"),
    [
        ({}, {"lora_r": 8}, r"was trained with r 4, but --lora_r is 8: give --lora_r 4"),
        ({}, {"lora_alpha": 1, "lora_bias": "none"}, r"--lora_alpha 8\n.*--lora_bias all"),
        ({"use_dora": True}, {}, "was trained with use_dora True, but --use_dora is False: give --use_dora True"),
        ({"rank_pattern": {"q_proj": 2}}, {}, r"rank_pattern '{\"q_proj\": 2}', but --lora_rank_pattern is None"),
        ({"use_qalora": True}, {}, "was trained with use_qalora True, but that is not supported"),
        ({"peft_type": "IA3"}, {}, "has an adapter of type IA3"),
        (None, {}, "adapter_config.json can't be read"),
    ],
)
def test_an_adapter_that_does_not_fit_the_flags_is_refused_before_anything_is_built(
    base, adapter, tmp_path, change, flags, message
):
    folder = tmp_path / "adapter"
    shutil.copytree(adapter[0], folder)
    config = folder / "adapter_config.json"
    config.write_text("{" if change is None else json.dumps(json.loads(config.read_text()) | change))
    args = lora_args(**{**base, "lora_bias": "all", "lora_weight_path": str(folder), **flags})
    with pytest.raises(ConfigError, match=message):
        plan_model(args, 512)


def test_an_adapter_of_other_layers_or_without_weights_is_refused(base, adapter, tmp_path):
    folder = tmp_path / "adapter"
    shutil.copytree(adapter[0], folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({k: v for k, v in tensors.items() if "mlp" not in k}, folder / "adapter_model.safetensors")
    with pytest.raises(DataError, match=r" 12 tensors missing, such as language_model.model.layers.0.mlp"):
        built(base, lora_bias="all", lora_weight_path=str(folder))
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"it contains no adapter_model\.safetensors or adapter_model.bin"):
        built(base, lora_bias="all", lora_weight_path=str(folder))


@pytest.mark.parametrize(("flags", "package"), [({}, "peft"), ({"bits": 4}, "bitsandbytes")])
def test_a_missing_package_is_said_with_the_extra_that_brings_it(base, monkeypatch, flags, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"needs {package}, .*pip install 'llava_ds\[q?lora\]'"):
        plan_model(lora_args(**base, **flags), 512)


# Packed weights.


@pytest.mark.parametrize(("bits", "quant_type", "double_quant"), QUANTIZED)
def test_the_decoders_weights_are_packed_and_nothing_else(base, batch, bits, quant_type, double_quant):
    pytest.importorskip("bitsandbytes")
    model, _, args = built(base, bits=bits, quant_type=quant_type, double_quant=double_quant)
    packed = [name for name, p in model.named_parameters() if quantize.is_packed(p)]
    assert packed == [f"language_model.{n}.base_layer.weight" for n in names_with_lora(model.language_model)]
    assert {p.dtype for n, p in model.named_parameters() if n not in packed} == {torch.float32}
    assert not any(p.is_meta for p in (*model.parameters(), *model.buffers()))
    whole = AutoModelForCausalLM.from_pretrained(args.model_name_or_path).state_dict()
    for name, layer in lora.lora_layers(model.language_model):
        weight = whole[f"{name}.weight"]
        error = (quantize.unpacked(layer.base_layer) - weight).norm() / weight.norm()
        assert error < {(4, "nf4"): 0.12, (4, "fp4"): 0.16, (8, "nf4"): 0.01}[bits, quant_type]
        if bits == 4:
            state = layer.base_layer.quant_state
            assert (state.quant_type, state.nested) == (quant_type, double_quant)
            assert layer.base_layer.weight.numel() * 2 == weight.numel()
    fine, _, _ = built(base)
    assert describe_parts(model, []) == describe_parts(fine, [])
    difference = (logits_of(model, batch) - logits_of(fine, batch)).abs().max() / logits_of(fine, batch).abs().max()
    assert difference > 1e-4


@pytest.mark.parametrize("bits", [4, 8])
def test_gradients_beside_packed_weights_are_those_beside_what_they_stand_for(base, batch, bits):
    pytest.importorskip("bitsandbytes")
    model, *_ = built(base, bits=bits)
    same, *_ = built(base)
    packed, whole = (dict(lora.lora_layers(m.language_model)) for m in (model, same))
    with torch.no_grad():
        for name, layer in whole.items():
            layer.base_layer.weight.copy_(quantize.unpacked(packed[name].base_layer))
    gradients = []
    for one in (model, same):
        one.train()
        train_a_little(one)
        one(batch).backward()
        gradients.append({n: p.grad for n, p in one.named_parameters() if p.requires_grad})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[1].items():
        assert (gradients[0][name] - gradient).abs().max() <= 1e-4 * gradient.abs().max() + 1e-7, name


@pytest.mark.parametrize("bits", [4, 8])
def test_scales_of_packed_weights_take_no_place_in_checkpoints(base, bits):
    pytest.importorskip("bitsandbytes")
    model, *_ = built(base, bits=bits)
    assert set(model.state_dict()) <= set(dict(model.named_parameters())) | {"language_model.lm_head.weight"}


@pytest.mark.parametrize("bits", [4, 8])
def test_a_weight_that_is_not_quantized_right_is_seen_at_once(base, monkeypatch, bits):
    pytest.importorskip("bitsandbytes")
    from bitsandbytes import functional

    name = "quantize_4bit" if bits == 4 else "int8_vectorwise_quant"
    right = getattr(functional, name)
    monkeypatch.setattr(functional, name, lambda weight, *rest, **more: right(weight * 1.5, *rest, **more))
    with pytest.raises(
        ConfigError, match=r"_proj\.weight was not quantized correctly: on cpu, weights are off by up to"
    ):
        built(base, bits=bits)


def test_weights_of_an_odd_number_are_not_packed_in_pairs():
    pytest.importorskip("bitsandbytes")
    model = nn.ModuleDict({"odd": nn.Linear(3, 3)})
    with pytest.raises(ConfigError, match="--bits 4: odd has 3 x 3 weights, but an odd number"):
        quantize.quantize_layers(model, ["odd"], lora.own(lora_args(bits=4)), torch.float32)


def test_a_llama_config_names_the_layers_that_the_recipe_of_7b_trains():
    """LLaVA-1.5-7B with r 128: the published adapter has 319,815,680 parameters."""
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, vocab_size=32000
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        toys.add_lora(model, lora_args(lora_r=128, lora_alpha=256), seed=42)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 319_815_680
