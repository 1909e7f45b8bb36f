# S supervised positions of a micro-batch, A answers, two per pair
"""Direct preference optimisation: make the chosen answer more likely relative to the rejected one."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from llava_ds.batch import Batch
from llava_ds.extensions.preference.flags import LOSS_TYPES, METRICS
from llava_ds.extensions.preference.pairs import PairObjective
from llava_ds.model.heads import LogProbs, sum_by_sample
from llava_ds.train.objectives.objective import MicroLoss

LossType = Literal["sigmoid", "hinge", "ipo", "simpo", "cpo", "orpo"]
ROUNDING = 1e-6  # relative float32 error of a log-probability that is computed in two ways
MEAN_LOSS_TYPES = ("ipo", "simpo", "orpo")  # use the mean log-probability of an answer's tokens instead of the sum


@dataclass(frozen=True)
class PairLoss:
    """The loss of pairs of answers, from their log-probabilities.

    beta: strength of the pull towards the reference model, or ORPO's weight of the log odds. label_smoothing: assumed
    fraction of mislabelled pairs. rpo_alpha (cpo_alpha for CPO): weight of the chosen answer's cross-entropy per token,
    which is 1 for ORPO. simpo_gamma: SimPO's margin. Sources: DPO (arXiv 2305.18290), IPO (2310.12036), SLiC's hinge
    (2305.10425), SimPO (2405.14734), cDPO's label smoothing, RPO (2404.19733), CPO (2401.08417), ORPO (2403.07691);
    names and conventions are TRL's.
    """

    loss_type: LossType = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    rpo_alpha: float = 0.0
    simpo_gamma: float = 0.5
    cpo_alpha: float = 1.0

    @property
    def takes_means(self) -> bool:
        """True if the loss uses the mean of an answer's token log-probabilities, False if it uses their sum."""
        return self.loss_type in MEAN_LOSS_TYPES

    @property
    def has_reference(self) -> bool:
        """True if the loss needs log-probabilities under a reference model."""
        return has_reference(self.loss_type)

    @property
    def own_weight(self) -> float:
        """Weight of the chosen answer's cross-entropy per token."""
        return {"cpo": self.cpo_alpha, "orpo": 1.0}.get(self.loss_type, self.rpo_alpha)

    def __call__(self, log_probs: torch.Tensor, reference: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return the loss of every pair, (pairs,).

        log_probs, reference (pairs, 2): log-probabilities of chosen and rejected answer under the model and the
        reference model, summed over tokens. lengths (pairs, 2): supervised tokens.
        """
        chosen, rejected = self.rewards(log_probs, reference, lengths).unbind(1)
        margin = chosen - rejected  # beta times the log of the ratio of ratios
        smoothing = self.label_smoothing
        if self.loss_type == "hinge":
            losses = torch.relu(1 - margin)
        elif self.loss_type == "ipo":
            losses = (margin / self.beta - 1 / (2 * self.beta)) ** 2
        elif self.loss_type == "orpo":
            odds = log_odds(log_probs / lengths.clamp(min=1))
            losses = -self.beta * F.logsigmoid(odds[:, 0] - odds[:, 1])
        else:
            margin = margin - (self.simpo_gamma if self.loss_type == "simpo" else 0.0)
            losses = -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)
        if self.own_weight:
            losses = losses - self.own_weight * log_probs[:, 0] / lengths[:, 0].clamp(min=1)
        return losses

    def rewards(self, log_probs: torch.Tensor, reference: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return the implicit rewards of the answers, (pairs, 2); arguments as for the loss."""
        ratios = log_probs - reference if self.has_reference else log_probs
        return self.beta * (ratios / lengths.clamp(min=1) if self.takes_means else ratios)


def has_reference(loss_type: LossType) -> bool:
    """Return True if the loss needs log-probabilities under a reference model."""
    return loss_type in LOSS_TYPES["ref_model_name_or_path"]


def log_odds(logs: torch.Tensor) -> torch.Tensor:
    """Return log(p / (1 - p)) of log-probabilities log p, for p up to 1 minus float32's rounding."""
    logs = logs.clamp(max=-torch.finfo(torch.float32).eps)
    return logs - (-logs.expm1()).log()


@dataclass(frozen=True)
class DPO(PairObjective):
    """Preference optimisation over pairs of answers; see PairLoss."""

    loss: PairLoss
    metric_names = METRICS["dpo"]

    def forward(self, engine, batch: Batch) -> MicroLoss:
        """Run the model on both answers of every pair, with one tower pass over their images."""
        rows = engine(batch, LogProbs())  # (S,)
        answers, lengths = map(self.mesh.complete, sum_by_sample(rows, batch))  # (A,) each
        pairs = len(answers) // 2  # 0 on a rank without pairs: it gets one sample to ignore
        log_probs, lengths = answers[: 2 * pairs].view(pairs, 2), lengths[: 2 * pairs].view(pairs, 2)
        reference = batch.extra.get("reference")
        reference = torch.zeros_like(log_probs) if reference is None else reference.view(pairs, 2)
        losses = self.loss(log_probs, reference, lengths)  # (pairs,)
        counted = torch.ones_like(losses).detach()
        if self.mesh.part.size > 1:
            # All ranks that share a pair log it. A pair that a rank couldn't decode has no supervised tokens.
            is_shown = lengths.amin(1) > 0
            losses, counted = torch.where(is_shown, losses, 0.0), is_shown / self.mesh.part.size
        metrics = self._metrics(log_probs.detach(), reference, lengths)
        sums = {name: (each * counted).sum() for name, each in metrics.items()}
        return self.micro_loss(losses, rows, batch, sums, counted)

    def _metrics(
        self, log_probs: torch.Tensor, reference: torch.Tensor, lengths: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return METRICS["dpo"] for every pair, (pairs,) each.

        A pair whose rewards differ only by rounding counts one half in the accuracy. Before the first update, this is
        true of all pairs, because the policy equals the reference model.
        """
        chosen, rejected = self.loss.rewards(log_probs, reference, lengths).unbind(1)
        margins = chosen - rejected
        noise = self.loss.rewards(log_probs.abs(), -log_probs.abs(), lengths).sum(1) * ROUNDING
        is_tie = (margins.abs() <= noise) & self.loss.has_reference
        accuracies = torch.where(is_tie, 0.5, (margins > 0).double())
        values = (chosen, rejected, accuracies, margins, *log_probs.unbind(1))
        return dict(zip(METRICS["dpo"], values, strict=True))
