# S supervised positions, E width of the teacher, W rows of its output layer, C rows that both models have
"""A teacher in memory: its hidden states at the supervised positions, and distributions from them in chunks."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import deepspeed
import torch

from llava_ds.batch import Batch
from llava_ds.extensions.distill.divergence import Teacher, divergence
from llava_ds.model.heads import LogProbs
from llava_ds.model.output_loss import chunk_rows
from llava_ds.runtime.mesh import Mesh
from llava_ds.runtime.ranks import Ranks
from llava_ds.second_models.frozen import FrozenPlan, open_together, plan_frozen
from llava_ds.train.plan import Plan, PlanDraft

FLAG = "--teacher_model_name_or_path"


def plan_teacher(draft: PlanDraft) -> FrozenPlan:
    """Plan the teacher. Raises ConfigError if it reads other tokens or images than the student."""
    path, student = draft.args.own["distill"].teacher_model_name_or_path, draft.model
    return plan_frozen(FLAG, path, student, draft.images, draft.args.data.model_max_length, same_tokens=True)


def shared_rows(plan: Plan) -> int:
    """Return the number of rows that both output layers have, C."""
    return min(each.text_config.vocab_size for each in (plan.model, plan.own["distill"].model))


@dataclass(frozen=True)
class Live(Teacher):
    """Distributions of a teacher in memory.

    hidden (S, E): divided by the temperature; weight (W, E), maybe sharded; softcap: divided by the temperature, or
    None; rows: C.
    """

    hidden: torch.Tensor
    weight: torch.nn.Parameter
    softcap: float | None
    rows: int

    def opened(self) -> AbstractContextManager:
        return deepspeed.zero.GatheredParameters([self.weight], enabled=hasattr(self.weight, "ds_id"))

    def values(self, part: slice, student: torch.Tensor, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
        return divergence(student[:, : self.rows].log_softmax(1), self.logs(part), beta)

    def logs(self, part: slice) -> torch.Tensor:
        """Return log-probabilities (rows, C) float32 at some positions."""
        logits = (self.hidden[part] @ self.weight.T)[:, : self.rows].float()
        if self.softcap is not None:
            logits = logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits.log_softmax(1)

    def most_probable(self, kept: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the K largest log-probabilities of every position, and their tokens, (S, K) each."""
        rows = chunk_rows(self.rows, self.hidden.device.type)
        parts = (self.logs(slice(first, first + rows)) for first in range(0, max(1, len(self.hidden)), rows))
        return tuple(map(torch.cat, zip(*(part.topk(kept, 1) for part in parts))))


class _States(LogProbs):
    """The hidden states (S, E) and the soft cap from which LogProbs computes."""

    by_row = staticmethod(lambda hidden, weight, targets, softcap: (hidden, softcap))


@dataclass(frozen=True)
class LiveTeacher:
    """A frozen model that runs over the student's micro-batches. run: the model, or its engine; rows: C."""

    run: Callable[[Batch, LogProbs], tuple]
    rows: int
    temperature: float

    @classmethod
    def opened(cls, plan: Plan, ranks: Ranks, mesh: Mesh) -> "LiveTeacher":
        """Build it. Collective."""
        run = open_together(plan.own["distill"], plan.resolved, ranks, mesh)
        return cls(run, shared_rows(plan), plan.args.own["distill"].temperature)

    @torch.no_grad()
    def of(self, batch: Batch) -> Live:
        """Run it over a micro-batch. Collective at ZeRO-3."""
        hidden, softcap = self.run(batch, _States(self.temperature))
        model = getattr(self.run, "module", self.run)
        return Live(hidden, model.language_model.get_output_embeddings().weight, softcap, self.rows)
