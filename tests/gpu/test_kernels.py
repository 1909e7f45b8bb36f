# H query heads, K key heads, T tokens of all samples laid end to end, E head width
"""Every installed attention kernel against the formula in float64, forward and backward."""

import sys
import types

import pytest
import torch
import varlen
from gpu_lane import DEVICE, REHEARSED

from llava_ds.batch import SharedPrompts
from llava_ds.model import attention
from llava_ds.model.attention import FLASH_2, FLASH_3, SEGMENTS, TORCH, Bounds, Rule

pytestmark = pytest.mark.gpu

LENGTHS = [7, 1, 9, 3] if REHEARSED else [700, 1, 1030, 64, 5]
WIDTHS = (64, 256) if REHEARSED else (64, 72, 80, 96, 128, 160, 192, 256)
HEADS = {"heads": (4, 4), "grouped heads": (8, 2), "one key head": (4, 1)}
RULES = {
    "causal": Rule(0.1),
    "window": Rule(0.1, window=4 if REHEARSED else 128),
    "soft cap": Rule(0.1, softcap=5.0),
    "window and soft cap": Rule(0.1, window=4 if REHEARSED else 128, softcap=5.0),
}
# Norm of the difference by the norm of what the formula gives: a few units of the last digit of the inputs.
MOST = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (1e-2, 2e-2), torch.float16: (2e-3, 4e-3)}


def by_formula(query, key, value, rule: Rule) -> torch.Tensor:
    """(1, T, H, E) in float64, a sample at a time."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    parts = []
    for q, k, v in zip(*(x.split(LENGTHS, 2) for x in (query, key, value))):
        scores = q @ k.transpose(2, 3) * rule.scaling
        if rule.softcap is not None:
            scores = rule.softcap * torch.tanh(scores / rule.softcap)
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        if rule.window is not None:
            hidden |= torch.ones_like(hidden).tril(-rule.window)
        parts.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v)
    return torch.cat(parts, 2).transpose(1, 2)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """flash-attn's function with its parameters, by the formula, in a rehearsal."""
    assert causal == (window_size[1] == 0)
    for starts, longest in ((cu_seqlens_q, max_seqlen_q), (cu_seqlens_k, max_seqlen_k)):
        assert torch.diff(starts).max() == longest
    return varlen.attend_as_documented(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, window_size, softcap).to(
        q.dtype
    )


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
):
    """torch's function with its parameters, by the formula, in a rehearsal."""
    return flash_attn_varlen_func(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, 0.0, scale, window_size[1] == 0, window_size
    )


@pytest.fixture
def kernels(monkeypatch):
    """The kernels by name; in a rehearsal with stand-ins for the packages' functions."""
    if REHEARSED:
        stand_in = types.SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
        monkeypatch.setitem(sys.modules, "flash_attn", stand_in)
        three = types.SimpleNamespace(
            flash_attn_varlen_func=lambda *, dropout_p=0.0, **given: flash_attn_varlen_func(**given)
        )
        monkeypatch.setitem(sys.modules, "flash_attn_interface", three)
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    return attention.KERNELS


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("kernel", [FLASH_3, FLASH_2, TORCH, SEGMENTS])
def test_a_kernel_computes_the_formula(kernels, record_property, kernel, dtype, width, heads, rule):
    if kernel != SEGMENTS and (problem := refused(kernel, dtype, width, rule)):
        pytest.skip(f"{kernel} {problem}")
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, n, sum(LENGTHS), width) for n in (heads[0], heads[1], heads[1])]
    inputs = [torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_() for shape in shapes]
    others = [x.detach().double().requires_grad_() for x in inputs]
    starts = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32, device=DEVICE)
    bounds = Bounds(starts, starts, max(LENGTHS), max(LENGTHS))
    out = kernels.get(kernel, attention._per_segment)(*inputs, bounds, rule)
    check(out, by_formula(*others, rule), inputs, others, record_property)


# Of the first sample, and two of the third.
IMAGES = [(0, 2, 4), (2, 0, 3), (2, 5, 4)] if REHEARSED else [(0, 40, 256), (2, 3, 256), (2, 300, 729)]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("width", [WIDTHS[0], WIDTHS[-1]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("kernel", [FLASH_3, FLASH_2, TORCH, SEGMENTS])
def test_tokens_of_an_image_see_each_other(kernels, monkeypatch, record_property, kernel, dtype, width, rule):
    """Kernels count windows as if a block's queries were the last of its keys."""
    if kernel != SEGMENTS and (problem := refused(kernel, dtype, width, rule)):
        pytest.skip(f"{kernel} {problem}")
    monkeypatch.setattr(attention, "_choose", lambda *_: kernel)
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, n, sum(LENGTHS), width) for n in (8, 2, 2)]
    inputs = [torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_() for shape in shapes]
    others = [x.detach().double().requires_grad_() for x in inputs]
    blocks, seen = varlen.blocks_of(LENGTHS, IMAGES)
    blocks = blocks._make(x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in blocks)
    starts = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32, device=DEVICE)
    out, _ = attention.varlen_attention(
        None, *inputs, None, rule.scaling, cu_seqlens=starts, max_seqlen=max(LENGTHS), image_blocks=blocks,
        sliding_window=rule.window, softcap=rule.softcap,
    )  # fmt: skip
    check(out, varlen.attend_by_mask(*others, seen.to(DEVICE), rule), inputs, others, record_property)


# First tokens that samples share with the first one.
PROMPTS = [0, 0, 5, 0] if REHEARSED else [0, 0, 690, 0, 4]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("width", [WIDTHS[0], WIDTHS[-1]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("kernel", [FLASH_3, FLASH_2, TORCH, SEGMENTS])
def test_answers_see_the_prompt_that_they_share(kernels, monkeypatch, record_property, kernel, dtype, width, rule):
    """Kernels count a sample's queries as its last tokens."""
    if kernel != SEGMENTS and (problem := refused(kernel, dtype, width, rule)):
        pytest.skip(f"{kernel} {problem}")
    monkeypatch.setattr(attention, "_choose", lambda *_: kernel)
    own = [n - shared for n, shared in zip(LENGTHS, PROMPTS)]
    firsts, ends = ([0, *torch.tensor(sizes).cumsum(0).tolist()] for sizes in (own, LENGTHS))
    parts = zip(firsts, own, PROMPTS)
    keys = torch.tensor([i for first, n, m in parts for i in (*range(m), *range(first, first + n))], device=DEVICE)
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, n, sum(own), width) for n in (8, 2, 2)]
    inputs = [torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_() for shape in shapes]
    others = [x.detach().double().requires_grad_() for x in inputs]
    starts, cu_keys = (torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in (firsts, ends))
    out, _ = attention.varlen_attention(
        None, *inputs, None, rule.scaling, cu_seqlens=starts, max_seqlen=max(own), sliding_window=rule.window,
        softcap=rule.softcap, shared_prompts=SharedPrompts(keys, cu_keys, max(LENGTHS), keys, keys),
    )  # fmt: skip
    copies = by_formula(*(x.index_select(2, keys) for x in others), rule)
    kept = torch.cat([torch.arange(end + shared, after) for end, after, shared in zip(ends, ends[1:], PROMPTS)])
    check(out, copies.index_select(1, kept.to(DEVICE)), inputs, others, record_property)


def check(out, expected, inputs, others, record_property) -> None:
    """Compare values and gradients with the formula's."""
    generator, dtype = torch.Generator().manual_seed(1), out.dtype
    direction = torch.randn(out.shape, generator=generator).to(DEVICE, dtype)
    out.backward(direction)
    expected.backward(direction.double())
    forward = distance(out, expected)
    backward = max(distance(x.grad, y.grad) for x, y in zip(inputs, others))
    record_property("forward", f"{forward:.1e}")
    record_property("backward", f"{backward:.1e}")
    assert forward < MOST[dtype][0] and backward < MOST[dtype][1]


def refused(kernel: str, dtype: torch.dtype, width: int, rule: Rule) -> str | None:
    """The reason for which training would not choose the kernel; a rehearsal has stand-ins for most of them."""
    if REHEARSED:
        return None if kernel != TORCH or rule.softcap is None else "has no soft cap"
    _, why = attention._kernels("cuda", dtype, width, rule.window is not None, rule.softcap is not None, False)
    return why.get(kernel)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()
