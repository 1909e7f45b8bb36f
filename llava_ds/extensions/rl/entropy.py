# S supervised positions, D width of the language model, V vocabulary
"""Compute log-probabilities of tokens and entropies of their distributions, one chunk of logits at a time."""

from dataclasses import dataclass

import torch

from llava_ds.model.heads import LogProbs
from llava_ds.model.output_loss import FLOAT16_SCALE, LogitGradients, chunk_rows

# Bound of p |log p + H|, the largest gradient of an entropy H w.r.t. a logit: p (1 - p) log V plus a term below 1.
STEEPEST = 8.0


@torch.compiler.disable
def log_probs_and_entropies(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, softcap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities of targets under hidden @ weight.T, and entropies in nats: (S,) float64 each.

    Shapes, precision and memory are as in linear_log_probs.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    with torch.autocast(device, enabled=False):
        return _WithEntropy.apply(hidden.to(dtype), weight, targets, softcap)


@dataclass(frozen=True)
class LogProbsAndEntropies(LogProbs):
    """The log-probability of every target, and the entropy of its distribution: (S,) float64 each."""

    by_row = staticmethod(log_probs_and_entropies)


class _WithEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, softcap):
        ctx.save_for_backward(hidden, weight, targets)
        ctx.softcap = softcap
        rows, used = chunk_rows(len(weight), hidden.device.type), weight.to(hidden.dtype)
        found = torch.empty(2, len(hidden), dtype=torch.float64, device=hidden.device)
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            logs, probs, _ = _distributions(hidden[part] @ used.T, softcap)
            found[0, part] = logs.gather(1, targets[part, None])[:, 0]
            found[1, part] = _entropies(logs, probs)
            del logs, probs  # free them before the next chunk's logits
        return found[0].clone(), found[1].clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, by_log_probs, by_entropies):
        hidden, weight, targets = ctx.saved_tensors
        rows, used = chunk_rows(len(weight), hidden.device.type), weight.to(hidden.dtype)
        gradients = LogitGradients(hidden, used, *ctx.needs_input_grad[:2])
        # Scale the gradients of logits to at most 1 to stay in float16's range.
        steep = by_log_probs.abs() + STEEPEST * by_entropies.abs()
        largest = steep.amax().clamp(min=torch.finfo(torch.float32).tiny) if len(steep) else 1.0
        scale = FLOAT16_SCALE if gradients.in_float16 else 1.0
        first, second = ((each * (scale / largest))[:, None].float() for each in (by_log_probs, by_entropies))
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            logs, probs, slope = _distributions(hidden[part] @ used.T, ctx.softcap)
            logs = logs.add_(_entropies(logs, probs)[:, None].float()).mul_(second[part]).add_(first[part])
            d_logits = logs.mul_(probs).neg_().scatter_add_(1, targets[part, None], first[part])
            d_logits = d_logits if slope is None else d_logits.mul_(slope)
            gradients.add(start, hidden[part], d_logits.to(hidden.dtype))
            del logs, probs, slope, d_logits
        d_hidden, d_weight = (None if found is None else found.mul_(largest / scale) for found in gradients.summed())
        d_hidden = None if d_hidden is None else d_hidden.to(hidden.dtype)
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), None, None


def _distributions(
    logits: torch.Tensor, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return log-probabilities and probabilities, (rows, V) float32, and the slope of the soft cap, or None.

    May overwrite logits.
    """
    logits, slope = logits.float(), None
    if softcap is not None:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
        slope = 1 - (logits / softcap).square_()
    logs = logits.log_softmax(1)
    return logs, logs.exp(), slope


def _entropies(logs: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """Return the entropies of rows, (rows,) float64. A probability of 0 contributes 0."""
    return -torch.where(probs > 0, probs * logs, 0.0).sum(1, dtype=torch.float64)
