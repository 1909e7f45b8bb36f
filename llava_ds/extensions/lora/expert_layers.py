# T tokens, k experts per token, E experts, D width of the language model, I, O widths of an expert's matrix, R rank
"""LoRA on the matrices of a layer's experts, stored as one tensor (E, O, I), with peft's names and shapes.

peft wraps the experts' module once for each tensor with LoRA. If both tensors have LoRA, "experts.gate_up_proj" becomes
"experts.base_layer.base_layer.gate_up_proj"; the first wrapper has "experts.base_layer.lora_A.default.weight" (E * R,
I) and lora_B (O, R * E), the second "experts.lora_A.default.weight". peft's forward adds the product of A and B to the
weights, so it needs a gradient as large as the weights. This module applies A and B to the tokens instead.
"""

import types
import warnings

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig
from transformers.integrations.moe import _grouped_linear

from llava_ds.extensions.lora.merged_adapters import by_matrix

# peft 0.21 gives this warning for every pattern that names expert tensors, although it applies the pattern.
UNTRUE = "The following (rank|alpha)_pattern keys did not match any targeted module"
ALIGNED = 8  # grouped matrix products on GPUs need ranks that are multiples of this


def experts_per_token(config: PreTrainedConfig) -> int:
    """Return the number of experts that process a token."""
    return getattr(config, "num_experts_per_tok", None) or config.top_k_experts  # Gemma 4's name


def wrap_experts(experts: nn.Module, config: object, adapter: str) -> nn.Module:
    """Wrap the experts' module of a layer in peft's layers, one per tensor with LoRA.

    config: a peft.LoraConfig with the tensors' names in target_parameters.
    """
    from peft import inject_adapter_in_model

    holder = nn.Module()
    holder.experts = experts
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", UNTRUE, RuntimeWarning)
        inject_adapter_in_model(config, holder, adapter)
    holder.experts.forward = types.MethodType(_forward, holder.experts)
    return holder.experts


def _forward(
    self: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Apply the experts to (T, D), given each token's experts (T, k) and their weights (T, k). Returns (T, D).

    Source: transformers' grouped_mm_experts_forward. Loops over experts if torch has no grouped product.
    """
    experts, halves = self.get_base_layer(), _halves(self)
    chosen, order = top_k_index.flatten().sort()
    numbers = torch.arange(experts.num_experts, device=chosen.device)
    ends = torch.searchsorted(chosen, numbers, right=True, out_int32=True)  # (E,)
    rows = hidden_states[order // top_k_index.shape[1]]  # (T * k, D), grouped by expert
    rows = experts._apply_gate(_linear(rows, experts.gate_up_proj, ends, *halves.get("gate_up_proj", ())))
    rows = _linear(rows, experts.down_proj, ends, *halves.get("down_proj", ()))
    rows = (rows * top_k_weights.flatten()[order, None])[order.argsort()]
    return rows.view(*top_k_index.shape, -1).sum(1).to(hidden_states.dtype)


def _linear(
    rows: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor,
    a: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    scale: float = 0.0,
) -> torch.Tensor:
    """Apply each expert's weight and optional LoRA to its rows. ends (E,): end of each expert's rows."""
    found = _grouped_linear(rows, weight, ends)
    return found if a is None else found + scale * _grouped_linear(_grouped_linear(rows, a, ends), b, ends)


def _halves(layer: nn.Module) -> dict[str, tuple[torch.Tensor, torch.Tensor, float]]:
    """Return A (E, R, I), B (E, O, R) and the scale of their product, by the name of the expert tensor."""
    found = {}
    while hasattr(layer, "lora_A"):
        (adapter,) = layer.lora_A
        a, b = by_matrix(layer.lora_A[adapter].weight, layer.lora_B[adapter].weight, layer.num_experts)
        missing = -a.shape[1] % ALIGNED
        a, b = F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing)).contiguous()
        found[layer.parameter_name] = (a, b, layer.scaling[adapter])
        layer = layer.base_layer
    return found
