# T tokens of a pack, S of them with a query, D language-model width, E head width
"""Compute the last decoder layer only at the positions that the loss needs.

Keys and values are computed for all tokens. Queries, the attention output and the MLP are computed at these positions
only, because no later operation mixes tokens.
"""

import types
from functools import partial

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from llava_ds.batch import SharedPrompts
from llava_ds.model.attention import Bounds, Rule, attend

# For checkpointing, transformers 5.17 wraps the layer's __call__, but 5.23 its forward (shorten() replaces it).
RECOMPUTES_WITHIN = "__call__" not in vars(GradientCheckpointingLayer)


def shorten(language_model: nn.Module) -> None:
    """Make the last layer accept query_positions, (S,) ascending, with which it returns (1, S, D) instead of (1, T, D).

    The layer must be like Llama's (probe.py tests it): a norm, attention with q_proj, k_proj, v_proj, o_proj and rotary
    positions, a norm and an MLP. Without query_positions the layer computes the same as before.
    """
    layer = [m for m in language_model.base_model.modules() if isinstance(m, GradientCheckpointingLayer)][-1]
    layer.forward = types.MethodType(_forward, layer)


def _forward(
    self: nn.Module,
    hidden_states: torch.Tensor,
    *others: object,
    query_positions: torch.Tensor | None = None,
    **options: object,
) -> torch.Tensor:
    if query_positions is None:
        return type(self).forward(self, hidden_states, *others, **options)
    run = partial(_at_queries, self, query_positions=query_positions, **options)
    if RECOMPUTES_WITHIN and self.gradient_checkpointing and self.training:
        return self._gradient_checkpointing_func(run, hidden_states)
    return run(hidden_states)


def _at_queries(
    layer: nn.Module,
    hidden_states: torch.Tensor,
    *,
    query_positions: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    shared_prompts: SharedPrompts | None = None,
    **_: object,
) -> torch.Tensor:
    """Map (1, T, D) to (1, S, D). Calls submodules, because ZeRO-3, adapters and quantization hook into these calls."""
    attention = layer.self_attn
    normed = layer.input_layernorm(hidden_states)
    at_queries = normed.index_select(1, query_positions)
    query, key, value = (
        project(x).unflatten(-1, (-1, attention.head_dim))  # (1, S or T, heads, E)
        for project, x in ((attention.q_proj, at_queries), (attention.k_proj, normed), (attention.v_proj, normed))
    )
    if hasattr(attention, "q_norm"):
        query, key = attention.q_norm(query), attention.k_norm(key)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    cos, sin = position_embeddings  # (1, T, E) each
    query = _rotated(query, cos.index_select(1, query_positions), sin.index_select(1, query_positions))
    bounds = Bounds.of(cu_seqlens, max_seqlen, shared_prompts)
    out = attend(query, _rotated(key, cos, sin), value, bounds, _rule(attention, bounds.max_keys), query_positions)
    residual = hidden_states.index_select(1, query_positions)
    hidden_states = residual + attention.o_proj(out.flatten(2))
    return hidden_states + layer.mlp(layer.post_attention_layernorm(hidden_states))


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply Llama's rotary positions to x (1, heads, tokens, E)."""
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]


def _rule(attention: nn.Module, max_seqlen: int) -> Rule:
    # If windows differ between layers, the window is an attribute of the layer, otherwise of the configuration.
    holder = attention if hasattr(attention, "sliding_window") else attention.config
    window = getattr(holder, "sliding_window", None)
    return Rule(
        scaling=attention.scaling,
        dropout=attention.attention_dropout if attention.training else 0.0,
        window=window if window is not None and window < max_seqlen else None,
    )
