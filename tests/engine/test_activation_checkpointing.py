"""Recomputation changes what is kept, and nothing else."""

import pytest
import torch
import toys
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from llava_ds.engine.activation_checkpointing import checkpoint_layers
from llava_ds.model import attention

LAYERS = 5


pytestmark = pytest.mark.usefixtures("one_rank")  # DeepSpeed's function asks for the rank


def trained_once(**how: object) -> tuple[float, list[torch.Tensor], int]:
    """Loss, gradients, and how often layers ran."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=LAYERS,
            num_attention_heads=2,
            attention_dropout=0.3,
        )
    ).train()
    if how.pop("lora", False):
        toys.add_lora(model, toys.model_arguments(lora_enable=True, lora_r=2, lora_dropout=0.3), seed=0)
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                torch.nn.init.normal_(parameter)
    if how.pop("on", False):
        checkpoint_layers(model, **how)
    calls = []
    forward = LlamaDecoderLayer.forward
    for layer in model.model.layers:
        layer.input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    assert LlamaDecoderLayer.forward is forward
    embeds = model.get_input_embeddings()(torch.arange(12)[None])
    logits = model(inputs_embeds=embeds, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[0], torch.arange(12))
    loss.backward()
    return loss.item(), [p.grad for p in model.parameters() if p.requires_grad], len(calls)


ALL = {"partition_activations": False}


@pytest.mark.parametrize(
    ("how", "recomputed"),
    [
        ({"every": 1}, 5),
        ({"every": 2}, 3),
        ({"every": 5}, 1),
        ({"block": {"cpu_checkpointing": True}}, 5),
        ({"block": {"partition_activations": True}}, 5),
        ({"block": {"partition_activations": True, "cpu_checkpointing": True}}, 5),
        (
            {"block": {"partition_activations": True, "contiguous_memory_optimization": True, "number_checkpoints": 5}},
            5,
        ),
        ({"block": {"number_checkpoints": 2}}, 2),
        ({"block": {"number_checkpoints": 99}}, 5),
        ({"block": {"cpu_checkpointing": True, "number_checkpoints": 3}}, 3),
        ({"block": {"cpu_checkpointing": True}, "every": 2}, 3),
    ],
    ids=str,
)
def test_loss_and_gradients_are_the_same_and_layers_run_again(how, recomputed):
    loss, grads, calls = trained_once()
    assert calls == LAYERS
    again, grads_again, calls_again = trained_once(on=True, **how)
    assert calls_again == LAYERS + recomputed
    assert again == loss
    for grad, other in zip(grads, grads_again):
        torch.testing.assert_close(other, grad, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "how", [{}, {"block": {"cpu_checkpointing": True}}, {"block": {"number_checkpoints": 1}}], ids=str
)
@pytest.mark.parametrize("family", toys.FAMILIES)
def test_gradients_of_every_family_are_the_same(family, how):
    """Layers return views in some, and take more than hidden states in others."""
    gradients = []
    for recomputed in (False, True):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            toys.language_model_config(family), attn_implementation=attention.register()
        ).train()
        if recomputed:
            checkpoint_layers(model, **how)
        ids = torch.randint(0, 400, (1, 60))
        logits = model(
            inputs_embeds=model.get_input_embeddings()(ids) * 1.0,  # as after the merge, no leaf
            position_ids=torch.cat([torch.arange(20), torch.arange(40)])[None],
            cu_seqlens=torch.tensor([0, 20, 60], dtype=torch.int32),
            max_seqlen=40,
            use_cache=False,
        ).logits[0]
        torch.nn.functional.cross_entropy(logits, ids[0]).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("block", [None, {"partition_activations": True}, {"cpu_checkpointing": True}], ids=str)
def test_lora_trains_beside_layers_that_run_again_where_nothing_in_front_of_them_does(block):
    """The embeddings are frozen, so what the first layer is given carries no gradient."""
    pytest.importorskip("peft")
    loss, grads, _ = trained_once(lora=True)
    again, grads_again, calls_again = trained_once(lora=True, on=True, block=block)
    assert again == loss and calls_again == 2 * LAYERS
    assert len(grads) == len(grads_again) == LAYERS * 7 * 2
    for grad, other in zip(grads, grads_again):
        assert grad.any() and other is not None
        torch.testing.assert_close(other, grad, rtol=1e-6, atol=1e-8)
