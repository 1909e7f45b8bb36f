"""The load-balancing loss of mixtures is transformers', and the load of experts is counted."""

import copy
import math

import pytest
import torch
import toys
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from llava_ds.config.arguments import ModelArguments
from llava_ds.engine.activation_checkpointing import checkpoint_layers
from llava_ds.extensions.mixtures.flags import Flags
from llava_ds.extensions.mixtures.mixture import IMPLEMENTATIONS, Routers, balance_of, choose_experts, mixture_problems
from llava_ds.model import attention
from llava_ds.model.open.loading import load_weights
from llava_ds.model.open.model_plan import open_part, plan_model
from llava_ds.runtime.ranks import Ranks

ONE_RANK = Ranks(0, 0, 1, torch.device("cpu"))


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("family", toys.MIXTURES)
def test_loss_and_gradients_are_those_of_transformers_on_one_sample(family, recomputed):
    torch.manual_seed(0)
    config = toys.language_model_config(family)
    theirs = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager").train()
    ours = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention.register()).train()
    ours.load_state_dict(theirs.state_dict())
    if recomputed:
        assert checkpoint_layers(ours) == config.num_hidden_layers
    ids = torch.randint(0, config.vocab_size, (1, 50))
    expected = theirs(input_ids=ids, output_router_logits=True, use_cache=False).aux_loss
    routers = Routers(ours)
    with routers.recording() as seen:
        ours(
            inputs_embeds=ours.get_input_embeddings()(ids),
            position_ids=torch.arange(50)[None],
            cu_seqlens=torch.tensor([0, 50], dtype=torch.int32),
            max_seqlen=50,
            use_cache=False,
        )
    assert len(seen) == sum(name.endswith(".experts") for name, _ in ours.named_modules())
    found = balance_of(seen).aux_loss
    assert found.item() == pytest.approx(expected.item(), abs=1e-6) and found.item() > config.num_experts_per_tok
    expected.backward()
    found.backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    assert any(name.endswith(("gate.weight", "router.weight")) for name in gradients) and any(
        "embed" in name for name in gradients
    )
    for name, p in ours.named_parameters():
        if name in gradients and gradients[name].abs().max() > 0:
            assert (p.grad - gradients[name]).abs().max() < 1e-5 * gradients[name].abs().max(), name
        else:
            assert p.grad is None or p.grad.abs().max() == 0, name
    with torch.no_grad(), routers.recording() as again:
        pass
    assert again == []


def test_loss_and_routers_gradients_of_a_ready_model_are_those_of_transformers(tmp_path):
    """On a sample of text; tests/extensions/ready has images."""
    write_ready = pytest.importorskip("ready_models").write_ready
    write_ready(tmp_path, "qwen3_vl_moe")
    plan = plan_model(ModelArguments(model_name_or_path=str(tmp_path), version="processor"), 512)
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    ours = AutoModelForCausalLM.from_config(plan.text_config, attn_implementation=attention.register())
    load_weights(ours, open_part("language_model", plan).weights, ONE_RANK, "here")
    ids = torch.randint(7, 300, (1, 50))
    expected = theirs(input_ids=ids, output_router_logits=True, use_cache=False).aux_loss
    routers = Routers(ours)
    with routers.recording() as seen:
        ours.base_model(
            inputs_embeds=ours.get_input_embeddings()(ids),
            position_ids=torch.arange(50).expand(3, 1, 50),
            cu_seqlens=torch.tensor([0, 50], dtype=torch.int32),
            max_seqlen=50,
            use_cache=False,
        )
    found = balance_of(seen).aux_loss
    assert found.item() == pytest.approx(expected.item(), abs=1e-6) and len(seen) == plan.text_config.num_hidden_layers
    expected.backward()
    found.backward()
    gradients = {name.replace("model.language_model.", "model."): p.grad for name, p in theirs.named_parameters()}
    for name, p in ours.named_parameters():
        if name.endswith("gate.weight"):
            assert (p.grad - gradients[name]).abs().max() < 1e-5 * gradients[name].abs().max()
    assert choose_experts(ours, "eager", torch.device("cpu"), compiled=False).endswith("(eager)")
    experts = [module for name, module in ours.named_modules() if name.endswith(".experts")]
    assert {module.config._experts_implementation for module in experts} == {"eager"}


def test_the_load_is_told_in_tokens_of_the_busiest_expert_and_in_entropy():
    def layer(chosen: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(len(chosen), 4), torch.tensor(chosen)

    even, uneven = layer([[0, 1], [2, 3]]), layer([[0, 1], [1, 0]])
    found = balance_of([even])
    assert (found.max_over_mean.item(), found.entropy.item()) == (1, 1)
    found = balance_of([uneven])
    assert (found.max_over_mean.item(), found.entropy.item()) == pytest.approx((2, math.log(2) / math.log(4)))
    found = balance_of([even, uneven])
    assert (found.max_over_mean.item(), found.entropy.item()) == pytest.approx((1.5, 0.75))
    assert found.aux_loss.item() == pytest.approx(2)  # even probabilities: as many as experts for each token


def test_nothing_is_recorded_outside():
    config = toys.language_model_config("mixtral")
    model = AutoModelForCausalLM.from_config(config)
    routers = Routers(model)
    with routers.recording() as seen:
        model(input_ids=torch.tensor([[1, 2]]))
    model(input_ids=torch.tensor([[1, 2]]))
    assert len(seen) == config.num_hidden_layers


@pytest.mark.parametrize("wanted", [None, *IMPLEMENTATIONS])
def test_experts_are_computed_as_wanted_with_the_same_result(wanted):
    torch.manual_seed(0)
    config = toys.language_model_config("qwen3_moe")
    model = AutoModelForCausalLM.from_config(config)
    ids = torch.randint(0, config.vocab_size, (1, 30))
    model.set_experts_implementation("eager")
    expected = model(input_ids=ids).logits
    if wanted is None:
        model.set_experts_implementation("grouped_mm")
    line = choose_experts(model, wanted, torch.device("cpu"), compiled=False)
    assert line == f"experts: {IMPLEMENTATIONS[wanted or 'grouped_mm']} ({wanted or 'grouped_mm'})"
    assert (model(input_ids=ids).logits - expected).abs().max() < 1e-5
    assert model.config._experts_implementation == (wanted or "grouped_mm")


def test_where_torch_has_no_grouped_product_the_line_says_so():
    model = AutoModelForCausalLM.from_config(toys.language_model_config("qwen3_moe"))
    line = choose_experts(model, None, torch.device("cpu"), compiled=True)
    assert line == "experts: one matrix product after the other (compiled, torch supports it only in bf16) (grouped_mm)"
    assert "one grouped" in choose_experts(model.bfloat16(), None, torch.device("cpu"), compiled=True)


@pytest.mark.parametrize("flag", [{"router_aux_loss_coef": 0.01}, {"experts_implementation": "eager"}])
def test_flags_of_mixtures_are_refused_for_other_models(flag):
    assert not list(mixture_problems(Flags(**flag), toys.language_model_config("mixtral"), "m"))
    assert not list(mixture_problems(Flags(), toys.language_model_config("llama"), "m"))
    (line,) = mixture_problems(Flags(**flag), toys.language_model_config("llama"), "m")
    assert line.startswith(f"--{next(iter(flag))} is for mixtures of experts, but ") and " m is a llama" in line
