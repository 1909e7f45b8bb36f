"""The attention's bodies agree with plain causal attention, sample by sample."""

import types

import pytest
import torch

from llava_ds.constants import ConfigError
from llava_ds.model import attention

LENGTHS = [5, 1, 9, 3]
CU_SEQLENS = torch.tensor([0, 5, 6, 15, 18], dtype=torch.int32)


def tensors(dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = (4, 2, 2)  # grouped key heads
    return [torch.randn(1, h, sum(LENGTHS), 16, generator=generator).to(device, dtype) for h in heads]


def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
    """(1, T, H, E) by the formula, in float64, a sample at a time."""
    query, key, value = (x.double().cpu() for x in (query, key, value))
    key, value = (x.repeat_interleave(2, 1) for x in (key, value))
    parts = []
    for q, k, v in zip(*(x.split(LENGTHS, 2) for x in (query, key, value))):
        scores = q @ k.transpose(2, 3) * scaling
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        parts.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v)
    return torch.cat(parts, 2).transpose(1, 2)


@pytest.mark.parametrize("scaling", [0.25, 0.1])
def test_the_cpu_body(scaling):
    query, key, value = tensors()
    out, weights = attention.varlen_attention(
        None, query, key, value, None, scaling, cu_seqlens=CU_SEQLENS, max_seqlen=9
    )
    assert weights is None
    assert (out - plain(query, key, value, scaling)).abs().max() < 1e-6


@pytest.mark.parametrize("torch_2_10", [False, True])
def test_what_torchs_varlen_kernel_is_asked_for(monkeypatch, torch_2_10):
    """The kernel needs a GPU: here a formula stands in for it, with either version's signature."""
    asked = {}

    def formula(q, k, v, scaling):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k[:, ::2], v[:, ::2]))
        return plain(q, k, v, scaling)[0].float()

    def newer(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
        asked.update(window_size=window_size, lengths=(cu_q.tolist(), max_q))
        return formula(q, k, v, scale)

    def older(q, k, v, cu_q, cu_k, max_q, max_k, is_causal=False):
        asked.update(is_causal=is_causal, lengths=(cu_q.tolist(), max_q))
        return formula(q, k, v, 16**-0.5)

    import torch.nn.attention as package

    kernel = types.SimpleNamespace(varlen_attn=older if torch_2_10 else newer)
    monkeypatch.setitem(__import__("sys").modules, "torch.nn.attention.varlen", kernel)
    monkeypatch.setattr(package, "varlen", kernel, raising=False)
    query, key, value = tensors()
    out = attention._torch_varlen(query, key, value, CU_SEQLENS, 9, 0.1, 0.0)
    assert (out - plain(query, key, value, 0.1)).abs().max() < 1e-6
    assert asked["lengths"] == (CU_SEQLENS.tolist(), 9)
    assert asked.get("is_causal", True) and asked.get("window_size", (-1, 0)) == (-1, 0)


def test_dropout_on_cuda_without_flash_attn_names_the_extra():
    query, key, value = tensors()
    with pytest.raises(ConfigError, match=r"llava_ds\[flash\]"):
        attention._torch_varlen(query, key, value, CU_SEQLENS, 9, 0.25, 0.1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the fused kernels run on CUDA only")
def test_the_cuda_bodies():
    query, key, value = tensors(torch.bfloat16, "cuda")
    out, _ = attention.varlen_attention(None, query, key, value, None, 0.25, cu_seqlens=CU_SEQLENS.cuda(), max_seqlen=9)
    assert (out.double().cpu() - plain(query, key, value, 0.25)).abs().max() < 2e-2
