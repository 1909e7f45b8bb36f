# B samples of a micro-batch, C labels, D width of the language model, n states
"""The head and objective of classification: a linear layer on the hidden state of the last token before the answer."""

import functools
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from llava_ds.batch import Batch
from llava_ds.data.unlearned_answer import code_of
from llava_ds.extensions.base import Measure
from llava_ds.extensions.classify.flags import METRICS
from llava_ds.extensions.classify.label_records import CLASS
from llava_ds.model.open.last_states import LastStates, SampleObjective
from llava_ds.train.objectives.objective import MicroLoss

STD = 0.02  # standard deviation of the head's initial weights (transformers' initializer_range)


class ScoreHead(nn.Linear):
    """The `score` layer of transformers' *ForSequenceClassification: linear, without bias.

    Computes in float32. It is a module with its own weight, because ZeRO-3 gathers weights around a module's forward.
    """

    def __init__(self, width: int, num_labels: int) -> None:
        super().__init__(width, num_labels, bias=False)
        nn.init.normal_(self.weight, std=STD)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states (n, D) to logits (n, C)."""
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.float(), self.weight.float())


class MacroF1(Measure):
    """The mean of the labels' F1 scores, over all labels that occur in held-out records or in predictions."""

    def __init__(self) -> None:
        self._sums: torch.Tensor | None = None

    def __call__(self, model: nn.Module) -> "MacroF1":
        """Return itself, for EvalMeasure.create."""
        return self

    def add(self, found: torch.Tensor, truth: torch.Tensor) -> None:
        """Add the true positives, predictions and labels of a micro-batch to the counts. found, truth: (B, C) bool."""
        sums = torch.stack([(found & truth).sum(0), found.sum(0), truth.sum(0)]).double()
        self._sums = sums if self._sums is None else self._sums + sums

    def scores(self, precision: torch.autocast) -> dict[str, float]:
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(self._sums)
        right, found, truth = self._sums.tolist()
        self._sums = None
        values = [2 * a / (b + c) for a, b, c in zip(right, found, truth) if b + c]
        return {"f1": sum(values) / max(1, len(values))}


@dataclass(frozen=True)
class Classification(SampleObjective):
    """Cross-entropy over the labels, or the mean binary cross-entropy of every label, as in transformers'
    *ForSequenceClassification.

    names: the labels, in the order of the head's outputs; is_multiple: True if samples may have any number of labels;
    f1: accumulates predictions during evaluations.
    """

    metric_names = METRICS
    probe = LastStates("own_classify")
    names: tuple[str, ...] = field(kw_only=True)
    is_multiple: bool = False
    f1: MacroF1 | None = None

    def forward(self, engine, batch: Batch) -> MicroLoss:
        """Run the model, and compare the logits with the labels."""
        logits = engine(batch, self.probe).double()  # (B, C)
        truth = self.truth(batch, logits)
        if self.is_multiple:
            losses = F.binary_cross_entropy_with_logits(logits, truth.double(), reduction="none").mean(1)
            found = logits.detach() > 0
        else:
            losses = -torch.where(truth, logits.log_softmax(1), 0.0).sum(1)
            found = F.one_hot(logits.detach().argmax(1), len(self.names)).bool()
        if self.f1 is not None and not torch.is_grad_enabled():
            self.f1.add(found, truth)
        by_source = self.by_source(losses, batch.sources[: len(losses)])
        accuracy = (found == truth).all(1).double().sum()
        return MicroLoss(losses.sum() + 0.0 * logits.sum(), by_source, {"accuracy": accuracy})

    def truth(self, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
        """Return the labels of every sample, (B, C) bool."""
        codes, given = _codes(self.names, logits.device), batch.extra.get(f"classify.{CLASS}", [])
        rows = [(one[:, None] == codes).any(0) for one in given]
        return torch.stack(rows) if rows else torch.zeros_like(logits, dtype=torch.bool)


@functools.cache
def _codes(names: tuple[str, ...], device: torch.device) -> torch.Tensor:
    """Return the integer codes by which records store the labels, (C,) int64."""
    return torch.tensor([code_of(name) for name in names], device=device)
