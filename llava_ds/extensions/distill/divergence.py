# S supervised positions, D width of the student, V rows of its output layer, C rows that both models have, K kept
# tokens, the most probable ones, n outcomes: C, or K and a rest
"""Generalised Jensen-Shannon divergence of a student from its teacher; logits never exist for more than a chunk.

Source: GKD (arXiv 2306.13649), equation 1, in the form of TRL's GKDTrainer.generalized_jsd_loss: beta 0 is the forward
divergence KL(teacher || student), beta 1 the reverse.
"""

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from llava_ds.model.heads import LogProbs
from llava_ds.model.output_loss import LogitGradients, chunk_rows

COPIES = 4  # of a chunk's logits in memory, over the cross-entropy's
MOST = -1e-7  # log-probability of the kept tokens together, at most: the rest keeps a logarithm (TRL's bound)


class Teacher(Protocol):
    """A teacher's distributions at the supervised positions of a micro-batch."""

    def opened(self) -> AbstractContextManager:
        """Return a context, entered by all ranks together, in which `values` may be called."""
        ...

    def values(self, part: slice, student: torch.Tensor, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the divergences (rows,) at some positions, and their gradients by the student's logits, (rows, C).

        student: its logits (rows, V) float32, divided by the temperature.
        """
        ...


@dataclass(frozen=True)
class Divergence(LogProbs):
    """The summed loss, a float32 scalar, and the divergence and the cross-entropy of every position, (S,) float64 each.

    A position's loss is its divergence plus sft_alpha times its cross-entropy, times its weight in the batch.
    """

    teacher: Teacher | None = None
    row_weights: torch.Tensor | None = None
    beta: float = 0.5
    sft_alpha: float = 0.0

    def by_row(self, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, softcap: float | None) -> tuple:
        """Compute both. hidden: divided by the temperature, as LogProbs does; the cross-entropy is without it."""
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        dtype = torch.float32 if dtype == torch.float16 else dtype  # gradients have no bound that float16 could hold
        with torch.autocast(device, enabled=False), self.teacher.opened():
            return _Summed.apply(hidden.to(dtype), weight.to(dtype), targets, softcap, self)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, softcap, asked):
        gradients = LogitGradients(hidden, weight, *ctx.needs_input_grad[:2])
        rows = max(1, chunk_rows(len(weight), hidden.device.type) // COPIES)
        found, heat = torch.empty(2, len(hidden), dtype=torch.float64, device=hidden.device), asked.temperature
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            logits = (hidden[part] @ weight.T).float()  # (rows, V)
            slope = None
            if softcap is not None:
                logits = logits.div_(softcap).tanh_().mul_(softcap)
                slope = 1 - (logits / softcap).square_()
            values, d_shared = asked.teacher.values(part, logits, asked.beta)
            logs = logits.mul_(heat).log_softmax(1)
            places = targets[part, None]
            losses = -logs.gather(1, places)[:, 0].double()
            d_logits = logs.exp_().scatter_add_(1, places, logs.new_full(places.shape, -1.0))
            d_logits.mul_(asked.sft_alpha * heat)[:, : d_shared.shape[1]] += d_shared
            found[0, part], found[1, part] = values, losses
            d_logits = d_logits if slope is None else d_logits.mul_(slope)
            if asked.row_weights is not None:
                d_logits.mul_(asked.row_weights[part, None])
            gradients.add(start, hidden[part], d_logits.to(hidden.dtype))
            del logits, logs, d_logits, d_shared, slope
        ctx.gradients = gradients.summed()
        ctx.mark_non_differentiable(found)
        total = found[0] + asked.sft_alpha * found[1]
        return (total if asked.row_weights is None else total * asked.row_weights).sum().float(), found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream, _):
        gradients, ctx.gradients = ctx.gradients, None
        return *(None if each is None else each.mul_(upstream) for each in gradients), None, None, None


def divergence(student: torch.Tensor, teacher: torch.Tensor, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the divergences (rows,), and their gradients by the outcomes' logits (rows, n).

    student, teacher (rows, n): log-probabilities that add up to 1.
    """
    probs, given = student.exp(), teacher.exp()
    if beta == 0:
        return (given * (teacher - student)).sum(1), probs - given
    if beta == 1:
        gap = student - teacher
        values = (probs * gap).sum(1)
        return values, probs * (gap - values[:, None])
    mixed = torch.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
    gap = student - mixed
    own = (probs * gap).sum(1)
    values = beta * (given * (teacher - mixed)).sum(1) + (1 - beta) * own
    return values, (1 - beta) * probs * (gap - own[:, None])


def kept_divergence(
    student: torch.Tensor, ids: torch.Tensor, kept: torch.Tensor, beta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same between the teacher's K most probable tokens, with all others as one more outcome.

    student (rows, C): log-probabilities; ids, kept (rows, K): the tokens, and their log-probabilities under the
    teacher. The gradients (rows, C) are by the student's logits.
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
