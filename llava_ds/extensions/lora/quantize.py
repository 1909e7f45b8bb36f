# I, O widths of a linear layer
"""Frozen weights in 4 or 8 bits, through bitsandbytes: QLoRA (Dettmers et al. 2023, arXiv 2305.14314).

The quantized layers are those with LoRA: the linear layers of the language model except its output layer. Each weight
is quantized as it is read, so the complete model never exists unquantized. ZeRO-3 partitions it at once.
"""

import contextlib
import gc
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from llava_ds.constants import ConfigError
from llava_ds.extensions.lora.flags import Flags
from llava_ds.model.open.loading import is_4bit, is_packed, scales_of

BLOCK = 64  # weights per scale in 4 bits
OUTLIERS = 6.0  # maximum activation multiplied in 8 bits (LLM.int8(), LLaVA's setting)


def quantize_layers(language_model: nn.Module, names: list[str], flags: Flags, dtype: torch.dtype) -> None:
    """Replace linear layers with bitsandbytes' layers; pack() sets their weights. dtype: of the computation."""
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    for name in names:
        parent, _, child = name.rpartition(".")
        linear = language_model.get_submodule(name)
        shape = (linear.in_features, linear.out_features, linear.bias is not None)
        if flags.bits == 4:
            if linear.in_features * linear.out_features % 2:
                raise ConfigError(
                    f"--bits 4: {name} has {linear.in_features} x {linear.out_features} weights, but an odd number "
                    "can't be packed in pairs: train this model with --bits 16"
                )
            layer = Linear4bit(
                *shape,
                compute_dtype=dtype,
                compress_statistics=flags.double_quant,
                quant_type=flags.quant_type,
                device="meta",
            )
            # otherwise bitsandbytes 0.50 permanently repacks the weights in the first forward outside of training
            layer.support_avx512bf16_for_cpu = False
        else:
            layer = Linear8bitLt(*shape, has_fp16_weights=False, threshold=OUTLIERS, device="meta")
        layer.bias = linear.bias
        layer.pack = partial(pack, layer)
        layer.register_state_dict_post_hook(_without_statistics)
        setattr(language_model.get_submodule(parent), child, layer)
    gc.collect()  # zero.Init's weights have reference cycles that would keep their partitions in memory


def scale_bits(flags: Flags) -> float:
    """Return how many bits the scales add per weight for --bits.

    With double quantization, the scale of a block of 4-bit weights takes 8 bits, plus 32 bits per 256 blocks. Scales of
    8-bit weights, one per row, are ignored.
    """
    if flags.bits != 4:
        return 0
    return (8 + 32 / 256) / BLOCK if flags.double_quant else 32 / BLOCK


def move_unpacked(model: nn.Module, device: torch.device) -> None:
    """Move all tensors to the device, except weights that are not loaded yet."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type != "meta" and not hasattr(tensor, "ds_id"):
            tensor.data = tensor.data.to(device)


def _without_statistics(layer: nn.Module, state_dict: dict, prefix: str, _metadata: dict) -> None:
    """Drop the scales of frozen weights from checkpoints, because checkpoints have no frozen weights."""
    for key in [key for key in state_dict if key.startswith((f"{prefix}weight.", f"{prefix}weight_format"))]:
        del state_dict[key]
    state_dict.pop(f"{prefix}SCB", None)


@torch.no_grad()
def pack(layer: nn.Module, name: str, weight: torch.Tensor, device: torch.device) -> nn.Parameter:
    """Quantize a weight (O, I) on the device, set it as a layer's weight, and return it. name: for messages.

    weight: on the CPU, in any precision. Raises ConfigError if the quantized weight differs by more than half of the
    format's coarsest step: bitsandbytes 0.50 on CPUs with AVX-512 unpacks 4 bits wrongly if a row is not a whole
    number of blocks, as in toy models.
    """
    empty = layer.weight
    if is_4bit(layer):
        weight = weight.to(layer.compute_dtype)
        options = {key: getattr(empty, key) for key in ("compress_statistics", "quant_type", "quant_storage")}
        layer.weight = type(empty)(weight, requires_grad=False, module=layer, **options).to(device)
    else:
        layer.weight = type(empty)(weight, requires_grad=False, has_fp16_weights=False).to(device)
    _check_error(layer, name, weight.to(device))
    return layer.weight


def quantize_and_back(weight: torch.Tensor, flags: Flags) -> torch.Tensor:
    """Quantize a weight (O, I) to --bits and dequantize it. Returns float32, computed in the weight's precision."""
    holder = nn.Module()
    holder.linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    quantize_layers(holder, ["linear"], flags, weight.dtype)
    pack(holder.linear, "linear.weight", weight, weight.device)
    return unpacked(holder.linear)


@torch.no_grad()
def unpacked(layer: nn.Module) -> torch.Tensor:
    """Return a layer's weight (O, I), dequantized to float32 if packed. Under ZeRO-3, gather the weight first."""
    weight = layer.weight
    if not is_packed(weight):
        return weight.detach()
    if is_4bit(layer):
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(weight.data, layer.quant_state).float()
    return weight.data.float() * (scales_of(layer)[0].float()[:, None] / 127)


def _check_error(layer: nn.Module, name: str, weight: torch.Tensor) -> None:
    """Raise ConfigError for errors above half a step. Steps: a third of the range in nf4 and fp4, 1/127 in 8 bits."""
    weight = weight.float()
    error = (unpacked(layer) - weight).abs()
    if is_4bit(layer):
        pad = -weight.numel() % BLOCK
        error, sizes = (F.pad(x.flatten(), (0, pad)).view(-1, BLOCK) for x in (error, weight.abs()))
        # The scales may be quantized, too, and add a small error.
        allowed = 0.18 * sizes.amax(1) + 0.01 * sizes.max()
    else:
        allowed = 0.006 * weight.abs().amax(1)
    if not (error.amax(1) <= allowed).all():
        rows = "" if weight.shape[1] % BLOCK == 0 else f" (its rows of {weight.shape[1]} are not a multiple of {BLOCK})"
        raise ConfigError(
            f"{name} was not quantized correctly{rows}: on {layer.weight.device.type}, weights are off by up to "
            f"{error.max():.3g}, the largest is {weight.abs().max():.3g}: check bitsandbytes' installation, "
            "or train with --bits 16"
        )


@contextlib.contextmanager
def exact_products(module: nn.Module) -> Iterator[None]:
    """Make 8-bit layers multiply by their dequantized weights, without rounding activations to 8 bits.

    Logits then match a merged model's. 4-bit layers always do this.
    """
    layers = [m for m in module.modules() if isinstance(m, nn.Linear) and is_packed(m.weight) and not is_4bit(m)]
    for layer in layers:
        layer.forward = lambda x, layer=layer: F.linear(x, unpacked(layer).to(x.dtype), layer.bias)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
