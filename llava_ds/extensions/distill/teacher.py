# S supervised positions of a micro-batch, N of the data set, D student width, V rows of its output layer, C rows that
# both models have, K the teacher's most probable tokens, n outcomes: C, or K + 1 with all other tokens as one outcome
"""Generalised Jensen-Shannon divergence of a student from a teacher that is in memory, or whose top K are in a file.

Only one chunk of logits is in memory at a time. Source: GKD (arXiv 2306.13649), equation 1, in the form of TRL's
GKDTrainer.generalized_jsd_loss: beta 0 is the forward divergence KL(teacher || student), beta 1 the reverse.
"""

import gc
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import deepspeed
import numpy as np
import torch

from llava_ds.batch import Batch
from llava_ds.constants import DataError
from llava_ds.data.file_slices import write_errors
from llava_ds.data.fingerprint import digest_of
from llava_ds.data.loader import micro_batches
from llava_ds.files.writing import flush, sha256
from llava_ds.model.heads import LogProbs
from llava_ds.model.open.weights import weight_files
from llava_ds.model.output_loss import LogitGradients, chunk_rows, softmax_minus_target
from llava_ds.runtime.mesh import Mesh
from llava_ds.runtime.ranks import Ranks, barrier, broadcast_from_first, check_shared_folder, print_first
from llava_ds.runtime.waiting import waiting
from llava_ds.second_models.forward_identity import forward_digest
from llava_ds.train.plan import Plan

COPIES = 4  # how many times shorter than the cross-entropy's chunks are, because more copies of logits are in memory
MOST = -1e-7  # maximum log-probability of the top K together, to keep the other tokens' log finite (TRL's bound)
VERSION = 2  # increment if the same data and weights would give different log-probabilities


@dataclass(frozen=True)
class Divergence(LogProbs):
    """Head that returns the summed loss, float32, and the loss, divergence and cross-entropy per position (3, S) fp64.

    A position's loss is (divergence + sft_alpha * cross-entropy) * row_weights. num_rows: C; logs: given a slice of
    positions, returns the teacher's log-probabilities (rows, C) float32 and None, or only for its top K tokens and
    with their ids, (rows, K) each; weights: parameters that logs() reads and ZeRO-3 may shard. Without logs, in the
    teacher's own forward pass, it returns the hidden states (S, D) at the positions, and the soft cap of the logits.
    """

    num_rows: int = 0
    logs: Callable[[slice], tuple[torch.Tensor, torch.Tensor | None]] | None = None
    weights: Sequence[torch.nn.Parameter] = ()
    row_weights: torch.Tensor | None = None
    beta: float = 0.5
    sft_alpha: float = 0.0

    def by_row(self, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, softcap: float | None) -> tuple:
        """Compute the head's results. hidden: hidden states divided by the temperature, as in LogProbs."""
        if self.logs is None:
            return hidden, softcap
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        dtype = torch.float32 if dtype == torch.float16 else dtype  # unbounded gradients may overflow float16
        with torch.autocast(device, enabled=False), deepspeed.zero.GatheredParameters(self.weights):
            return _Summed.apply(hidden.to(dtype), weight.to(dtype), targets, softcap, self)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, softcap, head):
        gradients = LogitGradients(hidden, weight, *ctx.needs_input_grad[:2])
        rows = max(1, chunk_rows(len(weight), hidden.device.type) // COPIES)
        found, heat = torch.empty(3, len(hidden), dtype=torch.float64, device=hidden.device), head.temperature
        factors = torch.ones(len(hidden), device=hidden.device) if head.row_weights is None else head.row_weights
        for start in range(0, len(hidden), rows):
            part, factor = slice(start, start + rows), factors[start : start + rows, None]
            logits = (hidden[part] @ weight.T).float()  # (rows, V)
            if softcap is not None:
                logits = logits.div_(softcap).tanh_().mul_(softcap)
                factor = (1 - (logits / softcap).square_()).mul_(factor)
            values, d_shared = divergence(logits[:, : head.num_rows].log_softmax(1), *head.logs(part), head.beta)
            d_logits, losses = softmax_minus_target(logits.mul_(heat), targets[part], None)
            d_logits.mul_(head.sft_alpha * heat)[:, : d_shared.shape[1]] += d_shared
            gradients.add(start, hidden[part], d_logits.mul_(factor).to(hidden.dtype))
            found[1, part], found[2, part] = values, losses
            del logits, d_logits, d_shared, factor  # free this chunk's tensors before the next are allocated
        found[0] = (found[1] + head.sft_alpha * found[2]) * factors
        ctx.gradients = gradients.summed()
        ctx.mark_non_differentiable(found)
        return found[0].sum().float(), found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream, _):
        gradients, ctx.gradients = ctx.gradients, None
        return *(None if each is None else each.mul_(upstream) for each in gradients), None, None, None


def divergence(
    student: torch.Tensor, teacher: torch.Tensor, ids: torch.Tensor | None, beta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the divergences (rows,), and their gradients w.r.t. the student's logits (rows, C).

    student, teacher: log-probabilities (rows, C). If ids (rows, K) are given, teacher (rows, K) has the tokens with
    these ids, and all others count as one outcome, as in TRL's ServerDistillationTrainer with loss_add_tail.
    """
    if ids is not None:
        kept = student.gather(1, ids), teacher
        rests = ((-each.logsumexp(1, keepdim=True).clamp(max=MOST).expm1()).log() for each in kept)
        own, given = (torch.cat(pair, 1) for pair in zip(kept, rests))  # (rows, n)
        values, by_outcome = divergence(own, given, None, beta)
        by_logit = (student - own[:, -1:]).exp_().mul_(by_outcome[:, -1:])  # gradients of tokens outside the top K
        return values, by_logit.scatter_(1, ids, by_outcome[:, :-1])
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


@torch.no_grad()
def run_teacher(run: Callable[[Batch, Divergence], tuple], head: Divergence, batch: Batch) -> Divergence:
    """Run the teacher's model or engine on a micro-batch, and return the head with its logs. Collective at ZeRO-3."""
    hidden, softcap = run(batch, head)
    weight = getattr(run, "module", run).language_model.get_output_embeddings().weight

    def logs(part: slice) -> tuple[torch.Tensor, None]:
        logits = (hidden[part] @ weight.T)[:, : head.num_rows].float()
        logits = logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)
        return logits.log_softmax(1), None

    return replace(head, logs=logs, weights=[weight])


class KeptTeacher:
    """The teacher's top K tokens in a file, (N, 2, K) int32: ids + 1, or 0 if missing, and the bits of their float32
    log-probabilities. Samples carry their part of it in Batch.extra."""

    def __init__(self, live: Callable, head: Divergence, plan: Plan, ranks: Ranks, mesh: Mesh) -> None:
        """Open the file, and write it first if it does not exist. Collective. live: opens the teacher."""
        frozen, own, dataset = plan.own["distill"], plan.args.own["distill"], plan.steps.dataset
        self._head, self._kept = head, min(own.gkd_logits_topk, head.num_rows)
        self._begins = np.concatenate([[0], np.cumsum(dataset.num_targets, dtype=np.int64)])  # first row by sample, N
        weights = plan.resume.weights.get("teacher_model_name_or_path") or broadcast_from_first(
            ranks, lambda: {path.name: sha256(path) for path in weight_files(Path(own.teacher_model_name_or_path))}
        )
        chosen = VERSION, self._kept, head.num_rows, own.temperature, plan.resolved.compute_dtype
        forward = forward_digest(frozen.model, frozen.args, frozen.images)
        parts = map(str, (*chosen, sorted(weights.items()), dataset.fingerprint, forward))
        self._path = dataset.folder / f"teacher-{digest_of(parts)}"
        if not (known := broadcast_from_first(ranks, self._path.is_file)):
            check_shared_folder(dataset.folder, "--cache_dir", ranks)
            with write_errors(dataset.folder, "the teacher's probabilities"):
                self._write(live(), plan, ranks, mesh)
            gc.collect()  # free the teacher
        print_first(f"the teacher's {self._kept:,} most probable tokens: {'' if known else 'written to '}{self._path}")
        self._numbers = np.memmap(self._path, np.int32, "r", shape=(int(self._begins[-1]), 2, self._kept))
        dataset.added = self._of_sample

    def _of_sample(self, index: int) -> dict[str, torch.Tensor]:
        numbers = np.array(self._numbers[slice(*self._begins[index : index + 2])])  # (n, 2, K)
        if not numbers[:, 0].all():
            raise DataError(f"its images could not be read when {self._path} was written: remove that file")
        return {"teacher": torch.from_numpy(numbers)}

    def __call__(self, batch: Batch) -> Divergence:
        """Return the head with the log-probabilities of a micro-batch."""
        targets, found = batch.target_samples, batch.extra.get("teacher", [])
        numbers = torch.cat([targets.new_zeros(0, 2, self._kept, dtype=torch.int32), *found])
        if len(numbers) > len(targets):  # samples were left out of the batch: leave out their rows
            samples = torch.cat([targets.new_full((len(each),), i) for i, each in enumerate(found)])
            numbers = numbers[torch.isin(samples, targets)]
        ids, logs = numbers[:, 0].long() - 1, numbers[:, 1].contiguous().view(torch.float32)
        return replace(self._head, logs=lambda part: (logs[part], ids[part]))

    @torch.no_grad()
    def _write(self, teacher: Callable[[Batch], Divergence], plan: Plan, ranks: Ranks, mesh: Mesh) -> None:
        """Write the file under a temporary name of this run, then rename it. Collective."""
        dataset, row_bytes = plan.steps.dataset, 8 * self._kept
        chunk = chunk_rows(self._head.num_rows, ranks.device.type)
        part = broadcast_from_first(ranks, lambda: self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp"))
        part.touch()
        of_rank = plan.steps.packing.lay_out_all(dataset)[mesh.dp_rank]
        loaded = micro_batches(dataset, of_rank, plan.args.data.dataloader_num_workers, ranks.device, mesh)
        with part.open("r+b") as file:
            file.truncate(int(self._begins[-1]) * row_bytes)
            for samples, micro in zip(of_rank, loaded):
                live, firsts = teacher(micro.batch), range(0, max(1, len(micro.batch.targets)), chunk)
                with deepspeed.zero.GatheredParameters(live.weights), waiting("the teacher's probabilities"):
                    found = [live.logs(slice(i, i + chunk))[0].topk(self._kept, 1) for i in firsts]
                    logs, ids = (torch.cat(each).cpu() for each in zip(*found))
                rows = torch.stack([ids.int() + 1, logs.view(torch.int32)], 1).numpy()
                for sample in (samples[place] for place in micro.places if mesh.shared_rank == 0):
                    begin, end = self._begins[sample : sample + 2].tolist()
                    file.seek(begin * row_bytes)
                    file.write(rows[: end - begin].tobytes())
                    rows = rows[end - begin :]
        flush(part)
        barrier(ranks)
        broadcast_from_first(ranks, lambda: part.rename(self._path))
