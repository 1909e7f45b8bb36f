"""Account for LoRA in the memory and speed estimates; llava_ds/extensions/planning calls this by name."""

from torch import nn
from transformers import PreTrainedConfig

from llava_ds.config.arguments import ModelArguments
from llava_ds.extensions.architecture import Architecture
from llava_ds.extensions.lora.expert_layers import experts_per_token
from llava_ds.extensions.lora.layers import ADAPTER, add_lora, check_lora, lora_layers, lora_layout, own
from llava_ds.model.llava import LlavaModel


def add(model: LlavaModel, architecture: Architecture | None, text: PreTrainedConfig, args: ModelArguments) -> None:
    """Add LoRA to a model on the meta device."""
    check_lora(args)
    if own(args).lora_enable:
        add_lora(model, lora_layout(model, args, architecture, text), args, seed=0)


def packed(model: LlavaModel, args: ModelArguments) -> tuple[set[str], int, float] | None:
    """Return the names of the packed weights, bits per weight, and bits of scales per weight; None without --bits."""
    if not own(args).packs:
        return None
    from llava_ds.extensions.lora.quantize import scale_bits

    output = model.language_model.get_output_embeddings()
    layers = [n for n, m in model.language_model.named_modules() if isinstance(m, nn.Linear) and m is not output]
    names = {f"language_model.{name}.weight" for name in layers if name.endswith(".base_layer")}
    return names, own(args).bits, scale_bits(own(args))


def widths(language_model: nn.Module, text: PreTrainedConfig, args: ModelArguments) -> dict[str, int]:
    """Return the widths of LoRA in one layer, keyed by TextShape's field names."""
    layers, flags = [layer for _, layer in lora_layers(language_model)], own(args)
    experts = experts_per_token(text) if any(hasattr(layer, "parameter_name") for layer in layers) else 1
    of_layer = {
        "adapter_rank": sum(each.r[ADAPTER] * (experts if hasattr(each, "parameter_name") else 1) for each in layers),
        "adapter_dropped": sum(layer.in_features for layer in layers) if flags.lora_dropout else 0,
        "adapter_scaled": sum(layer.out_features for layer in layers) if flags.use_dora else 0,
    }
    read = max((layer.base_layer.weight.numel() for layer in layers), default=0) if flags.use_dora else 0
    return {**{name: count // text.num_hidden_layers for name, count in of_layer.items()}, "adapter_read": read}
