"""MLPs on some tokens at a time: the same loss and gradients, and fewer bytes kept for backward."""

import peft
import pytest
import torch
import toys
from ds_json import arguments
from transformers import AutoModelForCausalLM

from llava_ds.constants import ConfigError
from llava_ds.extensions.mlp_tiles.extension import tile_mlps
from llava_ds.extensions.mlp_tiles.flags import Flags

TOKENS = 50


def loss_and_gradients(model, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
    """The loss, all gradients, and the bytes that forward keeps."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return loss.detach(), gradients, sum(kept.values())


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("tile", [1, 7, TOKENS - 1, TOKENS, 1000])
@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2", "gpt2"])
def test_loss_and_gradients_stay(family, tile, recomputes):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(toys.language_model_config(family)).train()
    ids = torch.randint(3, 400, (1, TOKENS))
    if recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.manual_seed(1)
    loss, gradients, kept = loss_and_gradients(model, ids)
    assert "MLPs of the language model take" in tile_mlps(model, tile)
    torch.manual_seed(1)
    tiled_loss, tiled, tiled_kept = loss_and_gradients(model, ids)
    assert (loss - tiled_loss).abs() <= 1e-6
    assert all((gradients[name] - tiled[name]).abs().max() <= 1e-6 for name in gradients)
    if tile < TOKENS and not recomputes:
        assert tiled_kept < 0.9 * kept


def test_dropout_in_an_mlp_is_drawn_alike_in_backward():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(toys.language_model_config("gpt2", resid_pdrop=0.5)).train()
    tile_mlps(model, 8)
    mlp, hidden = model.transformer.h[0].mlp, torch.randn(1, 24, model.config.hidden_size, requires_grad=True)
    out = mlp.forward(hidden)
    dropped = out.detach()[0] == 0
    assert dropped.any()
    bias = mlp.c_proj.bias
    out.sum().backward()
    # The bias is added just before dropout: its gradient counts, twice each, the numbers that were kept.
    assert torch.equal(bias.grad, 2.0 * (~dropped).sum(0))


def test_dropout_of_adapters_is_drawn_alike_in_backward():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(toys.language_model_config("llama")).train()
    options = {"r": 4, "lora_dropout": 0.5, "target_modules": ["down_proj"], "init_lora_weights": False}
    model = peft.get_peft_model(model, peft.LoraConfig(**options))
    tile_mlps(model.get_base_model(), 8)
    mlp = model.get_base_model().model.layers[0].mlp
    seen: list[torch.Tensor] = []  # what dropout let through: of all tiles in forward, and again in backward
    dropout = mlp.down_proj.lora_dropout["default"]
    dropout.register_forward_hook(lambda _module, _inputs, out: seen.append(out.detach()))
    mlp.forward(torch.randn(1, 24, model.config.hidden_size, requires_grad=True)).sum().backward()
    assert len(seen) == 6
    again = {tile.numpy().tobytes() for tile in seen[3:]}
    assert again == {tile.numpy().tobytes() for tile in seen[:3]}
    assert len(again) == 3 and all((tile == 0).any() for tile in seen)


@pytest.mark.parametrize("family", ["opt", "mixtral", "qwen2_moe"])
def test_layers_without_an_mlp_of_their_own_are_refused(family):
    model = AutoModelForCausalLM.from_config(toys.language_model_config(family))
    with pytest.raises(ConfigError, match="--mlp_tile_tokens needs layers with an MLP, but the layers of"):
        tile_mlps(model, 8)


def test_a_run_out_of_memory_is_told_of_tiles_it_does_not_have():
    (line,) = Flags.saving_memory(arguments(), 20, is_one_sample=True)
    assert line == "--mlp_tile_tokens 2: MLPs take this many at a time, recomputed in backward"
    assert not list(Flags.saving_memory(arguments(mlp_tile_tokens=8), 20, is_one_sample=True))
    assert (arguments().mlp_tokens, arguments(mlp_tile_tokens=8).mlp_tokens) == (None, 8)
