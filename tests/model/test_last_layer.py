"""A last layer at kept positions alone gives the loss and the gradients of the whole one."""

from functools import partial

import pytest
import torch
import toys
from packed_step import LENGTHS, SOME, batch_of, trained_once

from llava_ds.engine.activation_checkpointing import checkpoint_layers, repeated_layers
from llava_ds.model.heads import Logits
from llava_ds.model.llava import LlavaModel
from llava_ds.model.open.probe import examine

SHORT = ("llama", "qwen2", "qwen2_5", "qwen3", "mistral", "mixtral", "qwen3_moe")


def assert_same(short: tuple, whole: tuple) -> None:
    assert short[0] == pytest.approx(whole[0], rel=1e-6)
    for name, gradient in whole[1].items():
        largest = gradient.abs().max().item()
        torch.testing.assert_close(short[1][name], gradient, rtol=0, atol=1e-5 * max(largest, 1e-3), msg=name)


@pytest.mark.parametrize("kept", [SOME, (70,), tuple(range(sum(LENGTHS))), ()], ids=["some", "one", "all", "none"])
@pytest.mark.parametrize("family", SHORT)
def test_loss_and_gradients_are_those_of_the_whole_layer(family, kept):
    short, whole = (trained_once(family, how, kept) for how in (True, False))
    assert_same(short, whole)
    assert all(gradient is not None for gradient in short[1].values())  # all take part, whatever is supervised
    assert bool(kept) == any(gradient.any() for gradient in short[1].values())


def lora(model: LlavaModel) -> None:
    pytest.importorskip("peft")
    layers = pytest.importorskip("llava_ds.extensions.lora.layers")
    args = toys.model_arguments(lora_enable=True, lora_r=2, lora_dropout=0.0)
    layers.add_lora(model, layers.lora_layout(model, args, None, model.language_model.config), args, seed=0)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter)


def freeze(model: LlavaModel) -> None:
    model.language_model.requires_grad_(False)


def compiled(model: LlavaModel) -> None:
    for layer in repeated_layers(model):
        layer.forward = torch.compile(layer.forward, backend="eager", dynamic=True)


@pytest.mark.parametrize(
    "change",
    [
        lora,
        freeze,
        lambda model: checkpoint_layers(model.language_model),
        lambda model: checkpoint_layers(model.language_model, 2),
        pytest.param(compiled, marks=pytest.mark.long),
        lambda model: (checkpoint_layers(model.language_model), compiled(model)),
    ],
    ids=["lora", "frozen", "recomputed", "every second recomputed", "compiled", "recomputed and compiled"],
)
def test_it_goes_with_all_that_is_done_to_layers(change):
    assert_same(trained_once("qwen3", True, change=change), trained_once("qwen3", False, change=change))


def test_it_computes_at_kept_positions_only_and_is_recomputed_as_a_whole():
    rows = []

    def watch(model: LlavaModel, recompute: bool) -> None:
        layer = model.language_model.model.layers[-1]
        for part in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.mlp.up_proj, model.language_model.lm_head):
            part.register_forward_hook(lambda _, inputs, __: rows.append(inputs[0].shape[-2]))
        if recompute:
            checkpoint_layers(model.language_model)

    trained_once("llama", True, change=partial(watch, recompute=False))
    kept, total = len(SOME), sum(LENGTHS)
    assert rows == [kept, total, kept, kept]
    rows.clear()
    trained_once("llama", True, change=partial(watch, recompute=True))
    assert rows == [kept, total, kept, kept, kept, total, kept]


def test_logits_at_any_positions_are_those_of_the_whole_layer():
    positions = torch.tensor([7, 3, 3, 90])
    logits = [trained_once("mistral", short)[2](batch_of(SOME), Logits(positions)) for short in (True, False)]
    assert torch.equal(*logits)


@pytest.mark.parametrize("family", toys.FAMILIES)
def test_the_probe_knows_which_families_have_such_a_layer(family):
    problem = examine(toys.language_model_config(family)).whole_last_layer
    assert (problem is None) == (family in SHORT)
    assert problem is None or problem.startswith("it is not like Llama's: ")
