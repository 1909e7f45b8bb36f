# T tokens of all samples laid end to end, D width of the language model, s ranks that share the tokens, t = T / s
# tokens on a rank, V width of the values of all heads
"""Run recurrent layers (Gated DeltaNet) over packed samples without passing state from one sample to the next.

A short convolution and the delta rule carry a state from token to token. CUDA kernels take the boundaries of samples.
Without these kernels, a recurrent layer computes sample by sample, while all other layers compute the pack at once.
"""

import functools
import importlib
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType, ModuleType, SimpleNamespace
from typing import Protocol

import torch
from torch import nn
from transformers import PreTrainedConfig

from llava_ds.constants import ConfigError, in_short
from llava_ds.model.attention import HALF
from llava_ds.model.open.probe import difference_of_a_pack

# Module and function of each package that transformers looks for when it is imported.
KERNELS = {
    "flash-linear-attention": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    "causal-conv1d": ("causal_conv1d", "causal_conv1d_fn"),
}
FUNCTIONS = (
    "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn", "causal_conv1d_update",
)  # fmt: skip

TOLERANCE = 5e-2  # relative to the largest logit, in half precision; leaked states cause far larger differences


@dataclass(frozen=True, eq=False)
class Samples:
    """Positions of samples in a pack. lengths: tokens per sample, on the host, to avoid a sync. cu_seqlens (samples +
    1,) int32: starts, and T. cu_seqlens_cpu: a copy on the host. seq_idx (1, T) int32: each token's sample."""

    lengths: tuple[int, ...]
    cu_seqlens: torch.Tensor
    cu_seqlens_cpu: torch.Tensor
    seq_idx: torch.Tensor

    @classmethod
    def of(cls, lengths: tuple[int, ...], cu_seqlens: torch.Tensor) -> "Samples":
        """Build from a Batch's fields."""
        places = torch.arange(sum(lengths), dtype=torch.int32, device=cu_seqlens.device)
        seq_idx = torch.searchsorted(cu_seqlens[1:], places, right=True, out_int32=True)[None]  # (1, T)
        starts = torch.tensor(list(itertools.accumulate(lengths, initial=0)), dtype=torch.int32)
        return cls(lengths, cu_seqlens, starts, seq_idx)


class TokenExchange(Protocol):
    """Exchange tokens for columns among `size` ranks that share a pack: t tokens with all columns, or T tokens with
    some columns. index: of this rank."""

    size: int
    index: int

    def all_tokens(self, *parts: torch.Tensor) -> torch.Tensor:
        """Exchange parts (1, t, n) of this rank's tokens for n / size columns of all tokens, side by side for each
        part."""

    def own_tokens(self, columns: torch.Tensor) -> torch.Tensor:
        """Exchange this rank's columns of all tokens (1, T, n / size) for all columns of its tokens (1, t, n)."""


def keep_samples_apart(trunk: nn.Module) -> None:
    """Let recurrent layers take the argument `samples`, and drop it for all other layers of a language model.

    If ranks share the tokens of a pack, set these layers' token_exchange.
    """
    for layer in trunk.layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.token_exchange = None
            layer.linear_attn.forward = MethodType(_forward, layer.linear_attn)


@torch.compiler.disable  # would recompile for each number of samples and every length
def _forward(
    self: nn.Module,
    hidden_states: torch.Tensor,
    *,
    samples: Samples | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    tokens_shared: bool = False,
    **options: object,
) -> torch.Tensor:
    """Map (1, T, D) to (1, T, D), or with tokens_shared (1, t, D) to (1, t, D); without samples, compute (B, L, D) as
    transformers does."""
    if samples is None:
        assert cu_seqlens is None, "a pack of samples without their lengths: their states would mix"
        return type(self).forward(self, hidden_states, **options)
    if tokens_shared:
        heads, projected = own_heads(self, self.token_exchange, hidden_states)
        out = of_pack(functools.partial(type(self).forward, heads), projected, samples)  # (1, T, V / s)
        return self.out_proj(self.token_exchange.own_tokens(out))
    return of_pack(functools.partial(type(self).forward, self), hidden_states, samples)


def of_pack(
    forward: Callable[[torch.Tensor], torch.Tensor], hidden_states: torch.Tensor, samples: Samples
) -> torch.Tensor:
    """Run a layer's forward on a pack (1, T, D): at once if kernels take boundaries, otherwise sample by sample."""
    if kernel_problem(hidden_states.device, _precision(hidden_states)) is None:
        return forward(
            hidden_states,
            cu_seq_lens_q=samples.cu_seqlens,
            cu_seqlens_cpu=samples.cu_seqlens_cpu,  # without it, flash-linear-attention waits for the device
            seq_idx=samples.seq_idx,  # required: otherwise the convolution reaches across samples
        )
    return one_by_one(forward, hidden_states, samples.lengths)


def own_heads(
    layer: nn.Module, exchange: TokenExchange, hidden_states: torch.Tensor
) -> tuple[SimpleNamespace, torch.Tensor]:
    """Return a stand-in for the layer with only this rank's heads, and their projections of all tokens.

    hidden_states (1, t, D). The stand-in's projections only select columns; its forward returns (1, T, V / s).
    Convolution, delta rule and norm compute each head by itself, so heads can be divided over ranks as in attention.
    """
    s, key, value = exchange.size, layer.key_dim, layer.value_dim
    others = (layer.in_proj_z(hidden_states), layer.in_proj_b(hidden_states), layer.in_proj_a(hidden_states))
    parts = (*layer.in_proj_qkv(hidden_states).split([key, key, value], -1), *others)
    ends = list(itertools.accumulate((part.shape[-1] // s for part in parts), initial=0))

    def columns(first: int, last: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda projected: projected[..., ends[first] : ends[last + 1]]

    def own(weight: torch.Tensor) -> torch.Tensor:
        return weight.chunk(s)[exchange.index]

    convolution = torch.cat([own(part) for part in layer.conv1d.weight.split([key, key, value])])
    stand_in = SimpleNamespace(
        layer_idx=layer.layer_idx,
        activation=layer.activation,
        num_k_heads=layer.num_k_heads // s,
        num_v_heads=layer.num_v_heads // s,
        head_k_dim=layer.head_k_dim,
        head_v_dim=layer.head_v_dim,
        key_dim=key // s,
        value_dim=value // s,
        in_proj_qkv=lambda projected: columns(0, 2)(projected).contiguous(),  # kernels need strides of whole vectors
        in_proj_z=columns(3, 3),
        in_proj_b=columns(4, 4),
        in_proj_a=columns(5, 5),
        conv1d=SimpleNamespace(weight=convolution, bias=None),
        A_log=own(layer.A_log),
        dt_bias=own(layer.dt_bias),
        norm=layer.norm,
        out_proj=nn.Identity(),
    )
    return stand_in, exchange.all_tokens(*parts)


def one_by_one(
    forward: Callable[[torch.Tensor], torch.Tensor], hidden_states: torch.Tensor, lengths: tuple[int, ...]
) -> torch.Tensor:
    """Call forward on each sample of (1, T, D) separately, and concatenate the results."""
    return torch.cat([forward(sample) for sample in hidden_states.split(lengths, 1)], 1)


def _precision(tensor: torch.Tensor) -> torch.dtype:
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


def kernel_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why recurrent layers compute sample by sample on this device; None if kernels take the boundaries of
    samples."""
    if device.type != "cuda":
        return f"kernels need a CUDA device, this is {device.type}"
    if dtype not in HALF:
        return f"kernels compute in half precision only, not in {str(dtype).removeprefix('torch.')}"
    return missing_kernels()


@functools.cache
def missing_kernels() -> str | None:
    """Return which packages of KERNELS transformers can't import, and why; None if it can import all."""
    problems = []
    for package, (module, function) in KERNELS.items():
        try:
            getattr(importlib.import_module(module), function)
        except Exception as error:  # after any import error, transformers does without the package
            absent = isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]
            why = "not installed" if absent else f"can't be imported: {in_short(f'{type(error).__name__}: {error}')}"
            problems.append(f"{package} {why}")
    return "; ".join(problems) or None


def delta_net_report(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> str:
    """Return a line that says how a language model's recurrent layers compute a pack.

    With kernels, a small random copy computes samples on the device, packed and one by one. Raises ConfigError if the
    results differ because samples mix.
    """
    if (problem := kernel_problem(device, dtype)) is not None:
        return f"Gated DeltaNet: sample by sample, everything else packed ({problem})"
    if not (difference := difference_of_a_pack(config, device, dtype)) <= TOLERANCE:
        raise ConfigError(
            f"{' and '.join(KERNELS)} do not keep the samples of a pack apart on this device: on a small copy of "
            f"{config.model_type}, a pack differs from single samples by {difference:.1e} of the largest logit: "
            "install other versions, or none, to compute Gated DeltaNet sample by sample"
        )
    return f"Gated DeltaNet: the pack at once, by {' and '.join(KERNELS)}"


@functools.cache
def let_the_cpu_compute(modeling: ModuleType) -> None:
    """Make functions in a transformers module fall back to torch for inputs that CUDA kernels don't support.

    transformers 5.23 only checks if the packages are installed. If so, models on a CPU (as in trials) or in float32
    would fail.
    """
    for name in FUNCTIONS:
        setattr(modeling, name, by_device(getattr(modeling, name)))


def by_device(function: Callable) -> Callable:
    """Return one of FUNCTIONS with a fallback to torch if the kernel doesn't support the device or precision."""
    in_torch = inspect.unwrap(function)  # the torch version that silently ignores boundaries

    @functools.wraps(function)
    def chosen(first: torch.Tensor, *args: object, **options: object):
        has_boundaries = options.get("cu_seqlens") is not None or options.get("seq_idx") is not None
        takes_kernel = first.is_cuda and first.dtype in HALF
        return (function if takes_kernel or has_boundaries else in_torch)(first, *args, **options)

    return chosen
