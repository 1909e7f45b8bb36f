# H query heads, K key heads, T tokens of a pack, S of them with a query, L tokens of one sample, R image tokens that
# see each other, E head width
"""Attention over samples laid end to end. Samples don't attend to each other, and no T x T mask is stored."""

import functools
import importlib
import importlib.util
import inspect
import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import repeat_kv

from llava_ds.batch import ImageBlocks, SharedPrompts
from llava_ds.constants import ConfigError
from llava_ds.model.families.language import head_width, layer_configs

NAME = "llava_ds_varlen"
FLEX_NAME = "llava_ds_flex"
TOWER_NAME = "llava_ds_flash_varlen"  # transformers' towers pass lengths only to attentions with "flash" in their name

# The kernels, in order of preference.
FLASH_3, FLASH_2, TORCH, SEGMENTS = "flash-attn 3", "flash-attn 2", "torch's varlen kernel", "SDPA sample by sample"

HALF = (torch.float16, torch.bfloat16)
# flash-attn 2 and 3, and torch's kernels, which share their code, need head widths that are multiples of 8, up to 256.
MAX_FUSED_WIDTH, WIDTH_STEP = 256, 8
# Their backward for widths from the first to the second (with dropout: to any) needs these compute capabilities.
CROWDED_WIDTHS, ROOMY_CAPABILITIES = (192, 224), ((8, 0), (9, 0))
BLOCK = 512  # query block size of the fallback for windows and soft caps


class Rule(NamedTuple):
    """Attention options. window: a token sees itself and the window - 1 tokens before it (None: all); causal: False if
    a token also sees the tokens after it; lengths, own: number of keys and of queries per sample, as Python integers.
    If they are None, the fallback waits for the device to read them."""

    scaling: float
    dropout: float = 0.0
    window: int | None = None
    softcap: float | None = None
    causal: bool = True
    lengths: tuple[int, ...] | None = None
    own: tuple[int, ...] | None = None


class Bounds(NamedTuple):
    """Boundaries of the samples. queries, keys (samples + 1,) int32: their starts, and the total; max_*: the longest.

    If a sample has fewer queries than keys, the queries are its last tokens. key_positions (K,) int64: the positions in
    the pack of the keys; None: all positions.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    max_queries: int
    max_keys: int
    key_positions: torch.Tensor | None = None

    @classmethod
    def of(cls, cu_seqlens: torch.Tensor, max_seqlen: int, shared: SharedPrompts | None = None) -> "Bounds":
        """Return the bounds of a pack. A sample's keys are its tokens, after those of the prompt that it shares."""
        if shared is None:
            return cls(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
        return cls(cu_seqlens, shared.cu_keys, max_seqlen, shared.max_keys, shared.keys)


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
    image_blocks: ImageBlocks | None = None,
    lengths: tuple[int, ...] | None = None,
    shared_prompts: SharedPrompts | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sample of a pack; with image_blocks, tokens of an image also see each other.

    query (1, H, T, E); key and value (1, K, T, E); cu_seqlens (samples + 1,) int32: start of each sample, and T;
    max_seqlen: tokens of the longest sample. sliding_window and softcap are defined as in transformers: token i sees
    token j if 0 <= i - j < sliding_window, and a score s becomes softcap * tanh(s / softcap). lengths: tokens of each
    sample; if None, the fallback waits for the device to read them. shared_prompts: Batch.shared.
    Returns (1, T, H, E), and None for the attention weights. Raises ConfigError for attention sinks.
    transformers' AttentionInterface dictates the signature, and passes on keyword arguments given to the model.
    """
    if s_aux is not None:
        raise ConfigError("the language model has attention sinks, and these are not supported: choose another model")
    bounds, own = Bounds.of(cu_seqlens, max_seqlen, shared_prompts), None
    if shared_prompts is not None:
        lengths, own = shared_prompts.lengths, shared_prompts.own
    rule = Rule(
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        dropout,
        sliding_window if sliding_window is not None and sliding_window < bounds.max_keys else None,
        softcap,
        lengths=lengths,
        own=own,
    )
    out = attend(query, key, value, bounds, rule)
    if image_blocks is not None and not (image_blocks.need_windows and sliding_window is None):
        out = out.index_copy(1, image_blocks.rows, attend_in_blocks(query, key, value, image_blocks, rule))
    return out, None


def tower_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    *,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Bidirectional attention of a tower within each image or window.

    query, key and value (1, H, T, E); cu_seq_lens_q int32: start of each image or window, and T; max_length_q: most
    patches of one. Returns (1, T, H, E), and None for the attention weights. Signature: see varlen_attention.
    """
    return attend(query, key, value, Bounds.of(cu_seq_lens_q, max_length_q), Rule(scaling, dropout, causal=False)), None


def flex_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: tuple[torch.Tensor, int],
    scaling: float,
    dropout: float = 0.0,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """tower_attention for SigLIP 2, whose layers pass on no keyword arguments, only the mask.

    attention_mask: (cu_seq_lens_q, max_length_q) instead of a mask. Signature: see varlen_attention.
    """
    return attend(query, key, value, Bounds.of(*attention_mask), Rule(scaling, dropout, causal=False)), None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: Bounds,
    rule: Rule,
    query_positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention under a Rule: (1, T, H, E). For the shapes of query, key and value see varlen_attention.

    query_positions (S,), ascending: if given, query (1, H, S, E) has only these positions, and so has the result.
    """
    query, key, value = in_autocast(query, key, value)
    length = key.shape[2]
    if bounds.key_positions is not None:
        key, value = (x.index_select(2, bounds.key_positions) for x in (key, value))
    chosen = _chosen_for(query, value, rule)
    if chosen == SEGMENTS:
        return _per_segment(query, key, value, bounds, rule, query_positions)
    if query_positions is not None:
        # The kernels' causal mask needs as many queries as keys. The extra cost is that of one layer's attention.
        query = _spread(query, query_positions, length)
    out = KERNELS[chosen](query, key, value, bounds, rule)
    return out if query_positions is None else out.index_select(1, query_positions)


def attend_in_blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocks: ImageBlocks, rule: Rule
) -> torch.Tensor:
    """Compute the attention of image tokens: each sees its sample up to the end of its image. Returns (1, R, H, E).

    query, key, value: of all tokens, shaped as in varlen_attention. A window limits only the tokens before a token.
    Source: transformers' create_masks_for_vision_model.
    """
    query = query.index_select(2, blocks.rows)  # (1, H, R, E)
    key, value = (x.index_select(2, blocks.keys) for x in (key, value))
    query, key, value = in_autocast(query, key, value)
    bounds, rule = Bounds(*blocks[2:6]), rule._replace(causal=False, lengths=None, own=None)
    chosen = _chosen_for(query, value, rule)
    if chosen == SEGMENTS:
        return _per_segment(query, key, value, bounds, rule)
    return KERNELS[chosen](query, key, value, bounds, rule)


def _chosen_for(query: torch.Tensor, value: torch.Tensor, rule: Rule) -> str:
    """Choose the kernel for these tensors' device, dtype and head width."""
    width = query.shape[-1]
    return _choose(
        query.device.type,
        query.dtype,
        width if width == value.shape[-1] else None,
        rule.window is not None,
        rule.softcap is not None,
        rule.dropout > 0,
    )


def in_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast tensors to autocast's precision if autocast is on, because the rotary embedding returns float32."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(device)) for x in tensors)


def _spread(query: torch.Tensor, query_positions: torch.Tensor, length: int) -> torch.Tensor:
    """Place queries (1, H, S, E) at their positions, with zeros elsewhere: (1, H, length, E)."""
    heads, width = query.shape[1], query.shape[3]
    return query.new_zeros(1, heads, length, width).index_copy(2, query_positions, query)


@torch.compiler.assume_constant_result  # installed packages and devices don't change
def _choose(device: str, dtype: torch.dtype, width: int | None, window: bool, softcap: bool, dropout: bool) -> str:
    return _best_kernel(device, dtype, width, window, softcap, dropout)


@functools.cache  # a separate function, because torch.compile ignores a cache around _choose, with a warning
def _best_kernel(device: str, dtype: torch.dtype, width: int | None, window: bool, softcap: bool, dropout: bool) -> str:
    return _kernels(device, dtype, width, window, softcap, dropout)[0]


def _kernels(
    device: str, dtype: torch.dtype, width: int | None, window: bool, softcap: bool, dropout: bool
) -> tuple[str, dict[str, str]]:
    """Return the best usable kernel, and for each better kernel the reason why it is not usable.

    width: head width; None if queries and values differ in width. window, softcap, dropout: True if the model has one.
    """
    why: dict[str, str] = {}
    for kernel in (FLASH_3, FLASH_2, TORCH):
        problem = _problem(kernel, device, dtype, width, window, softcap, dropout)
        if problem is None:
            return kernel, why
        why[kernel] = problem
    return SEGMENTS, why


def _problem(
    kernel: str, device: str, dtype: torch.dtype, width: int | None, window: bool, softcap: bool, dropout: bool
) -> str | None:
    if device != "cuda":
        return f"needs a CUDA device, this is {device}"
    if dtype not in HALF:
        return f"computes in half precision only, not in {str(dtype).removeprefix('torch.')}"
    if width is None or width > MAX_FUSED_WIDTH:
        return f"needs heads of equal width, at most {MAX_FUSED_WIDTH}"
    if width % WIDTH_STEP:
        return f"needs heads whose width is a multiple of {WIDTH_STEP}, not {width}"
    capability = torch.cuda.get_device_capability()
    if kernel == FLASH_3:
        if importlib.util.find_spec("flash_attn_interface") is None:
            return "not installed"
        if capability[0] != 9:
            return "made for Hopper GPUs"
        return "has no dropout" if dropout else _indeterminism(kernel)
    if kernel == FLASH_2 and importlib.util.find_spec("flash_attn") is None:
        return "not installed (the extra llava_ds[flash])"
    if capability < (8, 0):
        return "needs compute capability 8.0"
    least, most = CROWDED_WIDTHS
    if least < width and (width <= most or dropout) and capability not in ROOMY_CAPABILITIES:
        return f"has a backward for heads of {width} on A100 and H100 only"
    if kernel == FLASH_2:
        return "has no dropout with a soft cap" if softcap and dropout else _indeterminism(kernel)
    if softcap:
        return "has no soft cap"
    if dropout:
        return "has no dropout"
    return "has no windows before torch 2.11" if window and not _varlen_takes("window_size") else None


def _indeterminism(kernel: str) -> str | None:
    """Return why flash-attn can't be used under --deterministic, or None. Versions before 2.4.1 lack the option."""
    if not torch.are_deterministic_algorithms_enabled():
        return None
    module = importlib.import_module("flash_attn_interface" if kernel == FLASH_3 else "flash_attn")
    takes = inspect.signature(module.flash_attn_varlen_func).parameters
    return None if "deterministic" in takes else "has no deterministic backward in this version"


def attention_report(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> str:
    """Return a line with the language model's attention kernels on a device, and the reasons against better ones."""
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None) is not None and (kinds is None or "sliding_attention" in kinds)
    softcap = getattr(config, "attn_logit_softcapping", None) is not None
    dropout = getattr(config, "attention_dropout", 0.0) > 0
    widths, lines = sorted({head_width(layer) for layer in layer_configs(config)}), []
    for width in widths:
        kernel, why = _kernels(device.type, dtype, width, window, softcap, dropout)
        reasons = "; ".join(f"{other} {problem}" for other, problem in why.items())
        heads = f"heads of {width} by " if len(widths) > 1 else ""
        lines.append(f"{heads}{kernel}" + (f" ({reasons})" if why else ""))
    return f"attention: {', '.join(lines)}"


def needs_lengths(config: PreTrainedConfig) -> bool:
    """True for a language model with heads too wide for every kernel."""
    return any(head_width(layer) > MAX_FUSED_WIDTH for layer in layer_configs(config))


@torch.compiler.disable  # otherwise it is recompiled for each number of samples and each length
def _per_segment(
    query, key, value, given: Bounds, rule: Rule, query_positions: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute attention sample by sample, on the CPU and, if no kernel is usable, on CUDA.

    On CUDA this waits for the device once per layer, unless the rule contains the lengths of the samples.
    """
    lengths = _lengths(given.keys, rule.lengths)
    numbers = lengths if given.queries is given.keys else _lengths(given.queries, rule.own)
    parts = [None] * len(lengths)
    if query_positions is not None:
        bounds = torch.searchsorted(query_positions, given.queries.to(query_positions.dtype)).tolist()
        # Convert positions in the pack to positions among the sample's keys.
        shifts = [length - end for length, end in zip(lengths, itertools.accumulate(numbers))]
        parts = [query_positions[i:j] + shift for i, j, shift in zip(bounds, bounds[1:], shifts)]
        numbers = [len(part) for part in parts]
    samples = zip(query.split(numbers, 2), key.split(lengths, 2), value.split(lengths, 2), parts)
    # Contiguous, because some models call view() on the result.
    return torch.cat([_sample(q, k, v, rule, part).transpose(1, 2) for q, k, v, part in samples], 1)  # (1, T, H, E)


def _lengths(starts: torch.Tensor, known: tuple[int, ...] | None) -> list[int]:
    """Return the given lengths, or compute them from starts (samples + 1,); this may wait for the device."""
    return [end - start for start, end in itertools.pairwise(starts.tolist())] if known is None else list(known)


def _sample(query, key, value, rule: Rule, query_positions: torch.Tensor | None = None) -> torch.Tensor:
    """Compute the attention of one sample, (1, H, queries, E). If torch has no kernel for the rule, compute queries in
    blocks, to avoid storing an L x L matrix.

    query_positions: positions of the queries in the sample; None: its last positions.
    """
    length = key.shape[2]
    window = rule.window if rule.window is not None and rule.window < length else length
    if query.shape[2] == 0:
        return query
    if rule.softcap is None and window == length:
        if not rule.causal or query.shape[2] == length:
            return _sdpa(query, key, value, rule)
        if (
            query_positions is not None and 2 * len(query_positions) > length
        ):  # then the causal kernel is faster than a mask
            query = _spread(query, query_positions, length)
            return _sdpa(query, key, value, rule).index_select(2, query_positions)
    numbers = positions = query_positions
    if positions is None:
        numbers = range(length - query.shape[2], length)
        positions = torch.arange(length - query.shape[2], length, device=query.device)
    blocks = []
    for n, q in enumerate(query.split(BLOCK, 2)):
        i, known = (each[n * BLOCK : (n + 1) * BLOCK] for each in (positions, numbers))
        first, end = max(0, int(known[0]) - window + 1), int(known[-1]) + 1 if rule.causal else length
        distance = i[:, None] - torch.arange(first, end, device=query.device)
        seen = distance < window  # (queries, keys)
        if rule.causal:
            seen &= distance >= 0
        k, v = key[:, :, first:end], value[:, :, first:end]
        if rule.softcap is None:
            blocks.append(_sdpa(q, k, v, rule, seen))
        else:
            # Recompute the scores in backward instead of storing those of every layer.
            keep_rng = rule.dropout > 0
            blocks.append(checkpoint(_capped, q, k, v, seen, rule, use_reentrant=False, preserve_rng_state=keep_rng))
    return torch.cat(blocks, 2)


def _sdpa(query, key, value, rule: Rule, seen: torch.Tensor | None = None) -> torch.Tensor:
    """Compute one sample's attention with SDPA, (1, H, queries, E). seen: mask (queries, keys), None for the rule's."""
    groups = query.shape[1] // key.shape[1]
    width = max(query.shape[3], value.shape[3])
    special = seen is not None or query.shape[3] != value.shape[3]
    if groups > 1 and not _takes_groups(query.device.type, query.dtype, width, special):
        key, value, groups = repeat_kv(key, groups), repeat_kv(value, groups), 1
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        seen,
        rule.dropout,
        seen is None and rule.causal,
        scale=rule.scaling,
        enable_gqa=groups > 1,
    )


def _takes_groups(device: str, dtype: torch.dtype, width: int, special: bool) -> bool:
    """True if SDPA is memory-efficient with shared key heads. special: with a mask, or two head widths.

    On CUDA only SDPA's flash kernel supports shared heads. Where the flash kernel can't be used, SDPA with shared heads
    stores all scores, L x L per head. Source: torch's sdp_utils.cpp, 2.10 to 2.13.
    """
    if device != "cuda":
        return True
    return dtype in HALF and width <= MAX_FUSED_WIDTH and not special and torch.cuda.get_device_capability() >= (8, 0)


def _capped(query, key, value, seen: torch.Tensor, rule: Rule) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    scores = (query @ key.transpose(2, 3)).float() * rule.scaling  # (1, H, queries, keys)
    scores = (rule.softcap * torch.tanh(scores / rule.softcap)).masked_fill(~seen, -torch.inf)
    return F.dropout(scores.softmax(-1), rule.dropout).to(value.dtype) @ value


def _flash_attn_3(query, key, value, bounds: Bounds, rule: Rule) -> torch.Tensor:
    from flash_attn_interface import flash_attn_varlen_func

    out = flash_attn_varlen_func(**_flash_attn_arguments(query, key, value, bounds, rule))
    out = out[0] if isinstance(out, tuple) else out  # versions up to 2025 also return the log-sums
    return out[None]  # (1, T, H, E)


def _flash_attn_2(query, key, value, bounds: Bounds, rule: Rule) -> torch.Tensor:
    from flash_attn import flash_attn_varlen_func

    arguments = _flash_attn_arguments(query, key, value, bounds, rule)
    return flash_attn_varlen_func(**arguments, dropout_p=rule.dropout)[None]  # (1, T, H, E)


def _flash_attn_arguments(query, key, value, bounds: Bounds, rule: Rule) -> dict[str, object]:
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (T, heads, E)
    return {
        "q": q,
        "k": k,
        "v": v,
        "cu_seqlens_q": bounds.queries,
        "cu_seqlens_k": bounds.keys,
        "max_seqlen_q": bounds.max_queries,
        "max_seqlen_k": bounds.max_keys,
        "softmax_scale": rule.scaling,
        "causal": rule.causal,
        "window_size": _window_size(rule),
        "softcap": rule.softcap or 0.0,
        **({"deterministic": True} if torch.are_deterministic_algorithms_enabled() else {}),
    }


def _torch_varlen(query, key, value, bounds: Bounds, rule: Rule) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.10 has no options for windows and scale, and another name for the causal option.
    if _varlen_takes("window_size"):
        options = {"window_size": _window_size(rule), "scale": rule.scaling}
    else:
        options = {"is_causal": rule.causal}
        query = query * (rule.scaling * query.shape[-1] ** 0.5)
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and _varlen_takes("enable_gqa"):  # from torch 2.13 on
        options["enable_gqa"] = True
    else:
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = varlen_attn(q, k, v, *bounds[:4], **options)
    return out[None]  # (1, T, H, E)


@torch.compiler.assume_constant_result
def _varlen_takes(option: str) -> bool:
    """True if this version of torch's kernel has the option."""
    from torch.nn.attention.varlen import varlen_attn

    return option in inspect.signature(varlen_attn).parameters


KERNELS = {FLASH_3: _flash_attn_3, FLASH_2: _flash_attn_2, TORCH: _torch_varlen}


def _window_size(rule: Rule) -> tuple[int, int]:
    """Return the kernels' window (left, right): tokens seen before and after a token, -1 for all.

    If there are fewer queries than keys, the kernels align the queries with the last keys.
    """
    return (-1 if rule.window is None else rule.window - 1), (0 if rule.causal else -1)


def register() -> str:
    """Register the attention with transformers. Returns its name for attn_implementation.

    No mask function is registered, so transformers builds no mask. To build one, it would wait for the device to find
    packed samples.
    """
    AttentionInterface.register(NAME, varlen_attention)
    return NAME


def register_for_flex() -> str:
    """Register SigLIP 2's attention for images of any shape. Returns its name; to set it, see register_for_towers."""
    AttentionInterface.register(FLEX_NAME, flex_attention)
    return FLEX_NAME


def register_for_towers() -> str:
    """Register the attention of towers on images of any shape. Returns its name.

    Set the name in a tower's configuration after the tower is built, because transformers' constructors refuse it.
    """
    AttentionInterface.register(TOWER_NAME, tower_attention)
    return TOWER_NAME
