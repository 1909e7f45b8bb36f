# S supervised positions of a micro-batch, A answers in it, L tokens of its longest answer
"""Proximal policy optimisation: a critic estimates how much better each token was than expected."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from llava_ds.batch import Batch
from llava_ds.extensions.rl.grpo import GRPO, Drawn, clipped_losses
from llava_ds.model.heads import LogProbs
from llava_ds.model.open.value_head import Values


class Valued(NamedTuple):
    """The critic's numbers of a micro-batch, stored in Batch.extra["valued"]. Requires Drawn.old.

    All are (S,) float64. values: the critic's estimate before the step's updates, at the position before each token.
    returns: the critic's targets. advantages: of the tokens.
    """

    values: torch.Tensor
    returns: torch.Tensor
    advantages: torch.Tensor


@dataclass(frozen=True)
class ActorCriticLoss:
    """Settings of every token's loss.

    cliprange: clipping range of the ratio of new to old probability. cliprange_value: clipping range of a new value
    around the old value. vf_coef: weight of the critic's loss. temperature: of the generation. Sources: PPO (arXiv
    1707.06347); names and conventions follow TRL's PPOTrainer and DeepSpeed-Chat.
    """

    cliprange: float = 0.2
    cliprange_value: float = 0.2
    vf_coef: float = 0.1
    temperature: float = 1.0


@dataclass(frozen=True)
class ActorCritic(LogProbs):
    """The actor's log-probability of every target, (S,) float64, and the critic's value before it, (S,) float32."""

    def __call__(self, model: nn.Module, hidden: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities and values."""
        return super().__call__(model, hidden, batch), model.critic(batch, Values())


@dataclass(frozen=True)
class PPO(GRPO):
    """Clipped policy gradient over generated answers, trained together with a critic; see ActorCriticLoss."""

    loss: ActorCriticLoss
    probe = ActorCritic()

    def _losses(self, engine, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the weighted loss (S,) and metrics (S,) of every token, by TRL's names."""
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
        return (actor + self.loss.vf_coef * critic) * drawn.weights, metrics

    def _value_losses(self, values: torch.Tensor, old: Valued) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the critic's loss (S,) per token, and a mask (S,) of clipped values that get no gradient."""
        reach = self.loss.cliprange_value
        clipped = old.values + (values - old.values).clamp(-reach, reach)
        plain, bounded = (values - old.returns) ** 2, (clipped - old.returns) ** 2
        return 0.5 * torch.maximum(plain, bounded), (bounded > plain).detach()


def token_rewards(batch: Batch, kl_ctl: float) -> torch.Tensor:
    """Return the reward of every token, (S,): a KL penalty per token, plus the score at the answer's last token.

    Requires Drawn.old, and also Drawn.frozen unless kl_ctl is 0.
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
    """Return the tokens' generalised advantages, (S,).

    values, rewards (S,) float64; samples (S,): each token's answer, ascending.
    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}; V and A are 0 after an answer's end.
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
    """Add returns and advantages, not yet whitened, computed from the critic's values (S,)."""
    rewards = token_rewards(batch, kl_ctl)
    advantages = advantages_over(values.double(), rewards, batch.target_samples, gamma, lam)
    return batch.with_extra(valued=Valued(values.double(), advantages + values.double(), advantages))


def whitened(batch: Batch, mean: float, variance: float) -> Batch:
    """Whiten the advantages, given their mean and variance over all tokens of the step."""
    valued: Valued = batch.extra["valued"]
    white = (valued.advantages - mean) * (variance + 1e-8) ** -0.5
    return batch.with_extra(valued=valued._replace(advantages=white))
