# H query heads, K key heads, T tokens of all samples laid end to end, L tokens of one sample, E head width
"""Attention over samples laid end to end: no sample sees another, and no T x T mask exists."""

import functools
import importlib.util
import inspect
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv

from llava_ds.constants import ConfigError

NAME = "llava_ds_varlen"

MAX_FUSED_WIDTH = 256  # of a head, in flash-attn's and torch's kernels
BLOCK = 512  # queries at a time under a window or a soft cap, where no kernel does it


class Rule(NamedTuple):
    """How scores become weights. window: a token sees itself and the window - 1 before it; None: all before it."""

    scaling: float
    dropout: float = 0.0
    window: int | None = None
    softcap: float | None = None


def varlen_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sample of a pack.

    query (1, H, T, E); key and value (1, K, T, E); cu_seqlens (samples + 1,) int32, where samples start, and T;
    max_seqlen, the longest sample. sliding_window and softcap as transformers means them: token i sees token j if
    0 <= i - j < sliding_window, and a score s counts as softcap * tanh(s / softcap).
    Returns (1, T, H, E), and None for the weights. Raises ConfigError for attention sinks.
    Signature: transformers' AttentionInterface; cu_seqlens and max_seqlen come through the model's keyword arguments.
    """
    if s_aux is not None:
        raise ConfigError("the language model has attention sinks, which no body here computes: choose another model")
    width = query.shape[-1]
    rule = Rule(
        width**-0.5 if scaling is None else scaling,
        dropout,
        sliding_window if sliding_window is not None and sliding_window < max_seqlen else None,
        softcap,
    )
    half = query.dtype in (torch.float16, torch.bfloat16)
    # The fused kernels know half precision only, and heads up to a width that is the same for all three.
    fused = query.device.type == "cuda" and half and width == value.shape[-1] <= MAX_FUSED_WIDTH
    if fused and has_flash_attn() and not (softcap is not None and dropout):  # it has no dropout under a soft cap
        out = _flash_attn_varlen(query, key, value, cu_seqlens, max_seqlen, rule)
    elif fused and softcap is None and (rule.window is None or _is_newer_varlen()):
        out = _torch_varlen(query, key, value, cu_seqlens, max_seqlen, rule)
    else:
        out = _per_segment(query, key, value, cu_seqlens, rule)
    return out, None


@functools.cache
def has_flash_attn() -> bool:
    """Whether the flash extra is installed."""
    return importlib.util.find_spec("flash_attn") is not None


@torch.compiler.disable  # how many samples a pack has, and how long they are, would each be compiled anew
def _per_segment(query, key, value, cu_seqlens, rule: Rule) -> torch.Tensor:
    """A sample at a time: the CPU's body, where reading the boundaries waits for nothing.

    On CUDA it serves what no kernel there computes, and waits for the device once a layer.
    """
    lengths = cu_seqlens.diff().tolist()
    samples = zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2))
    # Some models take a view of it, so it has to be contiguous.
    return torch.cat([_sample(q, k, v, rule).transpose(1, 2) for q, k, v in samples], 1)  # (1, T, H, E)


def _sample(query, key, value, rule: Rule) -> torch.Tensor:
    """(1, H, L, E), by blocks of queries where torch has no kernel for the rule: no L x L matrix is kept."""
    length, grouped = query.shape[2], query.shape[1] != key.shape[1]
    window = rule.window if rule.window is not None and rule.window < length else length
    options = {"scale": rule.scaling, "dropout_p": rule.dropout, "enable_gqa": grouped}
    if rule.softcap is None and window == length:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, **options)
    blocks = []
    for start in range(0, length, BLOCK):
        end, first = min(start + BLOCK, length), max(0, start - window + 1)
        i, j = (torch.arange(begin, end, device=query.device) for begin in (start, first))
        distance = i[:, None] - j
        seen = (distance >= 0) & (distance < window)  # (queries, keys)
        q, k, v = query[:, :, start:end], key[:, :, first:end], value[:, :, first:end]
        if rule.softcap is None:
            blocks.append(F.scaled_dot_product_attention(q, k, v, attn_mask=seen, **options))
        else:
            # Computed again in backward, or every score of every layer would be kept.
            keep_rng = rule.dropout > 0
            blocks.append(checkpoint(_capped, q, k, v, seen, rule, use_reentrant=False, preserve_rng_state=keep_rng))
    return torch.cat(blocks, 2)


def _capped(query, key, value, seen: torch.Tensor, rule: Rule) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    scores = (query @ key.transpose(2, 3)).float() * rule.scaling  # (1, H, queries, keys)
    scores = (rule.softcap * torch.tanh(scores / rule.softcap)).masked_fill(~seen, -torch.inf)
    return F.dropout(scores.softmax(-1), rule.dropout).to(value.dtype) @ value


def _flash_attn_varlen(query, key, value, cu_seqlens, max_seqlen, rule: Rule) -> torch.Tensor:
    from flash_attn import flash_attn_varlen_func

    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (T, heads, E)
    out = flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p=rule.dropout,
        softmax_scale=rule.scaling,
        causal=True,
        window_size=_before_and_after(rule),
        softcap=rule.softcap or 0.0,
    )
    return out[None]  # (1, T, H, E)


def _torch_varlen(query, key, value, cu_seqlens, max_seqlen, rule: Rule) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    if rule.dropout:
        raise ConfigError("attention dropout needs flash-attn on CUDA: install the extra llava_ds[flash]")
    # torch 2.10 has neither grouped heads nor a scale, and another name for causal; 2.11 has the latter two.
    if _is_newer_varlen():
        options = {"window_size": _before_and_after(rule), "scale": rule.scaling}
    else:
        options = {"is_causal": True}
        query = query * (rule.scaling * query.shape[-1] ** 0.5)
    groups = query.shape[1] // key.shape[1]
    q, k, v = (x[0].transpose(0, 1) for x in (query, repeat_kv(key, groups), repeat_kv(value, groups)))
    out = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **options)
    return out[None]  # (1, T, H, E)


def _is_newer_varlen() -> bool:
    """Whether torch's kernel takes windows: from 2.11 on."""
    from torch.nn.attention.varlen import varlen_attn

    return "window_size" in inspect.signature(varlen_attn).parameters


def _before_and_after(rule: Rule) -> tuple[int, int]:
    """The window as both kernels count it: tokens before a token's own, -1 for all, and none behind it."""
    return (-1 if rule.window is None else rule.window - 1), 0


def register() -> str:
    """Make the attention known to transformers, and return the name to build a model with.

    No mask function is registered: without one transformers builds no mask at all, and does not wait for the device
    to look for packed samples.
    """
    AttentionInterface.register(NAME, varlen_attention)
    return NAME
