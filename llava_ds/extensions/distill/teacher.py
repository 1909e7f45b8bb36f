# S supervised positions, E width of the teacher, W rows of its output layer, C rows that both models have
"""A teacher in memory: its hidden states at the supervised positions, and distributions from them in chunks."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import deepspeed
import torch

from llava_ds.batch import Batch
from llava_ds.constants import IMAGE_TOKEN, ConfigError
from llava_ds.extensions.distill.divergence import divergence
from llava_ds.model.heads import LogProbs
from llava_ds.model.llava import LlavaModel
from llava_ds.model.output_loss import chunk_rows
from llava_ds.runtime.mesh import Mesh
from llava_ds.runtime.ranks import Ranks
from llava_ds.second_models.frozen import FrozenPlan, open_frozen, open_sharded, plan_frozen
from llava_ds.train.plan import Plan, PlanDraft

FLAG = "--teacher_model_name_or_path"


def plan_teacher(draft: PlanDraft) -> FrozenPlan:
    """Plan the teacher. Raises ConfigError if it reads other tokens or images than the student."""
    path, student = draft.args.own["distill"].teacher_model_name_or_path, draft.model
    found = plan_frozen(FLAG, path, student, draft.images, draft.args.data.model_max_length)
    known, rows = student.tokenizer.get_vocab(), student.text_config.vocab_size
    ids = {token: i for token, i in found.model.tokenizer.get_vocab().items() if token != IMAGE_TOKEN}
    unknown = [token for token, i in ids.items() if known.get(token) != i or i >= rows]
    if unknown:
        raise ConfigError(
            f"{FLAG} {path}: its vocabulary has {len(ids):,} tokens, of which {len(unknown)} are unknown to this run's "
            f"model with {len(known):,} tokens in {rows:,} rows, the first is {min(unknown)!r}: give a teacher with "
            "the same vocabulary"
        )
    return found


def shared_rows(plan: Plan) -> int:
    """Return the number of rows that both output layers have, C."""
    return min(each.text_config.vocab_size for each in (plan.model, plan.own["distill"].model))


@dataclass(frozen=True)
class Live:
    """Distributions of a teacher in memory.

    hidden (S, E): divided by the temperature; weight (W, E), maybe sharded; softcap: over the temperature, None without
    one; rows: C.
    """

    hidden: torch.Tensor
    weight: torch.nn.Parameter
    softcap: float | None
    rows: int

    def opened(self) -> AbstractContextManager:
        """See divergence.Teacher."""
        return deepspeed.zero.GatheredParameters([self.weight], enabled=hasattr(self.weight, "ds_id"))

    def values(self, part: slice, student: torch.Tensor, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
        """See divergence.Teacher."""
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


def _states(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, softcap: float | None) -> tuple:
    return hidden, softcap


class _States(LogProbs):
    """The hidden states (S, E) and the soft cap from which LogProbs computes."""

    by_row = staticmethod(_states)


@dataclass(frozen=True)
class LiveTeacher:
    """A frozen model that runs over the student's micro-batches.

    run: the model, or its engine; model: without an engine; rows: C.
    """

    run: Callable[[Batch, LogProbs], tuple]
    model: LlavaModel
    rows: int
    temperature: float

    @classmethod
    def opened(cls, plan: Plan, ranks: Ranks, mesh: Mesh) -> "LiveTeacher":
        """Build it: sharded at ZeRO-3, else whole on every rank, also with tensor parallelism, because DeepSpeed has
        one set of groups for all engines. Collective."""
        frozen, resolved = plan.own["distill"], plan.resolved
        if resolved.zero_stage == 3 and not mesh.is_divided:
            run = open_sharded(frozen, resolved.compute_dtype, ranks, resolved.config)
        else:
            run = open_frozen(frozen, resolved.compute_dtype, ranks)
        model = getattr(run, "module", run)
        mesh.adapt(model)
        return cls(run, model, shared_rows(plan), plan.args.own["distill"].temperature)

    @torch.no_grad()
    def of(self, batch: Batch) -> Live:
        """Run it over a micro-batch. Collective at ZeRO-3."""
        hidden, softcap = self.run(batch, _States(self.temperature))
        return Live(hidden, self.model.language_model.get_output_embeddings().weight, softcap, self.rows)
