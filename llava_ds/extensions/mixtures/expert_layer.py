# T tokens, D width of the language model, E experts, k experts per token, C tokens of the busiest expert
"""DeepSpeed's expert layer as the MLP of a decoder layer."""

import torch
from deepspeed.moe.layer import MoE
from torch import nn

from llava_ds.extensions.mixtures.upcycled import Mixture


class ExpertLayer(MoE):
    """A mixture of experts with an MLP's interface: (1, T, D) to (1, T, D).

    Second experts and dropped tokens are chosen without randomness. Without a capacity, no token is dropped: each
    expert computes C rows (mostly zeros if the load is uneven), and the host reads C in every layer. Eval drops none.
    """

    def __init__(
        self, mlp: nn.Module, width: int, mixture: Mixture, capacity_factor: float | None, min_capacity: int
    ) -> None:
        super().__init__(
            width,
            mlp,
            num_experts=mixture.num_experts,
            k=mixture.top_k,
            capacity_factor=capacity_factor or 1.0,
            min_capacity=min_capacity,
            use_residual=mixture.use_residual,
            drop_tokens=capacity_factor is not None,
            use_rts=False,
            top2_2nd_expert_sampling=False,
        )
        self._drops, self._min_capacity = capacity_factor is not None, min_capacity

    def train(self, mode: bool = True) -> "ExpertLayer":
        """Switch between training and eval; eval drops no tokens."""
        self.deepspeed_moe.gate.drop_tokens = mode and self._drops
        return super().train(mode)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Run each token through its experts. Hooks on the gate see its loss and load (mixture.Gates)."""
        # DeepSpeed 0.19.8 fails if min_capacity exceeds the number of tokens, e.g. on a rank without samples.
        self.deepspeed_moe.gate.min_capacity = min(self._min_capacity, hidden_states[..., 0].numel())
        return super().forward(hidden_states)[0]
