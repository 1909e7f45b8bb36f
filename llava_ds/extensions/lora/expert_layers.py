# T tokens, k experts for each, E experts, D width of the language model, I, O widths of an expert's matrix, R rank
"""LoRA beside the matrices of a layer's experts, which are one tensor (E, O, I), with peft's names and shapes.

peft wraps the module of the experts once for each of its tensors that gets LoRA: "experts.gate_up_proj" becomes
"experts.base_layer.base_layer.gate_up_proj" where both have it, beside "experts.base_layer.lora_A.default.weight"
(E * R, I) and lora_B (O, R * E) of the first, and "experts.lora_A.default.weight" of the second. Its own forward adds
the product of A and B to all weights, and so computes a gradient as large as these. Here tokens go through A and B.
"""

import types
import warnings

import torch
import torch.nn.functional as F
from torch import nn
from transformers.integrations.moe import _grouped_linear

from llava_ds.model.open.merged_adapters import by_matrix

# peft 0.21 says so of every pattern for such tensors, and obeys it.
UNTRUE = "The following (rank|alpha)_pattern keys did not match any targeted module"
ALIGNED = 8  # a grouped matrix product on a GPU takes ranks of whole multiples


def wrap_experts(experts: nn.Module, config: object, adapter: str) -> nn.Module:
    """peft's layers around the module of a layer's experts, for those of its tensors that have LoRA.

    config: a peft.LoraConfig whose target_parameters names them.
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
    """(T, D), chosen experts (T, k) and their weights (T, k) to (T, D).

    Source: transformers' grouped_mm_experts_forward, which loops over experts where torch has no grouped product.
    """
    experts, halves = self.get_base_layer(), _halves(self)
    chosen, order = top_k_index.flatten().sort()
    numbers = torch.arange(experts.num_experts, device=chosen.device)
    ends = torch.searchsorted(chosen, numbers, right=True, out_int32=True)  # (E,)
    rows = hidden_states[order // top_k_index.shape[1]]  # (T * k, D), those of an expert beside each other
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
    """Rows of experts that end at ends (E,), through each one's weight, and through its LoRA where there is one."""
    found = _grouped_linear(rows, weight, ends)
    return found if a is None else found + scale * _grouped_linear(_grouped_linear(rows, a, ends), b, ends)


def _halves(layer: nn.Module) -> dict[str, tuple[torch.Tensor, torch.Tensor, float]]:
    """A (E, R, I), B (E, O, R) and the scale of their product, by the tensor that they are beside."""
    found = {}
    while hasattr(layer, "lora_A"):
        (adapter,) = layer.lora_A
        a, b = by_matrix(layer.lora_A[adapter].weight, layer.lora_B[adapter].weight, layer.num_experts)
        missing = -a.shape[1] % ALIGNED
        a, b = F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing)).contiguous()
        found[layer.parameter_name] = (a, b, layer.scaling[adapter])
        layer = layer.base_layer
    return found
