# T tokens, D width of the language model, E experts, k of them for a token, C tokens of the busiest expert
"""DeepSpeed's layer of experts in the place of a decoder layer's MLP."""

import torch
from deepspeed.moe.layer import MoE
from torch import nn

from llava_ds.extensions.mixtures.upcycled import Mixture


class ExpertLayer(MoE):
    """A mixture of experts that returns what an MLP does: (1, T, D) to (1, T, D).

    Nothing in it is random: neither which second expert a token gets, nor which tokens are dropped where a capacity is
    given. Without one none is dropped; each expert computes C rows then, most of them zeros where the load is uneven,
    and the host reads C in every layer. In eval none is dropped either way.
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
        """Switch between training and eval, in which no token is dropped."""
        self.deepspeed_moe.gate.drop_tokens = mode and self._drops
        return super().train(mode)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Compute every token by its experts. The gate's loss and load are seen by hooks on it (mixture.Gates)."""
        # DeepSpeed 0.19.8 refuses more than there are tokens, as of a rank without samples, or of one drawn token.
        self.deepspeed_moe.gate.min_capacity = min(self._min_capacity, hidden_states[..., 0].numel())
        return super().forward(hidden_states)[0]
