# B = 1 row, H query heads, K key heads, T tokens of all samples laid end to end, E head width
"""Attention over samples laid end to end: no sample sees another, and no T x T mask exists."""

import functools
import importlib.util
import inspect

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv

from llava_ds.constants import ConfigError

NAME = "llava_ds_varlen"


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
    max_seqlen, the longest sample. Returns (1, T, H, E), and None for the weights.
    Raises ConfigError for what it does not compute: windows shorter than a sample, soft caps, attention sinks.
    Signature: transformers' AttentionInterface; cu_seqlens and max_seqlen come through the model's keyword arguments.
    """
    if softcap is not None or s_aux is not None or (sliding_window is not None and sliding_window < max_seqlen):
        raise ConfigError(
            f"the language model wants attention with sliding_window={sliding_window}, softcap={softcap} or sinks, "
            "which is not supported yet: choose another model, or a --model_max_length within the window"
        )
    half = query.dtype in (torch.float16, torch.bfloat16)
    if query.device.type != "cuda" or not half:  # the fused kernels know half precision only
        out = _per_segment(query, key, value, cu_seqlens, scaling, dropout)
    elif has_flash_attn():
        out = _flash_attn_varlen(query, key, value, cu_seqlens, max_seqlen, scaling, dropout)
    else:
        out = _torch_varlen(query, key, value, cu_seqlens, max_seqlen, scaling, dropout)
    return out, None


@functools.cache
def has_flash_attn() -> bool:
    """Whether the flash extra is installed."""
    return importlib.util.find_spec("flash_attn") is not None


def _per_segment(query, key, value, cu_seqlens, scaling, dropout) -> torch.Tensor:
    """One SDPA call a sample: the CPU's body, where reading the boundaries waits for nothing."""
    lengths = cu_seqlens.diff().tolist()
    grouped = query.shape[1] != key.shape[1]
    outputs = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, dropout_p=dropout, enable_gqa=grouped)
        for q, k, v in zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2))
    ]
    return torch.cat(outputs, 2).transpose(1, 2)  # (1, T, H, E)


def _flash_attn_varlen(query, key, value, cu_seqlens, max_seqlen, scaling, dropout) -> torch.Tensor:
    from flash_attn import flash_attn_varlen_func

    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (T, heads, E)
    out = flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p=dropout, softmax_scale=scaling, causal=True
    )
    return out[None]  # (1, T, H, E)


def _torch_varlen(query, key, value, cu_seqlens, max_seqlen, scaling, dropout) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    if dropout:
        raise ConfigError("attention dropout needs flash-attn on CUDA: install the extra llava_ds[flash]")
    # torch 2.10 has neither grouped heads nor a scale, and another name for causal; 2.11 has the latter two.
    newer = "window_size" in inspect.signature(varlen_attn).parameters
    options = {"window_size": (-1, 0), "scale": scaling} if newer else {"is_causal": True}
    if not newer and scaling is not None:
        query = query * (scaling * query.shape[-1] ** 0.5)
    groups = query.shape[1] // key.shape[1]
    q, k, v = (x[0].transpose(0, 1) for x in (query, repeat_kv(key, groups), repeat_kv(value, groups)))
    out = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **options)
    return out[None]  # (1, T, H, E)


def register() -> str:
    """Make the attention known to transformers, and return the name to build a model with.

    No mask function is registered: without one transformers builds no mask at all, and does not wait for the device
    to look for packed samples.
    """
    AttentionInterface.register(NAME, varlen_attention)
    return NAME
