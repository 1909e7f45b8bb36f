# H query heads, K key heads, E head width
"""Attention over samples laid end to end as kernels document it, and a pack with image blocks."""

import sys
import types

import torch

from llava_ds.batch import ImageBlocks


def attend_as_documented(
    q, k, v, cu_seqlens_q, cu_seqlens_k, scale: float, window_size: tuple[int, int], softcap: float = 0.0
) -> torch.Tensor:
    """(queries, H, E) in float64, a sample at a time: q (queries, H, E); k and v (keys, K, E).

    A sample's queries are its last tokens; they see window_size keys before and after their own, -1 for all; a cap of 0
    means no cap.
    """
    groups, parts = q.shape[1] // k.shape[1], []
    q, k, v = (x.double().transpose(0, 1) for x in (q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
    queries, keys = (torch.diff(starts).tolist() for starts in (cu_seqlens_q, cu_seqlens_k))
    for one, two, three in zip(q.split(queries, 1), k.split(keys, 1), v.split(keys, 1)):
        scores = one @ two.transpose(1, 2) * scale
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        length = two.shape[1]
        places = torch.arange(length, device=q.device)
        ahead = places[None] - places[length - one.shape[1] :, None]
        before, behind = (length if side < 0 else side for side in window_size)
        parts.append(scores.masked_fill((ahead < -before) | (ahead > behind), -torch.inf).softmax(-1) @ three)
    return torch.cat(parts, 1).transpose(0, 1)


def blocks_of(lengths: list[int], images: list[tuple[int, int, int]]) -> tuple[ImageBlocks, torch.Tensor]:
    """The blocks of samples of these lengths with images (sample, first token, tokens), and which tokens see which
    others (T, T) without a window."""
    starts = torch.tensor([0, *lengths]).cumsum(0)
    is_image = torch.zeros(int(starts[-1]), dtype=torch.bool)
    seen = torch.block_diag(*(torch.ones(n, n).tril() for n in lengths)).bool()
    for sample, first, tokens in images:
        rows = slice(int(starts[sample]) + first, int(starts[sample]) + first + tokens)
        is_image[rows] = seen[rows, rows] = True
    return ImageBlocks.of(is_image, starts), seen


def attend_by_mask(query, key, value, seen: torch.Tensor, rule) -> torch.Tensor:
    """(1, T, H, E) in float64 under a mask (T, T), and a rule's window and soft cap; causal or not, the mask says."""
    query, key, value = (x.double() for x in (query, key, value))
    groups, places = query.shape[1] // key.shape[1], torch.arange(query.shape[2], device=query.device)
    scores = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * rule.scaling
    scores = scores if rule.softcap is None else rule.softcap * torch.tanh(scores / rule.softcap)
    if rule.window is not None:
        seen = seen & (places[:, None] - places < rule.window)
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value.repeat_interleave(groups, 1)).transpose(1, 2)


def install_documented(monkeypatch) -> None:
    """Put kernels in the place of flash-attn 2 and 3 and torch's that compute what these document, on any device."""

    def flash(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size,
              softcap, dropout_p=0.0):  # fmt: skip
        for starts, longest in ((cu_seqlens_q, max_seqlen_q), (cu_seqlens_k, max_seqlen_k)):
            assert starts.dtype == torch.int32 and torch.diff(starts).max() == longest
        assert causal == (window_size[1] == 0)
        return attend_as_documented(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, window_size, softcap).float()

    def torchs(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa):
        return flash(q, k, v, cu_q, cu_k, max_q, max_k, scale, window_size[1] == 0, window_size, 0.0)

    module = types.SimpleNamespace(flash_attn_varlen_func=flash)
    for name in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", torchs)
