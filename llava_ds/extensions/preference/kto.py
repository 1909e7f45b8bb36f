# S supervised positions of a micro-batch, A answers
"""Kahneman-Tversky optimisation: make single answers more or less likely according to their labels."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch

from llava_ds.batch import Batch
from llava_ds.constants import IGNORE_INDEX
from llava_ds.data.collate import LoadedPair, LoadedSample
from llava_ds.data.dataset import BrokenSample, EncodedDataset, Undecoded
from llava_ds.data.fingerprint import digest_of
from llava_ds.data.loader import MicroBatch, Window, micro_batches
from llava_ds.data.step_plan import StepPlan
from llava_ds.engine.runner import Runner
from llava_ds.extensions.preference.flags import METRICS
from llava_ds.extensions.preference.pairs import PairObjective
from llava_ds.extensions.preference.reference import answers_of
from llava_ds.model.heads import LogProbs, sum_by_sample
from llava_ds.runtime.mesh import Mesh, sum_over
from llava_ds.runtime.waiting import queuing
from llava_ds.train.objectives.objective import MicroLoss


@dataclass(frozen=True)
class AnswerLoss:
    """The loss of single answers, from their log-probabilities.

    beta: strength of the pull towards the reference model. desirable_weight, undesirable_weight: weights of good and
    bad answers. Source: KTO (arXiv 2402.01306); names and conventions are TRL's.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __call__(self, ratios: torch.Tensor, labels: torch.Tensor, kl: torch.Tensor | float) -> torch.Tensor:
        """Return the loss of every answer, (A,).

        ratios (A,): log-probability minus log-probability under the reference model. labels (A,): 1 for a good answer,
        -1 for a bad one. kl: estimated KL divergence from the reference model.
        """
        weights = torch.where(labels > 0, self.desirable_weight, self.undesirable_weight)
        return weights * (1 - torch.sigmoid(self.beta * labels * (ratios - kl)))


@dataclass(frozen=True)
class KTO(PairObjective):
    """Training on labelled answers; see AnswerLoss. Each answer of a pair counts one half, so a step's loss is the mean
    over its samples. If a batch has no KL estimate, as in evaluations, it is taken as zero."""

    loss: AnswerLoss
    metric_names = METRICS["kto"]

    def forward(self, engine, batch: Batch) -> MicroLoss:
        """Run the model on all answers, with one tower pass over their images."""
        rows = engine(batch, LogProbs())  # (S,)
        sums, lengths = map(self.mesh.complete, sum_by_sample(rows, batch))  # (A,) each
        none = torch.zeros(0, dtype=torch.float64, device=rows.device)  # rank without samples
        labels, weights, share, reference = (
            batch.extra.get(name, none) for name in ("label", "weight", "share", "reference")
        )
        kl = batch.extra.get("kl", 0.0)
        sums, shown = sums[: len(labels)], (lengths[: len(labels)] > 0) / self.mesh.part.size
        ratios = sums - reference
        losses = torch.where(shown > 0, self.loss(ratios, labels, kl), 0.0)
        metrics = self._metrics(self.loss.beta * ratios.detach(), sums.detach(), labels, share * shown)
        if "kl" in batch.extra:
            metrics["kl"] = kl * (weights * shown).sum()
        found = self.micro_loss(losses, rows, batch, metrics, weights * shown, every=1)
        return found._replace(loss_sum=(losses * weights).sum() + 0.0 * rows.sum())

    @staticmethod
    def _metrics(
        rewards: torch.Tensor, sums: torch.Tensor, labels: torch.Tensor, share: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return METRICS["kto"] as sums over answers.

        share (A,): samples per good (or per bad) answer, which turns means over samples into means over such answers.
        """
        good, bad = share * (labels > 0), share * (labels < 0)
        values = (good * rewards, bad * rewards, (good - bad) * rewards, good * sums, bad * sums)
        return {name: value.sum() for name, value in zip(METRICS["kto"], values, strict=True)}


def label_answers(dataset: EncodedDataset) -> None:
    """Add to a data set, for every answer: label, weight, share, and its number in the record."""
    length, chosen, margin = (
        np.asarray(dataset.table.column(name)).astype(np.float64) for name in ("length", "chosen_length", "margin")
    )
    is_pair = (chosen < length)[:, None]
    labels = np.where(is_pair, [1.0, -1.0], np.stack([margin, 0 * margin], 1))
    of_samples = labels[dataset.rows]
    share = [len(of_samples) / max(1, (of_samples == label).sum()) for label in (1.0, -1.0)]
    dataset.of_answers |= {
        "label": labels,
        "weight": np.where(is_pair, 0.5, [1.0, 0.0]),
        "share": np.where(labels > 0, *share),
        "number": np.broadcast_to([0.0, 1.0], labels.shape),
    }


class Mismatched(EncodedDataset):
    """The prompts of a data set, each with the answer to the prompt before it, for the KL estimate.

    The first prompt gets the last prompt's answer. For pairs, each prompt gets the previous answer with the same label.
    """

    @classmethod
    def of(cls, dataset: EncodedDataset, max_length: int) -> Self:
        """Build from a labelled data set. max_length: maximum tokens of prompt and answer."""
        made = copy.copy(dataset)
        made.__class__, made.max_length = cls, max_length
        made.of_answers = {name: values for name, values in dataset.of_answers.items() if name != "reference"}
        made.fingerprint = digest_of(["mismatched", dataset.fingerprint, str(max_length)])
        return made

    def _sample(
        self, index: int, load: Callable[[Undecoded], torch.Tensor | Undecoded]
    ) -> LoadedSample | LoadedPair | BrokenSample:
        own, other = super()._sample(index, load), super()._sample((index - 1) % len(self), lambda undecoded: undecoded)
        for item in (own, other):
            if isinstance(item, BrokenSample):
                return item
        found = [
            self._joined(sample, other.samples[min(i, len(other.samples) - 1)]) for i, sample in enumerate(own.samples)
        ]
        return found[0] if len(found) == 1 else LoadedPair(*found)

    def _joined(self, own: LoadedSample, other: LoadedSample) -> LoadedSample:
        """Return the prompt of `own` with the answer of `other`, truncated to max_length."""
        parts = []
        for name in ("input_ids", "labels"):
            prompt, answer = (
                getattr(sample, name).split([begin, len(sample.labels) - begin])[i]
                for i, sample in enumerate((own, other))
                for begin in [int((sample.labels != IGNORE_INDEX).nonzero()[0])]
            )
            parts.append(torch.cat([prompt, answer])[: self.max_length])
        return replace(own, input_ids=parts[0], labels=parts[1])


@dataclass(frozen=True)
class Divergence:
    """The KL estimate of every step: the mean log-ratio between model and reference model of mismatched answers, at
    least zero.

    mismatched: has reference log-probabilities. steps: of the run. workers: number of processes that decode images.
    """

    mismatched: Mismatched
    steps: StepPlan
    runner: Runner
    mesh: Mesh
    workers: int

    def windows(self, done: int, plain: Iterator[Window]) -> Iterator[Window]:
        """Add the KL estimate and the step's shares of good and bad answers to every batch. Collective."""
        own = (micro for layout in self.steps.after(done) for micro in layout.of_ranks[self.mesh.dp_rank])
        device = self.runner.engine.device
        loaded = micro_batches(self.mismatched, own, self.workers, device, self.mesh)
        for window in plain:
            sums = torch.zeros(5, dtype=torch.float64, device=device)
            for micro in window.micro_batches:
                sums[:2] += self._sums(next(loaded))
                if micro.is_counted and "label" in micro.batch.extra:
                    _, _, is_shown = answers_of(micro)
                    labels = micro.batch.extra["label"] * is_shown
                    sums[2] += micro.num_samples
                    sums[3:] += torch.stack([(labels > 0).sum(), (labels < 0).sum()])
            total, number, samples, good, bad = sum_over(self.mesh.data_group, sums)
            kl = (total / number.clamp(min=1)).clamp(min=0)
            share = samples / good.clamp(min=1), samples / bad.clamp(min=1)
            yield replace(window, micro_batches=[_with(micro, kl, share) for micro in window.micro_batches])

    @torch.no_grad()
    def _sums(self, micro: MicroBatch) -> torch.Tensor:
        """Return the summed log-ratios of a mismatched micro-batch on this rank, and the number of samples, (2,)."""
        engine = self.runner.engine
        engine.eval()
        with queuing():
            rows = self.runner.forward(engine, micro.batch, lambda model, batch: model(batch, LogProbs()))
        engine.train()
        sums, (_, _, is_shown) = sum_by_sample(rows, micro.batch)[0], answers_of(micro)
        if "weight" not in micro.batch.extra:  # a rank without samples
            return torch.zeros(2, dtype=torch.float64, device=rows.device)
        weights = micro.batch.extra["weight"] * is_shown
        # Ranks that share samples each have a part of the sums, so only one of them subtracts the reference.
        ratios = sums[: len(weights)] - micro.batch.extra["reference"] * float(micro.is_counted)
        return torch.stack([(weights * ratios).sum(), weights.sum() * float(micro.is_counted)])


def _with(micro: MicroBatch, kl: torch.Tensor, share: tuple[torch.Tensor, torch.Tensor]) -> MicroBatch:
    """Add the KL estimate and the shares of good and bad answers to a micro-batch."""
    batch = micro.batch.with_extra(kl=kl)
    if "label" in batch.extra:  # missing on a rank without samples
        batch = batch.with_extra(share=torch.where(batch.extra["label"] > 0, *share))
    return replace(micro, batch=batch)
