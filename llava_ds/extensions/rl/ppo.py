# S supervised positions of a micro-batch, A answers in it, L tokens of its longest answer
"""Proximal policy optimisation: a critic tells of every token how much better it was than expected."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from llava_ds.batch import Batch
from llava_ds.extensions.rl.grpo import GRPO, Drawn, clipped_losses
from llava_ds.model.heads import LogProbs
from llava_ds.model.open.value_head import Values


class Valued(NamedTuple):
    """The critic's numbers of a micro-batch of answers: Batch.extra["valued"]. Drawn.old is never None with them.

    values (S,) float64: the critic's before the step's updates, each before its token; returns (S,) float64: what it
    should have said; advantages (S,) float64.
    """

    values: torch.Tensor
    returns: torch.Tensor
    advantages: torch.Tensor


@dataclass(frozen=True)
class ActorCriticLoss:
    """The loss of every token. cliprange: how far the ratio of the new to the old probability counts; cliprange_value:
    how far a value may move from the old one and still count; vf_coef: weight of the critic's loss; temperature: that
    the answers were drawn at. Sources: PPO (arXiv 1707.06347); names and conventions are those of TRL's PPOTrainer and
    of DeepSpeed-Chat.
    """

    cliprange: float = 0.2
    cliprange_value: float = 0.2
    vf_coef: float = 0.1
    temperature: float = 1.0


@dataclass(frozen=True)
class ActorCritic(LogProbs):
    """The actor's log-probability of every target, (S,) float64, and the critic's value before it, (S,) float32."""

    def __call__(self, model: nn.Module, hidden: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both."""
        return super().__call__(model, hidden, batch), model.critic(batch, Values())


@dataclass(frozen=True)
class PPO(GRPO):
    """Clipped policy gradient over drawn answers, with a critic that trains beside the actor; see ActorCriticLoss."""

    loss: ActorCriticLoss
    probe = ActorCritic()

    def _losses(self, engine, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss of every token (S,), and metrics of every token, (S,) each, by TRL's names."""
        rows, values = engine(batch, ActorCritic(self.loss.temperature))  # (S,) each
        drawn, valued = batch.extra["drawn"], batch.extra["valued"]
        log_ratio, reach = rows - drawn.old, self.loss.cliprange
        actor, low, high = clipped_losses(log_ratio.exp(), valued.advantages, reach, reach)
        critic, is_clipped = self._value_losses(values.double(), valued)
        metrics = {
            "loss/policy_avg": actor.detach(),
            "loss/value_avg": critic.detach(),
            "policy/approxkl_avg": 0.5 * log_ratio.detach() ** 2,
            "policy/clipfrac_avg": low | high,
            "val/clipfrac_avg": is_clipped,
            "val/ratio": log_ratio.detach().exp(),
            "sampling_gap": (drawn.old - drawn.sampled).abs(),
        }
        return actor + self.loss.vf_coef * critic, metrics

    def _value_losses(self, values: torch.Tensor, old: Valued) -> tuple[torch.Tensor, torch.Tensor]:
        """The critic's loss of every token (S,), and where a value moved so far that it has no gradient."""
        reach = self.loss.cliprange_value
        clipped = old.values + (values - old.values).clamp(-reach, reach)
        plain, bounded = (values - old.returns) ** 2, (clipped - old.returns) ** 2
        return 0.5 * torch.maximum(plain, bounded), (bounded > plain).detach()


def token_rewards(batch: Batch, kl_ctl: float) -> torch.Tensor:
    """The reward of every token, (S,): less probable under the reference model costs, and the last has the score.

    Drawn.old has to be there, and Drawn.frozen where kl_ctl is not 0.
    """
    drawn: Drawn = batch.extra["drawn"]
    rewards = torch.zeros_like(drawn.old) if kl_ctl == 0 else -kl_ctl * (drawn.old - drawn.frozen)
    samples = batch.target_samples
    is_last = torch.ones_like(samples, dtype=torch.bool)
    is_last[:-1] = samples[1:] != samples[:-1]
    return rewards + torch.where(is_last, drawn.scores[samples], 0.0)


def advantages_over(
    values: torch.Tensor, rewards: torch.Tensor, samples: torch.Tensor, gamma: float, lam: float
) -> torch.Tensor:
    """Generalised advantages of tokens, (S,); values, rewards (S,) float64; samples (S,), ascending: their answers.

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}; behind an answer's end both are 0.
    Source: arXiv 1506.02438.
    """
    if not len(samples):
        return values
    _, lengths = samples.unique_consecutive(return_counts=True)
    longest, begins = int(lengths.max()), lengths.cumsum(0) - lengths
    rows = torch.arange(len(lengths), device=samples.device).repeat_interleave(lengths)
    columns = torch.arange(len(samples), device=samples.device) - begins[rows]
    value, reward = (values.new_zeros(len(lengths), longest + 1) for _ in range(2))  # (A, L + 1)
    value[rows, columns], reward[rows, columns] = values, rewards
    found = torch.zeros_like(value)
    for t in range(longest - 1, -1, -1):
        delta = reward[:, t] + gamma * value[:, t + 1] - value[:, t]
        found[:, t] = delta + gamma * lam * found[:, t + 1]
    return found[rows, columns]


def with_advantages(batch: Batch, values: torch.Tensor, kl_ctl: float, gamma: float, lam: float) -> Batch:
    """Add returns and advantages, which are not yet whitened, by the critic's values (S,)."""
    rewards = token_rewards(batch, kl_ctl)
    advantages = advantages_over(values.double(), rewards, batch.target_samples, gamma, lam)
    return batch.with_extra(valued=Valued(values.double(), advantages + values.double(), advantages))


def whitened(batch: Batch, mean: float, variance: float) -> Batch:
    """Set the mean of the advantages to 0 and their variance to 1, by those over all tokens of the step."""
    valued: Valued = batch.extra["valued"]
    white = (valued.advantages - mean) * (variance + 1e-8) ** -0.5
    return batch.with_extra(valued=valued._replace(advantages=white))
