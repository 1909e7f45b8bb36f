# S supervised positions of a micro-batch, A answers in it, P prompts, G answers to each
"""Group relative policy optimisation: an answer better than the others to its prompt gains probability."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from llava_ds.batch import Batch
from llava_ds.data.loader import Window
from llava_ds.extensions.rl.entropy import LogProbsAndEntropies
from llava_ds.model.heads import SUMMED, LogProbs, sum_by_sample
from llava_ds.train.objectives.objective import MicroLoss


class Drawn(NamedTuple):
    """The numbers of a micro-batch of generated answers: Batch.extra["drawn"].

    scores (A,) float64: each answer's advantage, for PPO its reward; weights (S,) float64: each token's weight in the
    step's loss; means (S,) float64: its weight in a mean over all tokens of the step; shares (S,) float64: each token's
    weight in a mean over the trained tokens, times the step's prompts; sampled (S,) float64: log-probabilities at
    generation; old (S,) float64: log-probabilities before the first of several iterations, None with one iteration;
    frozen (S,) float64: log-probabilities under the reference model, None without one.
    """

    scores: torch.Tensor
    weights: torch.Tensor
    means: torch.Tensor
    shares: torch.Tensor
    sampled: torch.Tensor
    old: torch.Tensor | None = None
    frozen: torch.Tensor | None = None


@dataclass(frozen=True)
class Correction:
    """Weights of the tokens by how much more probable they are in training than they were at their generation.

    mode: the ratio of a token or of its whole answer; ratios below clip_min (None: no bound) or above clip_max are cut
    to the bound ("truncate") or count 0 ("mask"). Names and conventions are TRL's.
    """

    mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = "sequence_mask"
    clip_max: float = 3.0
    clip_min: float | None = None

    def weights(self, gap: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights (S,), and a mask of ratios outside of the bounds.

        gap (S,): log-probabilities in training minus those at generation, no gradient.
        """
        level, _, kind = self.mode.partition("_")
        if level == "sequence":
            gap = sum_by_sample(gap, batch)[0][batch.target_samples]
        ratio = gap.exp()
        outside = (ratio < (self.clip_min or 0.0)) | (ratio > self.clip_max)
        cut = ratio.clamp(self.clip_min, self.clip_max) if kind == "truncate" else 0.0
        return torch.where(outside, cut, ratio), outside


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of every token.

    epsilon, epsilon_high: clipping range of the ratio of new to old probability; importance_sampling_level: one ratio
    per token, or per answer (the geometric mean of its tokens'); beta: weight of the distance from the reference model;
    corrects_kl: multiply the distance by the ratio, for an unbiased gradient; temperature: of the generation;
    loss_type: a function of ratio and advantage: cispo's weight is the ratio up to epsilon_high, without a gradient;
    sapo's a smooth gate with the temperatures gates (of positive and other advantages); rloo's ratio is an answer's,
    the product of its tokens'; all others clip; correction: of answers that another program generated, None for none;
    entropy_coef: weight of the mean entropy per token, subtracted from the loss.
    Sources: GRPO (arXiv 2402.03300), DAPO (2503.14476), Dr. GRPO (2503.20783), GSPO (2507.18071), CISPO (2506.13585),
    SAPO (2511.20347), LUSPO (2602.05261), RLOO (2402.14740), the correction of the distance (2512.02556, 3.1); names
    and conventions are TRL's.
    """

    epsilon: float = 0.2
    epsilon_high: float = 0.2
    importance_sampling_level: Literal["token", "sequence"] = "token"
    beta: float = 0.0
    corrects_kl: bool = False
    temperature: float = 1.0
    loss_type: str = "dapo"
    gates: tuple[float, float] = (1.0, 1.05)
    correction: Correction | None = None
    entropy_coef: float = 0.0


@dataclass(frozen=True)
class GRPO:
    """Clipped policy gradient over generated answers; see PolicyLoss. Token weights make it the step's loss."""

    loss: PolicyLoss
    num_sources: int
    grad_ranks: int
    logs_means = False
    probe = SUMMED

    def forward(self, engine, batch: Batch) -> MicroLoss:
        """Run the model on the answers of every prompt, with one tower pass over its images."""
        weighted, metrics = self._losses(engine, batch)
        drawn: Drawn = batch.extra["drawn"]
        sources = batch.sources[batch.target_samples]
        is_from = sources == torch.arange(self.num_sources, device=sources.device)[:, None]  # (sources, S)
        parts = (weighted.detach(), drawn.weights)
        by_source = torch.stack([torch.where(is_from, part, 0.0).sum(1) for part in parts])
        return MicroLoss(
            weighted.sum(), by_source, {name: (each * drawn.shares).sum() for name, each in metrics.items()}
        )

    def _losses(self, engine, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the weighted loss (S,) and metrics (S,) of every token."""
        loss, drawn = self.loss, batch.extra["drawn"]
        if loss.entropy_coef:
            rows, entropies = engine(batch, LogProbsAndEntropies(loss.temperature))  # (S,) each
        else:
            rows = engine(batch, LogProbs(loss.temperature))  # (S,)
        old = rows.detach() if drawn.old is None else drawn.old
        log_ratio = rows - old
        if loss.importance_sampling_level == "sequence" or loss.loss_type == "rloo":
            sums, lengths = sum_by_sample(log_ratio, batch)  # (A,)
            counted = 1 if loss.loss_type == "rloo" else lengths.clamp(min=1)
            log_ratio = (sums / counted)[batch.target_samples]
        ratio, advantages = log_ratio.exp(), drawn.scores[batch.target_samples]
        losses, low, high = policy_losses(loss, ratio, advantages, rows)
        numbers = {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low | high}
        numbers["sampling_gap"] = (old - drawn.sampled).abs()
        if loss.correction is not None:
            weights, outside = loss.correction.weights(old - drawn.sampled, batch)
            losses = losses * weights
            numbers |= {"importance_sampling_ratio": weights, "importance_sampling_clipped": outside}
        if loss.beta:
            gap = drawn.frozen - rows
            distance = gap.exp() - gap - 1
            if loss.corrects_kl:
                distance = distance * ratio
            losses = losses + loss.beta * distance
            numbers["kl"] = distance.detach()
        losses = losses * drawn.weights
        if loss.entropy_coef:
            losses = losses - loss.entropy_coef * entropies * drawn.means
        return losses, numbers

    def scales(self, window: Window, counts: torch.Tensor) -> list[torch.Tensor]:
        """Return the factor of each micro-batch: its tokens are already weighted for the whole step."""
        return [torch.full_like(counts[0], self.grad_ranks)] * len(window.micro_batches)

    def num_units(self, counts):
        """Return the number of prompts, the unit of the log's means. counts: Counts, or a tensor in its order."""
        return counts[0]


def policy_losses(
    loss: PolicyLoss, ratio: torch.Tensor, advantages: torch.Tensor, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the tokens' losses (S,), and masks of the ratios clipped below and above.

    ratio, advantages, rows (S,): of new to old probability, of the token's answer, and new log-probabilities.
    """
    never = torch.zeros_like(ratio, dtype=torch.bool)
    if loss.loss_type == "cispo":
        clipped = ratio.clamp(max=loss.epsilon_high).detach()
        return -clipped * advantages * rows, never, (ratio > loss.epsilon_high) & (advantages > 0)
    if loss.loss_type == "sapo":
        positive, other = loss.gates
        gate = torch.where(advantages > 0, torch.full_like(ratio, positive), other)
        return -torch.sigmoid(gate * (ratio - 1)) * 4 / gate * advantages, never, never
    return clipped_losses(ratio, advantages, loss.epsilon, loss.epsilon_high)


def clipped_losses(
    ratio: torch.Tensor, advantages: torch.Tensor, epsilon: float, epsilon_high: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the tokens' losses (S,) from the ratios of new to old probability, and two masks of clipped ratios.

    Clipped are ratios that are too low with a negative advantage, or too high with a positive one.
    Source: PPO (arXiv 1707.06347), equation 7.
    """
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    losses = -torch.minimum(ratio * advantages, clipped * advantages)
    return losses, (ratio < 1 - epsilon) & (advantages < 0), (ratio > 1 + epsilon_high) & (advantages > 0)


def advantages_of(
    rewards: torch.Tensor, scale: Literal["group", "batch", "none", "leave_one_out"], spread: float
) -> torch.Tensor:
    """Return each answer's advantage over the others to its prompt, (P, G), from rewards (P, G) float64.

    scale: divide by the group's standard deviation, by `spread` (the step's), or by nothing; leave_one_out: the
    advantage over the mean of the other answers (RLOO).
    """
    centred = rewards - rewards.mean(1, keepdim=True)
    if scale == "leave_one_out":
        return centred * (rewards.shape[1] / (rewards.shape[1] - 1))
    if scale == "none":
        return centred
    divisor = rewards.std(1, keepdim=True) if scale == "group" else spread
    return centred / (divisor + 1e-4)
