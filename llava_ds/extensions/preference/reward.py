# S supervised positions of a micro-batch, A answers, two per pair, K maximum tokens per answer
"""Train reward models, whose value head should give the chosen answer a higher score than the rejected one."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from llava_ds.batch import Batch
from llava_ds.extensions.preference.flags import METRICS
from llava_ds.extensions.preference.pairs import PairObjective
from llava_ds.model.open.value_head import Values, answer_ends, answer_lengths, last_targets
from llava_ds.train.objectives.objective import MicroLoss


@dataclass(frozen=True)
class RewardLoss:
    """The loss of pairs of answers, computed from the value head's outputs at the answers' tokens.

    An answer's score is the output at its last supervised token, the end marker. reward_loss "last" compares the
    scores: -logsigmoid(chosen - rejected - margin). "tokens", as in DeepSpeed-Chat, is the mean of this loss over
    tokens: the k-th tokens are compared, from the first difference to the last token of the longer answer. After the
    shorter answer's end, DeepSpeed-Chat uses outputs at padding; this code has no padding and uses the shorter answer's
    score. center_rewards_coefficient: weight of (chosen + rejected)^2 to keep scores around zero. Sources:
    Bradley-Terry as in InstructGPT (arXiv 2203.02155), margins as in Llama 2 (2307.09288), TRL's RewardTrainer,
    DeepSpeed-Chat's reward_model.py.
    """

    center_rewards_coefficient: float = 0.0
    reward_loss: Literal["last", "tokens"] = "last"

    def __call__(self, scores: torch.Tensor, gaps: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        """Return the loss of every pair, (pairs,).

        scores (pairs, 2): of the chosen and the rejected answer. gaps (pairs, K): chosen minus rejected output, minus
        the margin, at every position. counted (pairs, K) bool: positions that are compared.
        """
        losses = torch.where(counted, -F.logsigmoid(gaps), 0.0).sum(1) / counted.sum(1).clamp(min=1)
        if self.center_rewards_coefficient:
            losses = losses + self.center_rewards_coefficient * scores.sum(1) ** 2
        return losses


@dataclass(frozen=True)
class Reward(PairObjective):
    """The objective of a reward model, trained on pairs of answers; see RewardLoss."""

    loss: RewardLoss
    probe = Values()
    metric_names = METRICS["reward"]

    def forward(self, engine, batch: Batch) -> MicroLoss:
        """Run the model on both answers of every pair, with one tower pass over their images."""
        pairs = (len(batch.cu_seqlens) - 1) // 2  # a rank without pairs has one sample, ignored
        ends = last_targets(batch)[: 2 * pairs]
        if self.loss.reward_loss == "tokens":
            rows = engine(batch, Values(batch.target_tokens))  # (S,)
            gaps, counted = aligned(rows.double(), batch, pairs)
            scores = rows.double()[ends].view(pairs, 2)
        else:
            rows = engine(batch, Values(answer_ends(batch)[: 2 * pairs]))
            scores = rows.double().view(pairs, 2)
            gaps = scores[:, :1] - scores[:, 1:]
            counted = torch.ones_like(gaps, dtype=torch.bool)
        margins = batch.extra.get("margin")
        if margins is not None:
            gaps = gaps - margins[: 2 * pairs : 2, None]
        losses = self.loss(scores, gaps, counted)
        return self.micro_loss(losses, rows, batch, metrics_of(scores.detach()), torch.ones_like(scores[:, 0]).detach())


def metrics_of(scores: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return METRICS["reward"] as sums over pairs.

    scores (pairs, 2). min_reward and max_reward are extremes of the micro-batch, times its number of pairs.
    """
    chosen, rejected = scores.unbind(1)
    none = torch.zeros((), dtype=torch.float64, device=scores.device)
    ends = [each * len(scores) for each in scores.aminmax()] if len(scores) else [none, none]
    differences = ((chosen > rejected).double().sum(), (chosen - rejected).sum())
    values = (chosen.sum(), rejected.sum(), *differences, scores.sum() / 2, *ends)
    return dict(zip(METRICS["reward"], values, strict=True))


def aligned(rows: torch.Tensor, batch: Batch, pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return chosen minus rejected outputs token by token (pairs, K), and a mask of compared positions (pairs, K) bool.

    rows (S,): at every supervised token. K is set to S, an upper bound of an answer's length, to avoid a sync with the
    device. Both answers of a pair begin at the same position, after the same prompt.
    """
    if not pairs:
        return rows.view(0, 1), rows.view(0, 1).bool()
    counts = answer_lengths(batch)[: 2 * pairs]
    steps = torch.arange(len(rows), device=rows.device)  # (K,)
    firsts = (counts.cumsum(0) - counts)[:, None]
    # (A, K): after its end, the shorter answer keeps its last token's output.
    index = firsts + torch.minimum(steps, counts[:, None] - 1)
    values = rows[index].view(pairs, 2, -1)
    targets = torch.where(steps < counts[:, None], batch.targets[index], -1).view(pairs, 2, -1)
    differ = targets[:, 0] != targets[:, 1]
    longest = counts.view(pairs, 2).amax(1, keepdim=True)
    first = torch.where(differ.any(1, keepdim=True), differ.int().argmax(1, keepdim=True), longest - 1)
    return values[:, 0] - values[:, 1], (steps >= first) & (steps < longest)
