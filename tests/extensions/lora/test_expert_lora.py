"""LoRA on experts: it computes what peft's own does, peft opens what it leaves, and merging gives the same model."""

import copy
import json

import pytest
import torch
import toys
from exporting import export_plan
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from llava_ds.config.arguments import ModelArguments
from llava_ds.constants import ConfigError, DataError
from llava_ds.engine.construct import build_model
from llava_ds.export.tensors import Entry, read_entries
from llava_ds.extensions.lora import layers as lora
from llava_ds.extensions.lora.adapter_export import export_adapter, merged_entries
from llava_ds.extensions.lora.expert_layers import wrap_experts
from llava_ds.extensions.lora.merged_adapters import STACKED
from llava_ds.extensions.mixtures.mixture import check_implementation
from llava_ds.model.open.model_plan import part_weights, plan_model
from llava_ds.runtime.ranks import Ranks
from llava_ds.tracking.flops import model_flops

peft = pytest.importorskip("peft")

RANKS = Ranks(0, 0, 1, torch.device("cpu"))
TARGETS = "q_proj,gate_up_proj,down_proj"


@pytest.mark.parametrize("chosen", [STACKED, STACKED[:1], STACKED[1:]])
@pytest.mark.parametrize("family", toys.MIXTURES)
def test_logits_and_gradients_are_those_of_peft(family, chosen):
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(toys.language_model_config(family)).requires_grad_(False)
    names = [name for name, p in base.named_parameters() if p.ndim == 3 and name.endswith(chosen)]
    settings = {"target_modules": [], "use_rslora": True, "lora_dropout": 0.0}
    config = peft.LoraConfig(r=3, lora_alpha=4, target_parameters=names, **settings)
    ours, theirs = copy.deepcopy(base), peft.get_peft_model(copy.deepcopy(base), config).get_base_model()
    for place in {name.rpartition(".")[0] for name in names}:
        inside = [f"experts.{name.rpartition('.')[2]}" for name in names if name.startswith(f"{place}.")]
        one = peft.LoraConfig(r=3, lora_alpha=4, target_parameters=inside, **settings)
        ours.set_submodule(place, wrap_experts(ours.get_submodule(place), one, "default"))
    expected = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, tensor in ours.named_parameters():
            if lora.is_lora(name):
                tensor.copy_(expected[name].normal_(0, 0.1))
    ids = torch.randint(0, base.config.vocab_size, (1, 20))
    wanted, found = (model(input_ids=ids).logits for model in (theirs, ours))
    assert (found - wanted).abs().max() < 1e-5 and (wanted - base(input_ids=ids).logits).abs().max() > 0.1
    direction = torch.randn_like(wanted)
    for logits in (wanted, found):
        (logits * direction).sum().backward()
    for name, tensor in ours.named_parameters():
        other = expected.pop(name).grad
        assert (tensor.grad is not None) == (other is not None) == lora.is_lora(name)
        assert other is None or (tensor.grad - other).abs().max() < 1e-5 * other.abs().max()
    assert not expected


@pytest.fixture(scope="module", params=["qwen3_moe", "mixtral", "qwen2_moe"])
def base(request, tmp_path_factory) -> dict[str, str]:
    return toys.write_base(tmp_path_factory.mktemp(request.param), family=request.param)


def lora_args(base: dict[str, str], **more: object) -> ModelArguments:
    defaults = {"lora_enable": True, "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "lora_target_modules": TARGETS}
    return toys.model_arguments(**{**base, **defaults, **more})


@torch.no_grad()
def trained(args: ModelArguments):
    """A model whose LoRA is not as it began, and its plan."""
    plan = plan_model(args, 512)
    model = build_model(plan, args, {"zero_optimization": {"stage": 0}}, torch.float32, 42, RANKS)
    model.vision_tower.requires_grad_(False)
    torch.manual_seed(7)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter += 0.1 * torch.randn_like(parameter)
    return model.eval(), plan


def write(model, plan, args: ModelArguments, folder):
    folder.mkdir()
    export_adapter(export_plan(model, plan, args, toys.image_options()), model, folder, RANKS)
    return folder


def opened(path: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.no_grad()
def logits(language_model: torch.nn.Module) -> torch.Tensor:
    ids = torch.arange(3, 40)[None]
    options = {"cu_seqlens": torch.tensor([0, 37], dtype=torch.int32), "max_seqlen": 37}
    options = options if "llava_ds" in language_model.config._attn_implementation else {}
    return language_model(input_ids=ids, position_ids=torch.arange(37)[None], use_cache=False, **options).logits


@pytest.mark.parametrize("more", [{}, {"lora_target_modules": "v_proj,experts.down_proj", "use_rslora": True}])
def test_peft_opens_and_merges_what_is_left_and_so_does_every_way_here(base, more, tmp_path):
    patterns = {"lora_rank_pattern": '{"experts.down_proj": 2}', "lora_alpha_pattern": '{"layers.1.*down_proj": 32}'}
    args = lora_args(base, **patterns, **more)
    model, plan = trained(args)
    folder, wanted = write(model, plan, args, tmp_path / "out"), logits(model.language_model)
    theirs = peft.PeftModel.from_pretrained(opened(base["model_name_or_path"]), folder).eval()
    limit = 2e-5 * wanted.abs().max()
    assert (logits(theirs.get_base_model()) - wanted).abs().max() < limit
    assert (logits(opened(base["model_name_or_path"])) - wanted).abs().max() > 0.1
    assert (logits(theirs.merge_and_unload()) - wanted).abs().max() < limit

    entries = [Entry(n, tuple(p.shape), p.detach) for n, p in model.named_parameters() if p.requires_grad]
    below = [e for part, _ in model.named_children() for e in read_entries(part, part_weights(part, plan, args, 42))]
    from_checkpoint = {each.name: each.read() for each in merged_entries(entries, below, args, plan.own["lora"])}
    again = plan_model(ModelArguments(**{**base, "model_name_or_path": str(folder)}), 512)
    from_folder = build_model(again, ModelArguments(), {"zero_optimization": {}}, torch.float32, 1, RANKS)
    for name, tensor in from_folder.language_model.named_parameters():
        assert (from_checkpoint[f"language_model.{name}"] - tensor).abs().max() < 1e-6
    assert (logits(from_folder.eval().language_model) - wanted).abs().max() < limit

    goes_on = lora_args(base, lora_weight_path=str(folder), **patterns, **more)
    started = build_model(plan_model(goes_on, 512), goes_on, {"zero_optimization": {}}, torch.float32, 3, RANKS)
    assert (logits(started.eval().language_model) - wanted).abs().max() < limit


def test_experts_get_lora_by_name_alone(base):
    names = [target.outer for target in plan_model(lora_args(base, lora_target_modules=None), 512).own["lora"].targets]
    assert not any(".experts." in name for name in names) and any("q_proj" in name for name in names)
    targets = plan_model(lora_args(base, lora_target_modules=r".*experts\..*"), 512).own["lora"].targets
    assert {target.outer.rpartition(".")[2] for target in targets} == set(STACKED)
    assert all(target.is_stacked for target in targets)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"lora_dropout": 0.1}, r"--lora_dropout 0\.1: the tensor model\.layers\.\d\.mlp\.experts\.\w+_proj holds all"),
        ({"use_dora": True}, "--use_dora: .* which peft has no DoRA for: leave the flag out, or leave experts out of"),
        ({"init_lora_weights": "pissa"}, "--init_lora_weights pissa: .* which peft does not decompose: give true or"),
    ],
)
def test_what_peft_does_not_have_beside_experts_is_refused(base, flags, message):
    with pytest.raises(ConfigError, match=message):
        plan_model(lora_args(base, **flags), 512)
    plan_model(lora_args(base, **flags, lora_target_modules="q_proj"), 512)


def test_layers_that_peft_takes_for_experts_are_refused(tmp_path):
    """In a Qwen3-MoE some of whose layers have an MLP."""
    base = toys.write_base(tmp_path, family="qwen3_moe", mlp_only_layers=[0])
    for names in (None, "down_proj"):
        with pytest.raises(ConfigError, match=r"peft treats model\.layers\.0\.mlp\.\w+_proj, a layer without experts"):
            plan_model(lora_args(base, lora_target_modules=names), 512)
    plan_model(lora_args(base, lora_target_modules="q_proj,experts.down_proj"), 512)


def test_another_way_to_compute_experts_is_refused(base):
    with_experts, without = (plan_model(lora_args(base, lora_target_modules=n), 512) for n in (TARGETS, "q_proj"))
    with pytest.raises(ConfigError, match="--experts_implementation eager: experts with an adapter support"):
        check_implementation("eager", with_experts.only_products)
    check_implementation("eager", without.only_products)
    check_implementation("grouped_mm", with_experts.only_products)


def test_flops_count_the_lora_of_a_tokens_experts(base):
    plan = plan_model(lora_args(base), 512)
    few, many = (
        model_flops(plan.text_config, plan.tower, lora_args(base, lora_target_modules=n)).per_token
        for n in ("q_proj", "q_proj,experts.down_proj")
    )
    weights = [t for t in plan.own["lora"].targets if t.is_stacked and t.outer.endswith("down_proj")]
    config = plan.text_config
    inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    expected = len(weights) * config.num_experts_per_tok * 4 * (config.hidden_size + inner)
    assert many - few == 6 * expected


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"target_parameters": ["mlp.gate.weight"]}, ConfigError, "expected names that end in gate_up_proj or down_pr"),
        ({"target_parameters": ["experts.down_proj"]}, DataError, "lora_"),
        ({"target_parameters": None}, DataError, "lora_"),
    ],
)
def test_a_changed_list_of_experts_is_refused(base, tmp_path, change, error, message):
    args = lora_args(base)
    folder = write(*trained(args), args, tmp_path / "out")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert {name.rpartition(".")[2] for name in config["target_parameters"]} == set(STACKED)
    assert all("experts" not in name for name in config["target_modules"])
    assert any("experts.base_layer.lora_A" in name for name in load_file(folder / "adapter_model.safetensors"))
    (folder / "adapter_config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(error, match=message):
        plan_model(ModelArguments(**{**base, "model_name_or_path": str(folder)}), 512)
