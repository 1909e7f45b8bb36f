"""The attention's bodies agree with the formula, sample by sample: plain, in a window, under a soft cap."""

import types

import pytest
import torch

from llava_ds.constants import ConfigError
from llava_ds.model import attention
from llava_ds.model.attention import Rule

LENGTHS = [5, 1, 9, 3]
CU_SEQLENS = torch.tensor([0, 5, 6, 15, 18], dtype=torch.int32)
RULES = [
    Rule(0.25),
    Rule(0.1),
    Rule(0.25, window=3),
    Rule(0.25, window=5),
    Rule(0.25, softcap=0.7),
    Rule(0.25, window=4, softcap=0.7),
]


def tensors(dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = (4, 2, 2)  # grouped key heads
    return [torch.randn(1, h, sum(LENGTHS), 16, generator=generator).to(device, dtype) for h in heads]


def by_formula(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule) -> torch.Tensor:
    """(1, T, H, E) in float64, a sample at a time."""
    query, key, value = (x.double().cpu() for x in (query, key, value))
    key, value = (x.repeat_interleave(2, 1) for x in (key, value))
    parts = []
    for q, k, v in zip(*(x.split(LENGTHS, 2) for x in (query, key, value))):
        scores = q @ k.transpose(2, 3) * rule.scaling
        if rule.softcap is not None:
            scores = rule.softcap * torch.tanh(scores / rule.softcap)
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        if rule.window is not None:
            hidden |= torch.ones_like(hidden).tril(-rule.window)
        parts.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v)
    return torch.cat(parts, 2).transpose(1, 2)


def attend(query, key, value, rule: Rule, cu_seqlens: torch.Tensor = CU_SEQLENS) -> torch.Tensor:
    out, weights = attention.varlen_attention(
        None,
        query,
        key,
        value,
        None,
        rule.scaling,
        cu_seqlens=cu_seqlens,
        max_seqlen=9,
        sliding_window=rule.window,
        softcap=rule.softcap,
    )
    assert weights is None
    return out


@pytest.mark.parametrize("block", [2, 4, 512])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_cpu_body_and_its_gradients(monkeypatch, rule, block):
    monkeypatch.setattr(attention, "BLOCK", block)
    inputs, others = ([x.requires_grad_() for x in tensors()] for _ in range(2))
    out, expected = attend(*inputs, rule), by_formula(*others, rule)
    assert (out - expected).abs().max() < 1e-6
    generator = torch.Generator().manual_seed(1)
    out.backward(direction := torch.randn(out.shape, generator=generator))
    expected.backward(direction.double())
    for found, wanted in zip(inputs, others):
        assert (found.grad - wanted.grad).abs().max() < 1e-5


def test_a_window_that_no_sample_fills_is_none():
    query, key, value = tensors()
    assert torch.equal(attend(query, key, value, Rule(0.25, window=9)), attend(query, key, value, Rule(0.25)))


def test_scores_are_not_kept_for_backward(monkeypatch):
    """Neither those of a whole sample under a soft cap, nor its mask under a window."""
    monkeypatch.setattr(attention, "BLOCK", 16)
    length, kept = 256, []
    inputs = [torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3)]
    cu_seqlens = torch.tensor([0, length], dtype=torch.int32)
    for rule in (Rule(0.3, softcap=1.0), Rule(0.3, window=20), Rule(0.3, window=20, softcap=1.0)):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
            attention._per_segment(*inputs, cu_seqlens, rule)
        assert max(kept) < length**2 / 4


@pytest.mark.parametrize("rule", RULES[:4], ids=str)
@pytest.mark.parametrize("torch_2_10", [False, True])
def test_what_torchs_varlen_kernel_is_asked_for(monkeypatch, torch_2_10, rule):
    """The kernel needs a GPU: here a formula stands in for it, with either version's signature."""
    asked = {}

    def formula(q, k, v, rule):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k[:, ::2], v[:, ::2]))
        return by_formula(q, k, v, rule)[0].float()

    def newer(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
        asked.update(window_size=window_size, lengths=(cu_q.tolist(), max_q))
        before, after = window_size
        assert after == 0
        return formula(q, k, v, Rule(scale, window=None if before == -1 else before + 1))

    def older(q, k, v, cu_q, cu_k, max_q, max_k, is_causal=False):
        asked.update(is_causal=is_causal, lengths=(cu_q.tolist(), max_q))
        return formula(q, k, v, Rule(16**-0.5))

    import torch.nn.attention as package

    kernel = types.SimpleNamespace(varlen_attn=older if torch_2_10 else newer)
    monkeypatch.setitem(__import__("sys").modules, "torch.nn.attention.varlen", kernel)
    monkeypatch.setattr(package, "varlen", kernel, raising=False)
    if torch_2_10 and rule.window is not None:
        assert not attention._is_newer_varlen()  # such a rule does not get here
        return
    query, key, value = tensors()
    out = attention._torch_varlen(query, key, value, CU_SEQLENS, 9, rule)
    assert (out - by_formula(query, key, value, rule)).abs().max() < 1e-6
    assert asked["lengths"] == (CU_SEQLENS.tolist(), 9)
    assert asked.get("is_causal", True)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_what_flash_attn_is_asked_for(monkeypatch, rule):
    def flash(q, k, v, cu_q, cu_k, max_q, max_k, *, dropout_p, softmax_scale, causal, window_size, softcap):
        """Its documented meaning: a query sees window_size[0] keys before its own, -1 for all; a cap of 0 is none."""
        assert causal and window_size[1] == 0 and (cu_q.tolist(), max_q) == (CU_SEQLENS.tolist(), 9)
        before = window_size[0]
        rule = Rule(softmax_scale, dropout_p, None if before == -1 else before + 1, softcap or None)
        return by_formula(*(x.transpose(0, 1)[None] for x in (q, k, v)), rule)[0].float()

    module = types.SimpleNamespace(flash_attn_varlen_func=flash)
    monkeypatch.setitem(__import__("sys").modules, "flash_attn", module)
    query, key, value = tensors()
    out = attention._flash_attn_varlen(query, key, value, CU_SEQLENS, 9, rule)
    assert (out - by_formula(query, key, value, rule)).abs().max() < 1e-6


def test_dropout_on_cuda_without_flash_attn_names_the_extra():
    query, key, value = tensors()
    with pytest.raises(ConfigError, match=r"llava_ds\[flash\]"):
        attention._torch_varlen(query, key, value, CU_SEQLENS, 9, Rule(0.25, dropout=0.1))


def test_sinks_are_refused():
    query, key, value = tensors()
    with pytest.raises(ConfigError, match="has attention sinks, which no body here computes: choose another model"):
        attention.varlen_attention(
            None, query, key, value, None, cu_seqlens=CU_SEQLENS, max_seqlen=9, s_aux=torch.zeros(4)
        )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the fused kernels run on CUDA only")
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_cuda_bodies(rule):
    query, key, value = tensors(torch.bfloat16, "cuda")
    out = attend(query, key, value, rule, CU_SEQLENS.cuda())
    assert (out.double().cpu() - by_formula(query, key, value, rule)).abs().max() < 2e-2
