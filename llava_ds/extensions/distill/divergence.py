# S supervised positions, D width of the student, V rows of its output layer, C rows that both models have, K kept
# tokens, the most probable ones, n outcomes: C, or K and a rest
"""Generalised Jensen-Shannon divergence of a student from its teacher; logits never exist for more than a chunk.

Source: GKD (arXiv 2306.13649), equation 1, in the form of TRL's GKDTrainer.generalized_jsd_loss: beta 0 is the forward
divergence KL(teacher || student), beta 1 the reverse.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from llava_ds.model.heads import LogProbs
from llava_ds.model.output_loss import LogitGradients, chunk_rows, softmax_minus_target

COPIES = 4  # copies of a chunk's logits in memory, beyond those of the cross-entropy
MOST = -1e-7  # maximum log-probability of all kept tokens, so that the rest's is finite (TRL's bound)


class Teacher:
    """A teacher's distributions at the supervised positions of a micro-batch."""

    def opened(self) -> AbstractContextManager:
        """Return a context, entered by all ranks together, in which `values` may be called."""
        return nullcontext()

    def values(self, part: slice, student: torch.Tensor, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the divergences (rows,) at some positions, and their gradients w.r.t. the student's logits, (rows, C).

        student: its logits (rows, V) float32, divided by the temperature.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Divergence(LogProbs):
    """Head for the summed loss (float32 scalar), and each position's loss, divergence and cross-entropy (3, S float64).

    A position's loss is its divergence plus sft_alpha times its cross-entropy, times its weight in the batch.
    """

    teacher: Teacher | None = None
    row_weights: torch.Tensor | None = None
    beta: float = 0.5
    sft_alpha: float = 0.0

    def by_row(self, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, softcap: float | None) -> tuple:
        """Compute both. hidden: divided by the temperature, as in LogProbs. The cross-entropy undoes that."""
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        dtype = torch.float32 if dtype == torch.float16 else dtype  # unbounded gradients may overflow float16
        with torch.autocast(device, enabled=False), self.teacher.opened():
            return _Summed.apply(hidden.to(dtype), weight.to(dtype), targets, softcap, self)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, softcap, head):
        gradients = LogitGradients(hidden, weight, *ctx.needs_input_grad[:2])
        rows = max(1, chunk_rows(len(weight), hidden.device.type) // COPIES)
        found, heat = torch.empty(3, len(hidden), dtype=torch.float64, device=hidden.device), head.temperature
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            factor = 1.0 if head.row_weights is None else head.row_weights[part, None]
            logits = (hidden[part] @ weight.T).float()  # (rows, V)
            if softcap is not None:
                logits = logits.div_(softcap).tanh_().mul_(softcap)
                factor = (1 - (logits / softcap).square_()).mul_(factor)
            values, d_shared = head.teacher.values(part, logits, head.beta)
            d_logits, losses = softmax_minus_target(logits.mul_(heat), targets[part], None)
            d_logits.mul_(head.sft_alpha * heat)[:, : d_shared.shape[1]] += d_shared
            gradients.add(start, hidden[part], d_logits.mul_(factor).to(hidden.dtype))
            found[1, part], found[2, part] = values, losses
            del logits, d_logits, d_shared, factor  # free them before the next chunk's
        found[0] = found[1] + head.sft_alpha * found[2]
        if head.row_weights is not None:
            found[0] *= head.row_weights
        ctx.gradients = gradients.summed()
        ctx.mark_non_differentiable(found)
        return found[0].sum().float(), found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream, _):
        gradients, ctx.gradients = ctx.gradients, None
        return *(None if each is None else each.mul_(upstream) for each in gradients), None, None, None


def divergence(student: torch.Tensor, teacher: torch.Tensor, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the divergences (rows,), and their gradients w.r.t. the outcomes' logits (rows, n).

    student, teacher (rows, n): log-probabilities that add up to 1.
    """
    probs, given = student.exp(), teacher.exp()
    if beta == 0:
        return (given * (teacher - student)).sum(1), probs - given
    mixed = teacher if beta == 1 else torch.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
    gap = student - mixed
    reverse = (probs * gap).sum(1)
    gradients = probs * (gap - reverse[:, None])
    if beta == 1:
        return reverse, gradients
    return beta * (given * (teacher - mixed)).sum(1) + (1 - beta) * reverse, (1 - beta) * gradients


def kept_divergence(
    student: torch.Tensor, ids: torch.Tensor, kept: torch.Tensor, beta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same between the teacher's K most probable tokens, with all others as one more outcome.

    student (rows, C): log-probabilities; ids, kept (rows, K): the tokens, and their log-probabilities under the
    teacher. The gradients (rows, C) are w.r.t. the student's logits.
    Source: TRL's ServerDistillationTrainer with loss_add_tail.
    """
    own = with_rest(student.gather(1, ids))
    values, by_outcome = divergence(own, with_rest(kept), beta)
    by_logit = (student - own[:, -1:]).exp_().mul_(by_outcome[:, -1:])  # shares of the rest's gradient
    return values, by_logit.scatter_(1, ids, by_outcome[:, :-1])


def with_rest(logs: torch.Tensor) -> torch.Tensor:
    """Append the log-probability of all other tokens: (rows, K) to (rows, K + 1)."""
    together = logs.logsumexp(1, keepdim=True).clamp(max=MOST)
    return torch.cat([logs, (-together.expm1()).log()], 1)
