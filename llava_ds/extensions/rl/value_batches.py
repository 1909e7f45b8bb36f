# P prompts of a rank in a step, S answer tokens of a micro-batch
"""Compute advantages (whitened over all ranks), returns and metrics of a step from the critic's values."""

import numpy as np
import torch

from llava_ds.batch import Batch
from llava_ds.extensions.rl.flags import Flags
from llava_ds.extensions.rl.policy_batches import Group, StepTotals, TrainedAnswer, distinct_answers, sums_of_ranks
from llava_ds.extensions.rl.ppo import Valued, token_rewards, whitened, with_advantages
from llava_ds.runtime.mesh import Mesh
from llava_ds.runtime.waiting import waiting


def rewarded_answers(groups: list[Group], clip: float) -> list[list[TrainedAnswer]]:
    """Return the distinct answers of each group with their rewards, clipped to [-clip, clip]."""
    return [distinct_answers(group, np.clip(group.rewards, -clip, clip).tolist()) for group in groups]


def value_batches(
    batches: list[Batch], values: list[torch.Tensor], totals: StepTotals, flags: Flags, mesh: Mesh
) -> tuple[list[Batch], dict[str, torch.Tensor]]:
    """Add advantages and returns to this rank's micro-batches, from the critic's values (S,) of each. Collective.

    Also returns the step's metrics under TRL's names, as sums over prompts.
    """
    rules = flags.kl_ctl, flags.gamma, flags.lam
    found = [with_advantages(batch, own, *rules) for batch, own in zip(batches, values)]
    each = _joined(found, flags.kl_ctl)
    variances, means = moments([each["advantages"], each["returns"], each["errors"]], each["weights"], totals, mesh)
    explained = 0.0 if variances[1] == 0 else 1 - variances[2] / variances[1]
    # Weighted by shares, numbers give means over tokens. Times the mean length, these become sums per answer.
    per_answer = each["shares"] * (totals.tokens / max(1.0, totals.answers))
    metrics = {
        "objective/kl": (each["kl"] * per_answer).sum(),
        "objective/entropy": (-each["old"] * per_answer).sum(),
        "objective/non_score_reward": (-flags.kl_ctl * each["kl"] * per_answer).sum(),
        "objective/rlhf_reward": (each["rewards"] * per_answer).sum(),
        "val/mean": (each["values"] * each["shares"]).sum(),
        # This rank's shares are the weights, because shares of all ranks add up to the step's prompts.
        "val/explained_variance": explained * each["shares"].sum(),
    }
    return [whitened(batch, means[0], variances[0]) for batch in found], metrics


def _joined(batches: list[Batch], kl_ctl: float) -> dict[str, torch.Tensor]:
    """Concatenate the numbers of every token of all micro-batches, (tokens,) each."""
    drawn, valued = ([batch.extra[name] for batch in batches] for name in ("drawn", "valued"))
    found = {name: torch.cat([getattr(each, name) for each in drawn]) for name in ("old", "weights", "shares")}
    found |= {name: torch.cat([getattr(each, name) for each in valued]) for name in Valued._fields}
    found["errors"] = found["returns"] - found["values"]
    found["rewards"] = torch.cat([token_rewards(batch, kl_ctl) for batch in batches])
    kl = [torch.zeros_like(each.old) if each.frozen is None else each.old - each.frozen for each in drawn]
    return {**found, "kl": torch.cat(kl)}


def moments(
    numbers: list[torch.Tensor], weights: torch.Tensor, totals: StepTotals, mesh: Mesh
) -> tuple[list[float], list[float]]:
    """Return variances and means of per-token numbers over all ranks. weights: one per token, with sum 1."""
    with waiting("the critic's values"):
        own = [float((each * weights).sum()) for each in numbers]
    means = sums_of_ranks(own, mesh, weights.device)
    with waiting("the critic's values"):
        squares = [float(((each - mean) ** 2 * weights).sum()) for each, mean in zip(numbers, means)]
    unbiased = totals.tokens / max(1.0, totals.tokens - 1)
    return [found * unbiased for found in sums_of_ranks(squares, mesh, weights.device)], means
