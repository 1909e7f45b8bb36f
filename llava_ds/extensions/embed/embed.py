# B parts (queries, positives, negatives) of a micro-batch, N on all ranks, Q queries, D width of the language model
"""Contrastive training: pull a query towards its positive, away from its negatives and the parts of other records."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from llava_ds.batch import Batch
from llava_ds.extensions.base import Measure
from llava_ds.extensions.embed.flags import METRICS
from llava_ds.extensions.embed.part_records import PART
from llava_ds.model.open.last_states import SampleObjective
from llava_ds.runtime.mesh import Group
from llava_ds.runtime.ranks import Ranks, gather
from llava_ds.train.objectives.objective import MicroLoss

TOGETHER = 1024  # queries compared at once


@dataclass(frozen=True)
class Candidates:
    """The candidates of queries. parts (N, 3): values as described in PartField, in the order of the records."""

    parts: torch.Tensor

    @property
    def is_query(self) -> torch.Tensor:
        """True for the rows that are queries, (N,) bool."""
        return self.parts[:, 0] > 0

    def allowed(self, rows: torch.Tensor) -> torch.Tensor:
        """Return which rows are candidates of the queries at `rows` (Q,), as (Q, N) bool.

        Excludes queries and false negatives: other rows equal to the positive, and positives of an equal query.
        """
        _, code, query = self.parts.T
        is_positive = torch.cat([self.is_query.new_zeros(1), self.is_query[:-1]])
        positives = (rows + 1).clamp(max=len(code) - 1)
        is_equal = (code == code[positives, None]) | ((query == query[rows, None]) & is_positive)
        is_own = torch.arange(len(code), device=code.device) == positives[:, None]
        return ~self.is_query & (is_own | ~is_equal)


class Recall(Measure):
    """The share of held-out queries whose positive is among the k nearest of all held-out candidates."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._seen = ranks, []

    def __call__(self, model: nn.Module) -> "Recall":
        """Return itself, for EvalMeasure.create."""
        return self

    def add(self, vectors: torch.Tensor, parts: torch.Tensor) -> None:
        """Store the parts of a micro-batch on this rank. vectors (B, D); parts (B, 3)."""
        self._seen.append((vectors.float().cpu(), parts.cpu()))

    def scores(self, precision: torch.autocast) -> dict[str, float]:
        pairs = [pair for seen in gather(self._seen, self._ranks) for pair in seen]
        self._seen = []
        vectors, parts = (torch.cat(each) for each in zip(*pairs))
        found, counted, places = Candidates(parts), set(), []
        is_first = [not (code in counted or counted.add(code)) for code in parts[:, 1].tolist()]  # among equal parts
        for rows in found.is_query.nonzero()[:, 0].split(TOGETHER):
            near = vectors[rows] @ vectors.T  # (Q, N)
            own = near.gather(1, rows[:, None] + 1)
            places.append(((near > own) & found.allowed(rows) & torch.tensor(is_first)).sum(1))
        return {f"recall@{k}": (torch.cat(places) < k).double().mean().item() for k in (1, 5)}


@dataclass(frozen=True)
class Embedding(SampleObjective):
    """InfoNCE over normalised hidden states, with the candidates in the current micro-batches of all ranks.

    temperature: divisor of cosine similarities; recall: collects vectors during evaluations. Sources: in-batch
    negatives as in sentence-transformers' MultipleNegativesRankingLoss; last-token embeddings as in E5-V (arXiv
    2407.12580) and VLM2Vec (2410.05160).
    """

    metric_names = METRICS
    temperature: float = field(kw_only=True)
    group: Group = None
    recall: Recall | None = None

    def forward(self, engine, batch: Batch) -> MicroLoss:
        """Run the model, and compare the vectors of all ranks. Only this rank's get gradients, and are logged."""
        states = engine(batch, self.probe)  # (B, D)
        own = F.normalize(states.double(), dim=1)
        given = batch.extra.get(f"embed.{PART}", [])
        own_parts = torch.stack(given) if given else torch.zeros(0, 3, dtype=torch.int64, device=own.device)
        if self.recall is not None and not torch.is_grad_enabled():
            self.recall.add(own.detach(), own_parts)
        (vectors, parts), first = gathered([own, own_parts], self.group)
        losses, is_right, number = self.compare(vectors, Candidates(parts))
        mine = slice(first, first + len(own))
        is_query = own_parts[:, 0] > 0
        hits, compared = is_right[mine] & is_query, number[mine] * is_query
        by_source = self.by_source(losses[mine], torch.where(is_query, batch.sources[: len(own)], -1))
        return MicroLoss(
            losses.sum() + 0.0 * states.sum(),
            by_source,
            {"accuracy": hits.double().sum(), "candidates": compared.sum()},
        )

    def compare(self, vectors: torch.Tensor, found: Candidates) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return per row, (N,) each: the query's loss, whether its positive is the nearest candidate, and how many
        candidates there are. Rows that are not queries have loss 0 and False; ignore their number of candidates."""
        if not len(vectors):
            return (vectors.sum(1),) * 3
        rows = torch.arange(len(vectors), device=vectors.device)
        allowed, positives = found.allowed(rows), (rows + 1).clamp(max=len(rows) - 1)
        logits = torch.where(allowed, vectors @ vectors.T / self.temperature, -torch.inf)  # (N, N)
        own = (vectors * vectors[positives]).sum(1) / self.temperature
        losses = torch.where(found.is_query, logits.logsumexp(1) - own, 0.0)
        nearest = (logits.detach() > own.detach()[:, None]).scatter(1, positives[:, None], False).any(1)
        return losses, ~nearest & found.is_query, allowed.sum(1).double()


def gathered(own: list[torch.Tensor], group: Group) -> tuple[list[torch.Tensor], int]:
    """Concatenate the tensors (B, n) of all ranks in a group. Gradients flow to this rank's only. Collective.

    Returns the tensors (N, n), and the index of this rank's first row.
    """
    if not torch.distributed.is_initialized() or (world := torch.distributed.get_world_size(group)) == 1:
        return own, 0
    rank, size = torch.distributed.get_rank(group), torch.tensor([len(own[0])], device=own[0].device)
    sizes = [torch.zeros_like(size) for _ in range(world)]
    torch.distributed.all_gather(sizes, size, group=group)
    sizes, found = torch.cat(sizes).tolist(), []
    for each in own:
        filled = F.pad(each.detach(), (0, 0, 0, max(sizes) - len(each)))
        parts = [torch.empty_like(filled) for _ in range(world)]
        torch.distributed.all_gather(parts, filled, group=group)
        parts = [part[:number] for part, number in zip(parts, sizes)]
        found.append(torch.cat([*parts[:rank], each, *parts[rank + 1 :]]))
    return found, sum(sizes[:rank])
