"""An upcycled model begins as the dense one it is made of, and what its layer promises holds."""

import copy
import json
import re
from pathlib import Path

import pytest
import torch
import toys
from packed_step import SOME, batch_of, trained_once
from transformers import AutoModelForCausalLM

from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.constants import ConfigError
from llava_ds.engine.ds_config.parallel import check_model
from llava_ds.extensions.active import text_part
from llava_ds.extensions.mixtures.experts import Stacked, from_disk
from llava_ds.extensions.mixtures.kinds import EXPERTS, is_upcycled
from llava_ds.extensions.mixtures.mixture import Gates, choose_experts
from llava_ds.extensions.mixtures.text import native_config, native_name
from llava_ds.extensions.mixtures.upcycled import Mixture, expert_layers, expert_of
from llava_ds.extensions.mixtures.upcycling import check_stage, trained_of, upcycle, upcycled_config
from llava_ds.model import attention
from llava_ds.model.open.weights import Source, Sources, TensorSource

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "granite", "gpt2")
FEATURES = {
    path.parent.name: {name: value for name, value in flags.items() if name != "stage"}
    for path in sorted(Path(__file__).parents[1].glob("*/features.json"))
    for flags in json.loads(path.read_text()).values()
}
DROPPING = {"moe_enable": True, "moe_mode": "dense", "capacity_factor": 0.25}
ALL = toys.model_arguments(moe_enable=True, moe_mode="dense")


class Memory(Source):
    """A source of tensors in memory."""

    def open(self, wanted=lambda name: True):
        return self.changed(TensorSource(self.path, "memory"))


def upcycled(model: torch.nn.Module, args: ModelArguments = ALL) -> torch.nn.Module:
    """A copy of a dense language model with experts, through the weights that training would read."""
    source = Memory("--model_name_or_path", model.state_dict(), lambda name: name)
    config, sources, _ = upcycle(model.config, Sources(source, source), args)
    made = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention.register())
    text_part(config).assembled(made, config, args)
    made.tie_weights()
    weights = {name: read() for name, read in sources.language_model.open().tensors()}
    assert set(dict(made.named_parameters())) <= set(weights)
    made.load_state_dict(weights, strict=True)
    return made.train(model.training)


def dense(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = toys.language_model_config(family)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention.register()).train()


def logits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(
        input_ids=ids,
        position_ids=torch.arange(ids.shape[1])[None],
        cu_seqlens=torch.tensor([0, ids.shape[1]], dtype=torch.int32),
        max_seqlen=ids.shape[1],
        use_cache=False,
    ).logits


@pytest.mark.parametrize("flags", [{}, {"num_experts": 5, "top_k_experts": 3}, {"use_residual": True}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_it_begins_as_the_dense_model(family, flags):
    model = dense(family)
    made = upcycled(model, toys.model_arguments(moe_enable=True, moe_mode="sparse", **flags))
    assert list(expert_layers(made)) and len(expert_layers(made)) < model.config.num_hidden_layers
    ids = torch.randint(0, 400, (1, 40))
    expected = logits(model, ids)
    assert (logits(made, ids) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_gradients_of_the_experts_are_together_those_of_the_mlp():
    whole = trained_once("llama", True)
    changed = {}

    def change(model):
        changed["config"] = model.language_model
        model.language_model = upcycled(model.language_model)
        model.shorten_last_layer()
        from llava_ds.model import output_loss

        output_loss.add_loss(model.language_model.get_output_embeddings())

    loss, gradients, _ = trained_once("llama", False, change=change)
    assert loss == pytest.approx(whole[0], rel=1e-6)
    sums: dict[str, torch.Tensor] = {}
    for name, gradient in gradients.items():
        if parts := expert_of(name):
            key = parts[0].partition("deepspeed_moe.")[0] + parts[2][1:]
            sums[key] = sums.get(key, 0) + gradient
        elif not name.endswith("gate.wg.weight"):
            sums[name] = gradient
    assert sums.keys() == whole[1].keys()
    for name, gradient in whole[1].items():
        torch.testing.assert_close(sums[name], gradient, rtol=0, atol=1e-5 * gradient.abs().max().item(), msg=name)


def test_tokens_are_dropped_in_training_alone_and_only_with_a_capacity():
    model = dense("llama")
    ids = torch.randint(0, 400, (1, 64))
    expected = logits(model, ids)
    made = upcycled(model, toys.model_arguments(**DROPPING))
    assert (logits(made, ids) - expected).abs().max() > 1e-2
    assert (logits(made.eval(), ids) - expected).abs().max() < 1e-4
    assert (logits(made.train(), ids) - expected).abs().max() > 1e-2
    roomy = upcycled(model, toys.model_arguments(**DROPPING, min_capacity=64))
    assert (logits(roomy, ids) - expected).abs().max() < 1e-4
    assert torch.equal(logits(roomy, ids), logits(roomy, ids))  # nothing is random


def test_the_gates_loss_and_load_are_recorded_once():
    made = upcycled(dense("llama"))
    gates = Gates(made)
    with gates.recording() as seen:
        logits(made, torch.randint(0, 400, (1, 40)))
    logits(made, torch.randint(0, 400, (1, 40)))
    assert len(seen) == 2 and all(counts.sum() == 80 for _, counts in seen)
    found = gates.balance(seen)
    assert found.aux_loss.item() == pytest.approx(sum(loss.item() for loss, _ in seen))
    found.aux_loss.backward()
    assert all(layer.deepspeed_moe.gate.wg.weight.grad.abs().max() > 0 for layer in expert_layers(made).values())
    loads = torch.stack([counts for _, counts in seen]).float()
    assert found.max_over_mean.item() == pytest.approx((loads.amax(1) / 20).mean().item())


@pytest.mark.parametrize(
    ("mode", "layers"),
    [("first_half", [0, 1]), ("second_half", [2, 3, 4]), ("sparse", [0, 2, 4]), ("dense", [*range(5)])],
)
def test_the_layers_are_moe_llavas(mode, layers):
    config = toys.language_model_config("llama", num_hidden_layers=5)
    made = upcycled_config(config, toys.model_arguments(moe_enable=True, moe_mode=mode))
    assert Mixture.of(made).layers == tuple(layers) and is_upcycled(made) and not is_upcycled(config)
    named = upcycled_config(config, toys.model_arguments(moe_enable=True, moe_layers_idx="3,1"))
    assert Mixture.of(named).layers == (1, 3)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"moe_layers_idx": [0, 9]}, r"moe_layers_idx is .*expected different layers from 0 to 1\b"),
        ({"moe_layers_idx": "all"}, "moe_layers_idx is"),
        ({"moe_layers_idx": [0, 0]}, "moe_layers_idx is"),
        ({"num_experts": [4, 8]}, "num_experts is .*one number of 2 to 1024"),
        ({"num_experts": [10**9]}, "num_experts is"),
        ({"top_k_experts": 5}, "top_k_experts is 5, expected 1 to 4"),
        ({"top_k_experts": True}, "top_k_experts is"),
        ({"use_residual": "no"}, "use_residual is"),
    ],
)
def test_a_folder_that_says_something_else_is_refused(changed, message):
    config = upcycled_config(toys.language_model_config("llama"), ALL)
    config.moe |= changed
    with pytest.raises(ConfigError, match=message):
        Mixture.of(config)


def test_models_that_cant_be_upcycled_are_refused():
    for family, message in (("opt", "a opt, and its layers have no MLP"), ("mixtral", "already has experts")):
        with pytest.raises(ConfigError, match=message):
            upcycled_config(toys.language_model_config(family), ALL)
    with pytest.raises(ConfigError, match="already has experts"):
        upcycled_config(upcycled_config(toys.language_model_config("llama"), ALL), ALL)
    for words in ("0,7", "one", "1,1"):
        with pytest.raises(ConfigError, match=r"--moe_layers_idx contains .*from 0 to 1"):
            upcycled_config(
                toys.language_model_config("llama"), toys.model_arguments(moe_enable=True, moe_layers_idx=words)
            )


def test_what_trains_is_named_by_whole_words():
    names = list(dict(upcycled(dense("llama")).named_parameters()))
    assert trained_of(names, None) == set(names)
    found = trained_of(names, "gate_proj,wg")
    assert {re.sub(r"\d+", "N", name) for name in found} == {
        "model.layers.N.mlp.deepspeed_moe.gate.wg.weight",
        "model.layers.N.mlp.deepspeed_moe.experts.deepspeed_experts.N.gate_proj.weight",
    }
    with pytest.raises(ConfigError, match=r"--train_modules gate_pro matches no .*: use words from .*gate_proj"):
        trained_of(names, "gate_pro")
    with pytest.raises(ConfigError, match="leaves all experts frozen"):
        trained_of(names, "wg,lm_head")


def arguments(given: frozenset[str] = frozenset(), **flags: object) -> Arguments:
    return Arguments(ModelArguments(), DataArguments(), TrainingArguments(), given).replaced(**flags)


def test_what_does_not_go_with_experts_is_refused():
    config = upcycled_config(toys.language_model_config("llama"), ALL)
    check_model(arguments(ep_size=2), config)
    with pytest.raises(ConfigError, match=r"^--tune_mm_mlp_adapter True writes only a projector,.* language model"):
        check_model(arguments(tune_mm_mlp_adapter=True), config)


def needs_of(name: str) -> set[str]:
    """Properties that an extension needs by its features' flags."""
    args = arguments().replaced(**FEATURES[name])
    return {*args.own[name].needs, *args.traits.needs}


@pytest.mark.parametrize("name", [name for name in FEATURES if "dense_mlps" in needs_of(name)])
def test_what_needs_dense_layers_is_refused_with_an_upcycled_model(name):
    config = upcycled_config(toys.language_model_config("llama"), ALL)
    check_model(arguments(), config)
    flag = next(iter(FEATURES[name]))
    with pytest.raises(ConfigError, match=f"^--{flag} .* needs dense MLPs .*, which an upcycled language model takes"):
        check_model(arguments().replaced(**FEATURES[name]), config)


def test_ranks_that_do_not_divide_the_experts_are_refused():
    config = upcycled_config(toys.language_model_config("llama"), ALL)
    with pytest.raises(ConfigError, match="--ep_size 3 does not divide the 4 experts of a layer: give one of 1, 2, 4"):
        check_model(arguments(ep_size=3), config)


def test_flags_of_experts_are_refused_without_any():
    config = toys.language_model_config("llama")
    check_model(arguments(), config)
    with pytest.raises(ConfigError, match="--train_modules needs experts made with --moe_enable True"):
        check_model(arguments(frozenset({"train_modules"}), train_modules="wg"), config)
    with pytest.raises(ConfigError, match="--ep_size needs experts made with --moe_enable True"):
        check_model(arguments(ep_size=2), config)
    check_model(arguments(frozenset({"train_modules"}), moe_enable=True, train_modules="wg"), config)


def test_zero_3_is_refused_with_the_reason():
    config = upcycled_config(toys.language_model_config("llama"), ALL)
    check_stage(config, {"zero_optimization": {"stage": 2}})
    check_stage(toys.language_model_config("llama"), {"zero_optimization": {"stage": 3}})
    with pytest.raises(ConfigError, match=r"stage is 3 .* limited to stages 0 to 2"):
        check_stage(config, {"zero_optimization": {"stage": 3}})


@pytest.mark.parametrize(("family", "mode"), [("llama", "dense"), ("mistral", "dense"), ("qwen3", "sparse")])
def test_a_family_of_transformers_computes_the_same(family, mode):
    made = upcycled(dense(family), toys.model_arguments(moe_enable=True, moe_mode=mode, num_experts=4))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    config, why = native_config(made.config)
    assert not why and config.model_type in EXPERTS
    names = EXPERTS[config.model_type]
    written = {from_disk(native_name(name, made.config), names): p.detach() for name, p in made.named_parameters()}
    stacked = Stacked(InMemory(written), names)
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation=attention.register())
    theirs.load_state_dict({name: read() for name, read in stacked.tensors()}, strict=True)
    choose_experts(theirs, "eager", torch.device("cpu"), compiled=False)
    ids = torch.randint(0, 400, (1, 40))
    expected = logits(made, ids)
    assert (logits(theirs, ids) - expected).abs().max() < 1e-5 * expected.abs().max()


class InMemory(TensorSource):
    """Tensors that can be read by name, as Stacked reads them."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(tensors, "memory")
        self.read = lambda names: ((name, tensors[name]) for name in names)


@pytest.mark.parametrize(
    ("family", "flags", "why"),
    [
        ("llama", {"moe_mode": "sparse"}, "in only some of its layers"),
        ("llama", {"use_residual": True}, "--use_residual"),
        ("llama", {"top_k_experts": 1}, "--top_k_experts 1"),
        ("phi3", {}, "a phi3 with experts"),
    ],
)
def test_where_transformers_has_no_class_the_reason_is_said(family, flags, why):
    args = toys.model_arguments(**{"moe_enable": True, "moe_mode": "dense", **flags})
    config = upcycled_config(toys.language_model_config(family), args)
    assert native_config(config)[0] is None and why in native_config(config)[1]
    name = "language_model.model.layers.0.mlp.deepspeed_moe.gate.wg.weight"
    assert native_name(name, config) == name


def test_the_batch_of_the_last_layers_tests_has_several_samples():
    assert len(batch_of(SOME).cu_seqlens) > 2  # the gradients above are of a pack
