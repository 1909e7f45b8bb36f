"""The attention's bodies agree with the formula, sample by sample: plain, in a window, under a soft cap."""

import functools
import types
import warnings

import pytest
import torch
import torch.nn.functional as F
import toys
import varlen
from transformers import AutoConfig

from llava_ds.constants import ConfigError
from llava_ds.model import attention
from llava_ds.model.attention import Bounds, Rule
from llava_ds.model.open.probe import random_copy

LENGTHS = [5, 1, 9, 3]
CU_SEQLENS = torch.tensor([0, 5, 6, 15, 18], dtype=torch.int32)
BOUNDS = Bounds(CU_SEQLENS, CU_SEQLENS, 9, 9)
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


def through_the_interface(query, key, value, rule: Rule, cu_seqlens: torch.Tensor = CU_SEQLENS) -> torch.Tensor:
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
    out, expected = through_the_interface(*inputs, rule), by_formula(*others, rule)
    assert (out - expected).abs().max() < 1e-6
    generator = torch.Generator().manual_seed(1)
    out.backward(direction := torch.randn(out.shape, generator=generator))
    expected.backward(direction.double())
    for found, wanted in zip(inputs, others):
        assert (found.grad - wanted.grad).abs().max() < 1e-5


# The last tokens of a sample, all of the next one, and two images with a token between them in the third.
IMAGES = [(0, 2, 3), (1, 0, 1), (2, 1, 3), (2, 5, 2)]


def in_blocks(inputs: list[torch.Tensor], rule: Rule) -> torch.Tensor:
    query, key, value = inputs
    options = {"sliding_window": rule.window, "softcap": rule.softcap}
    blocks, _ = varlen.blocks_of(LENGTHS, IMAGES)
    return attention.varlen_attention(
        None, query, key, value, None, rule.scaling, cu_seqlens=CU_SEQLENS, max_seqlen=9, image_blocks=blocks, **options
    )[0]


@pytest.mark.parametrize("block", [2, 512])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_tokens_of_an_image_see_each_other(monkeypatch, rule, block):
    """A window bounds what they see before them, and nothing behind them."""
    monkeypatch.setattr(attention, "BLOCK", block)
    inputs, others = ([x.requires_grad_() for x in tensors()] for _ in range(2))
    out, expected = in_blocks(inputs, rule), varlen.attend_by_mask(*others, varlen.blocks_of(LENGTHS, IMAGES)[1], rule)
    assert (out - expected).abs().max() < 1e-6
    assert (through_the_interface(*inputs, rule) - expected).abs().max() > 0.1  # the causal rule alone
    out.backward(direction := torch.randn(out.shape, generator=torch.Generator().manual_seed(1)))
    expected.backward(direction.double())
    for found, wanted in zip(inputs, others):
        assert (found.grad - wanted.grad).abs().max() < 1e-5


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("kernel", [attention.FLASH_2, attention.FLASH_3, attention.TORCH])
def test_what_kernels_are_asked_for_in_blocks(monkeypatch, kernel, rule):
    """By the meaning of bounds and windows that they document."""
    if kernel == attention.TORCH and rule.softcap is not None:
        return  # such a rule does not get there

    varlen.install_documented(monkeypatch)
    monkeypatch.setattr(attention, "_choose", lambda *_: kernel)
    inputs = tensors()
    expected = varlen.attend_by_mask(*inputs, varlen.blocks_of(LENGTHS, IMAGES)[1], rule)
    assert (in_blocks(inputs, rule) - expected).abs().max() < 1e-6


# Few of the first sample, none of the second, most of the third, all of the last.
KEPT = torch.tensor([1, 4, 6, 7, 8, 10, 11, 13, 15, 16, 17])


@pytest.mark.parametrize("block", [2, 512])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_queries_at_kept_positions(monkeypatch, rule, block):
    monkeypatch.setattr(attention, "BLOCK", block)
    inputs, others = ([x.requires_grad_() for x in tensors()] for _ in range(2))
    query, key, value = inputs
    out = attention.attend(query.index_select(2, KEPT), key, value, BOUNDS, rule, KEPT)
    expected = by_formula(*others, rule).index_select(1, KEPT)
    assert out.shape == (1, len(KEPT), 4, 16) and (out - expected).abs().max() < 1e-6
    generator = torch.Generator().manual_seed(1)
    out.backward(direction := torch.randn(out.shape, generator=generator))
    expected.backward(direction.double())
    for found, wanted in zip(inputs, others):
        assert (found.grad - wanted.grad).abs().max() < 1e-5


def test_few_kept_queries_are_not_computed_as_all(monkeypatch):
    seen = []
    own = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda q, *a, **k: seen.append(q.shape[2]) or own(q, *a, **k)
    )
    query, key, value = tensors()
    attention.attend(query.index_select(2, KEPT), key, value, BOUNDS, Rule(0.25), KEPT)
    assert seen == [2, 9, 3]


@pytest.mark.parametrize("takes_groups", [True, False])
@pytest.mark.parametrize("kept", [None, KEPT], ids=["all", "kept"])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_sdpa_gets_repeated_heads_where_its_kernels_share_none(monkeypatch, rule, kept, takes_groups):
    seen = []
    own = F.scaled_dot_product_attention

    def sdpa(query, key, value, *args, enable_gqa, **options):
        seen.append((query.shape[1], key.shape[1], value.shape[1], enable_gqa))
        return own(query, key, value, *args, enable_gqa=enable_gqa, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", sdpa)
    monkeypatch.setattr(attention, "_takes_groups", lambda *_: takes_groups)
    inputs, others = ([x.requires_grad_() for x in tensors()] for _ in range(2))
    query, key, value = inputs
    given = query if kept is None else query.index_select(2, kept)
    out = attention.attend(given, key, value, BOUNDS, rule, kept)
    expected = by_formula(*others, rule)
    expected = expected if kept is None else expected.index_select(1, kept)
    assert (out - expected).abs().max() < 1e-6
    out.backward(direction := torch.randn(out.shape, generator=torch.Generator().manual_seed(1)))
    expected.backward(direction.double())
    for found, wanted in zip(inputs, others):
        assert found.grad.shape == wanted.grad.shape and (found.grad - wanted.grad).abs().max() < 1e-5
    shared, repeated = (4, 2, 2, True), (4, 4, 4, False)
    assert set(seen) == (set() if rule.softcap else {shared if takes_groups else repeated})


@pytest.mark.parametrize(
    ("dtype", "capability", "width", "masked", "repeats"),
    [
        (torch.float32, (9, 0), 64, False, True),
        (torch.float16, (7, 5), 64, False, True),  # T4
        (torch.bfloat16, (8, 0), 64, False, False),
        (torch.bfloat16, (8, 0), 64, True, True),  # the flash kernel takes no mask
        (torch.bfloat16, (9, 0), 320, False, True),
    ],
)
def test_when_heads_are_repeated_on_cuda(monkeypatch, dtype, capability, width, masked, repeats):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    assert attention._takes_groups("cuda", dtype, width, masked) is not repeats
    assert attention._takes_groups("cpu", dtype, width, masked)


def test_a_kernel_gets_kept_queries_at_their_places(monkeypatch):
    """It lays queries and keys of a sample end to end, so it is given all of them."""

    def kernel(query, key, value, bounds, rule):
        assert query.shape[2] == key.shape[2]
        return by_formula(query, key, value, rule).float()

    monkeypatch.setattr(attention, "_choose", lambda *_: attention.TORCH)
    monkeypatch.setitem(attention.KERNELS, attention.TORCH, kernel)
    query, key, value = tensors()
    out = attention.attend(query.index_select(2, KEPT), key, value, BOUNDS, RULES[2], KEPT)
    assert (out - by_formula(query, key, value, RULES[2]).index_select(1, KEPT)).abs().max() < 1e-6


def test_under_autocast_all_is_of_its_precision(monkeypatch):
    """Rotary angles are float32 there, and what they turn is."""
    monkeypatch.setattr(attention, "_per_segment", lambda *tensors: tensors[:3])
    query, key, value = tensors()
    with torch.autocast("cpu", torch.bfloat16):
        seen = attention.attend(query, key, value.bfloat16(), BOUNDS, Rule(0.25))
    assert {x.dtype for x in seen} == {torch.bfloat16}


def test_a_window_that_no_sample_fills_is_none():
    query, key, value = tensors()
    windowed, plain = (through_the_interface(query, key, value, rule) for rule in (Rule(0.25, window=9), Rule(0.25)))
    assert torch.equal(windowed, plain)


def test_scores_are_not_kept_for_backward(monkeypatch):
    """Neither those of a whole sample under a soft cap, nor its mask under a window."""
    monkeypatch.setattr(attention, "BLOCK", 16)
    length, kept = 256, []
    inputs = [torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3)]
    cu_seqlens = torch.tensor([0, length], dtype=torch.int32)
    bounds = Bounds(cu_seqlens, cu_seqlens, length, length)
    for rule in (Rule(0.3, softcap=1.0), Rule(0.3, window=20), Rule(0.3, window=20, softcap=1.0)):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
            attention._per_segment(*inputs, bounds, rule)
        assert max(kept) < length**2 / 4


@pytest.mark.parametrize("rule", RULES[:4], ids=str)
@pytest.mark.parametrize("version", ["2.10", "2.11", "2.13"])
def test_what_torchs_varlen_kernel_is_asked_for(monkeypatch, version, rule):
    """The kernel needs a GPU: here a formula stands in for it, with each version's signature."""
    asked = {}

    def formula(q, k, v, rule, grouped=False):
        assert k.shape[1] == v.shape[1] == (2 if grouped else 4)
        if not grouped:
            k, v = k[:, ::2], v[:, ::2]
        return by_formula(*(x.transpose(0, 1)[None] for x in (q, k, v)), rule)[0].float()

    def newest(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
        asked.update(window_size=window_size, lengths=(cu_q.tolist(), max_q))
        before, after = window_size
        assert after == 0 and enable_gqa
        return formula(q, k, v, Rule(scale, window=None if before == -1 else before + 1), True)

    def newer(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
        asked.update(window_size=window_size, lengths=(cu_q.tolist(), max_q))
        before, after = window_size
        assert after == 0
        return formula(q, k, v, Rule(scale, window=None if before == -1 else before + 1))

    def older(q, k, v, cu_q, cu_k, max_q, max_k, is_causal=False):
        asked.update(is_causal=is_causal, lengths=(cu_q.tolist(), max_q))
        return formula(q, k, v, Rule(16**-0.5))

    import torch.nn.attention as package

    kernel = types.SimpleNamespace(varlen_attn={"2.10": older, "2.11": newer, "2.13": newest}[version])
    monkeypatch.setitem(__import__("sys").modules, "torch.nn.attention.varlen", kernel)
    monkeypatch.setattr(package, "varlen", kernel, raising=False)
    if version == "2.10" and rule.window is not None:
        assert not attention._varlen_takes("window_size")  # such a rule does not get here
        return
    query, key, value = tensors()
    out = attention._torch_varlen(query, key, value, BOUNDS, rule)
    assert (out - by_formula(query, key, value, rule)).abs().max() < 1e-6
    assert asked["lengths"] == (CU_SEQLENS.tolist(), 9)
    assert asked.get("is_causal", True)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_what_flash_attn_is_asked_for(monkeypatch, rule):
    def flash(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, **options):
        """Its documented meaning: a query sees window_size[0] keys before its own, -1 for all; a cap of 0 is none."""
        window_size, softmax_scale, softcap = (options.pop(x) for x in ("window_size", "softmax_scale", "softcap"))
        assert options == {"causal": True} and window_size[1] == 0
        assert (cu_seqlens_q.tolist(), max_seqlen_q) == (CU_SEQLENS.tolist(), 9)
        assert cu_seqlens_k is cu_seqlens_q and max_seqlen_k == max_seqlen_q
        before = window_size[0]
        rule = Rule(softmax_scale, dropout_p, None if before == -1 else before + 1, softcap or None)
        return by_formula(*(x.transpose(0, 1)[None] for x in (q, k, v)), rule)[0].float()

    module = types.SimpleNamespace(flash_attn_varlen_func=flash)
    monkeypatch.setitem(__import__("sys").modules, "flash_attn", module)
    query, key, value = tensors()
    out = attention._flash_attn_2(query, key, value, BOUNDS, rule)
    assert (out - by_formula(query, key, value, rule)).abs().max() < 1e-6


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("with_sums", [False, True])  # as the versions up to 2025 return them
def test_what_flash_attn_3_is_asked_for(monkeypatch, rule, with_sums):
    def flash(
        q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size, softcap
    ):
        """hopper/flash_attn_interface.py: windows and caps as flash-attn 2 has them."""
        assert causal and window_size[1] == 0 and (cu_seqlens_q.tolist(), max_seqlen_q) == (CU_SEQLENS.tolist(), 9)
        assert cu_seqlens_k is cu_seqlens_q and max_seqlen_k == max_seqlen_q
        before = window_size[0]
        rule = Rule(softmax_scale, 0.0, None if before == -1 else before + 1, softcap or None)
        out = by_formula(*(x.transpose(0, 1)[None] for x in (q, k, v)), rule)[0].float()
        return (out, None) if with_sums else out

    module = types.SimpleNamespace(flash_attn_varlen_func=flash)
    monkeypatch.setitem(__import__("sys").modules, "flash_attn_interface", module)
    query, key, value = tensors()
    out = attention._flash_attn_3(query, key, value, BOUNDS, rule)
    assert (out - by_formula(query, key, value, rule)).abs().max() < 1e-6


CASES = [
    # installed, capability, dtype, heads, what the model has; the body, and the reason of each better one
    ((), 9, "bfloat16", {}, "torch's varlen kernel", ["not installed", "not installed (the extra llava_ds[flash])"]),
    (("flash_attn", "flash_attn_interface"), 9, "float16", {}, "flash-attn 3", []),
    (("flash_attn", "flash_attn_interface"), 8, "bfloat16", {}, "flash-attn 2", ["made for Hopper GPUs"]),
    (("flash_attn", "flash_attn_interface"), 9, "bfloat16", {"attention_dropout": 0.1}, "flash-attn 2", ["no dropout"]),
    (
        ("flash_attn", "flash_attn_interface"),
        9,
        "float32",
        {},
        "SDPA sample by sample",
        ["half precision only, not in float32"] * 3,
    ),
    (("flash_attn",), 9, "bfloat16", {"head_dim": 512}, "SDPA sample by sample", ["equal width, at most 256"] * 3),
    (("flash_attn",), 9, "bfloat16", {"head_dim": 100}, "SDPA sample by sample", ["multiple of 8, not 100"] * 3),
    (("flash_attn",), 9, "bfloat16", {"head_dim": 80}, "flash-attn 2", ["not installed"]),
    (("flash_attn",), 9, "bfloat16", {"head_dim": 224}, "flash-attn 2", ["not installed"]),
    (
        ("flash_attn",),
        (8, 9),  # 4090 and L40S
        "bfloat16",
        {"head_dim": 224},
        "SDPA sample by sample",
        ["not installed"] + ["a backward for heads of 224 on A100 and H100 only"] * 2,
    ),
    (("flash_attn",), (8, 9), "bfloat16", {"head_dim": 256}, "flash-attn 2", ["not installed"]),
    (
        ("flash_attn",),
        (8, 9),
        "bfloat16",
        {"head_dim": 256, "attention_dropout": 0.1},
        "SDPA sample by sample",
        ["not installed"] + ["a backward for heads of 256 on A100 and H100 only"] * 2,
    ),
    (
        (),
        9,
        "bfloat16",
        {"attention_dropout": 0.1},
        "SDPA sample by sample",
        ["not installed", "not installed", "has no dropout"],
    ),
    (
        ("flash_attn", "flash_attn_interface"),
        7,  # V100 and T4
        "float16",
        {},
        "SDPA sample by sample",
        ["made for Hopper GPUs"] + ["needs compute capability 8.0"] * 2,
    ),
    ((), 9, "bfloat16", {"family": "gemma2"}, "SDPA sample by sample", ["not installed"] * 2 + ["has no soft cap"]),
]


@pytest.mark.parametrize(("installed", "capability", "dtype", "model", "body", "reasons"), CASES)
def test_the_best_body_that_fits_is_chosen_and_reported(
    monkeypatch, installed, capability, dtype, model, body, reasons
):
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: name if name in installed else None)
    capability = capability if isinstance(capability, tuple) else (capability, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    config = toys.language_model_config(**{"family": "llama", **model})
    report = attention.attention_report(config, torch.device("cuda"), getattr(torch, dtype))
    assert report.startswith(f"attention: {body}")
    found = report.removeprefix(f"attention: {body}").strip(" ()").split("; ") if reasons else []
    assert len(found) == len(reasons)
    for reason, line, better in zip(reasons, found, (attention.FLASH_3, attention.FLASH_2, attention.TORCH)):
        assert line.startswith(better) and reason.rstrip(")") in line


def test_compiled_layers_with_a_kernel_are_one_graph_for_all_lengths(monkeypatch):
    """As on a GPU: a formula stands in for the kernel. The sample by sample body is never compiled."""

    def kernel(query, key, value, bounds, rule):
        key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)

    monkeypatch.setattr(attention, "_best_kernel", functools.cache(lambda *_: attention.TORCH))
    monkeypatch.setitem(attention.KERNELS, attention.TORCH, kernel)
    torch._dynamo.reset()
    model, graphs = random_copy(toys.language_model_config("qwen3")), []
    layer = model.model.layers[0]
    own, backend = layer.forward, lambda graph, _: graphs.append(graph) or graph
    layer.forward = torch.compile(lambda *a, **k: own(*a, **k), backend=backend, dynamic=True, fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for length in (21, 30, 17):
            inputs = {"position_ids": torch.arange(length)[None], "max_seqlen": length, "use_cache": False}
            inputs["cu_seqlens"] = torch.tensor([0, length], dtype=torch.int32)
            embeds = torch.randn(1, length, model.config.hidden_size, requires_grad=True)
            model(inputs_embeds=embeds, **inputs).logits.sum().backward()
    assert len(graphs) == 1


def test_without_a_gpu_the_report_says_so():
    config = toys.language_model_config("llama")
    report = attention.attention_report(config, torch.device("cpu"), torch.bfloat16)
    assert report.startswith("attention: SDPA sample by sample (flash-attn 3 needs a CUDA device, this is cpu; ")


def test_the_report_has_every_width_of_heads():
    config = AutoConfig.for_model(
        "gemma4_text", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]
    )
    report = attention.attention_report(config, torch.device("cpu"), torch.bfloat16)
    assert report.startswith("attention: heads of 256 by SDPA sample by sample (")
    assert ", heads of 512 by SDPA sample by sample (" in report
    assert attention.needs_lengths(config) and not attention.needs_lengths(toys.language_model_config("llama"))


def test_sinks_are_refused():
    query, key, value = tensors()
    with pytest.raises(ConfigError, match="has attention sinks, and these are not supported: choose another model"):
        attention.varlen_attention(
            None, query, key, value, None, cu_seqlens=CU_SEQLENS, max_seqlen=9, s_aux=torch.zeros(4)
        )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the fused kernels run on CUDA only")
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_cuda_bodies(rule):
    query, key, value = tensors(torch.bfloat16, "cuda")
    out = through_the_interface(query, key, value, rule, CU_SEQLENS.cuda())
    assert (out.double().cpu() - by_formula(query, key, value, rule)).abs().max() < 2e-2
