# P prompts of a rank in a step, G answers per prompt, A distinct trained answers, S their tokens
"""Turn rewarded answers into micro-batches: compute advantages, weight every token, and pack.

Identical answers to a prompt are computed once and weighted by their number. If all rewards of a group are equal, its
answers have no advantage, and are left out unless a reference model or an entropy bonus is used.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from llava_ds.data.collate import LoadedSample, collate, counts_of
from llava_ds.data.loader import MicroBatch, numbers_of
from llava_ds.data.step_plan import Packing
from llava_ds.extensions.rl.drawer import RolloutPrompt, whole_sample
from llava_ds.extensions.rl.flags import Flags
from llava_ds.extensions.rl.grpo import Drawn, advantages_of
from llava_ds.extensions.rl.rewards import Reward
from llava_ds.geometry import ImageOptions
from llava_ds.runtime.mesh import Mesh, sum_over
from llava_ds.runtime.waiting import waiting
from llava_ds.train.evaluating.sampling import Answer, packs_of_rank


@dataclass(frozen=True)
class Group:
    """The answers to one prompt.

    by_function (functions, G): rewards, nan if a function does not apply. rewards (G,): weighted sums that skip nan.
    """

    prompt: RolloutPrompt
    answers: list[Answer]
    by_function: np.ndarray
    rewards: np.ndarray


@dataclass(frozen=True)
class TrainedAnswer:
    """A trained answer with its prompt.

    times: how often the answer was generated with this score (see Drawn.scores). shares: True if an earlier answer in
    the pack already computes this prompt.
    """

    prompt: RolloutPrompt
    answer: Answer
    score: float
    times: int
    shares: bool = False

    @property
    def sample(self) -> LoadedSample:
        """The prompt followed by the supervised answer. Answers to one prompt share its images."""
        prompt = self.prompt.sample
        return replace(whole_sample(prompt, self.answer), shared=len(prompt.input_ids) * self.shares)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that this answer adds to a pack."""
        sample = self.sample
        return len(sample.input_ids) - sample.shared


@dataclass(frozen=True)
class StepTotals:
    """Totals of a step over all ranks.

    tokens: of all answers that the loss counts, also those without an advantage. spread: std of all rewards.
    """

    prompts: float
    answers: float
    tokens: float
    spread: float


def totals_of(groups: list[Group], mesh: Mesh, device: torch.device, only_ended: bool = False) -> StepTotals:
    """Count the answers of a step, and the tokens of all or only of finished answers. Collective."""
    answers = [answer for group in groups for answer in group.answers]
    rewards = np.concatenate([np.zeros(0), *(group.rewards for group in groups)])
    tokens = sum(len(answer.ids) for answer in answers if answer.ended or not only_ended)
    own = [len(groups), len(answers), tokens, rewards.sum()]
    prompts, answers, tokens, total = sums_of_ranks(own, mesh, device)
    [squares] = sums_of_ranks([((rewards - total / max(1.0, answers)) ** 2).sum()], mesh, device)
    return StepTotals(prompts, answers, tokens, (squares / max(1.0, answers - 1)) ** 0.5)


def trained_answers(groups: list[Group], totals: StepTotals, flags: Flags) -> list[list[TrainedAnswer]]:
    """Return the distinct trained answers of each group."""
    found, scale = [], "leave_one_out" if flags.loss_type == "rloo" else flags.scale_rewards
    for group in groups:
        rewards = torch.from_numpy(group.rewards)[None]
        advantages = advantages_of(rewards, scale, totals.spread)[0].tolist()
        if has_no_signal(group):
            advantages = [0.0] * len(advantages)  # exactly 0, without the mean's rounding error
        found.append(
            [
                one
                for one in distinct_answers(group, advantages)
                if (one.score or flags.beta or flags.entropy_coef)
                and (one.answer.ended or not flags.mask_truncated_completions)
            ]
        )
    return found


def distinct_answers(group: Group, scores: list[float]) -> list[TrainedAnswer]:
    """Return every distinct (answer, score) pair of a group once."""
    times = Counter(zip(group.answers, scores))
    return [TrainedAnswer(group.prompt, answer, score, number) for (answer, score), number in times.items()]


def has_no_signal(group: Group) -> bool:
    """Return True if all answers of the group have the same reward, so that all advantages are 0."""
    return bool((group.rewards == group.rewards[0]).all())


def pack(units: list[list[TrainedAnswer]], packing: Packing, shares: bool) -> list[list[TrainedAnswer]]:
    """Pack this rank's answers into micro-batches. A prompt's answers stay together, or in as few packs as possible.

    A token limit bounds packs if it is set, otherwise the number of prompts. shares: True if answers share prompts.
    """
    most = packing.tokens_per_micro_batch or sys.maxsize
    parts: list[list[TrainedAnswer]] = []
    for unit in units:
        room = 0
        for one in unit:
            another = replace(one, shares=shares)
            if not room or another.num_tokens > room:
                parts.append([])
                room, another = most, one
            parts[-1].append(another)
            room = max(0, room - another.num_tokens)
    lengths = [sum(one.num_tokens for one in part) for part in parts]
    return [[one for i in each for one in parts[i]] for each in packs_of_rank(lengths, packing)]


def policy_batch(
    answers: list[TrainedAnswer], totals: StepTotals, trained_tokens: float, flags: Flags, options: ImageOptions
) -> MicroBatch:
    """Collate answers into a micro-batch, with every token's weight in the step's loss.

    trained_tokens: trained tokens of all ranks, with each answer counted as often as it was generated.
    """
    samples = [one.sample for one in answers]
    plain = collate(samples, options)
    lengths = torch.tensor([len(one.answer.ids) for one in answers], dtype=torch.int64)
    times = torch.tensor([one.times for one in answers], dtype=torch.float64)
    means = times / max(1.0, totals.tokens)
    weights = {
        **dict.fromkeys(("dapo", "cispo"), means),
        **dict.fromkeys(("grpo", "sapo", "rloo"), times / lengths.clamp(min=1) / max(1.0, totals.answers)),
        "luspo": times / max(1.0, totals.answers),
        "dr_grpo": times / (max(1.0, totals.answers) * flags.max_completion_length),
    }[flags.loss_type]
    scores = torch.tensor([one.score for one in answers] or [0.0], dtype=torch.float64)
    sampled = torch.tensor([value for one in answers for value in one.answer.log_probs], dtype=torch.float64)
    drawn = Drawn(
        scores=scores,
        weights=weights.repeat_interleave(lengths),
        means=means.repeat_interleave(lengths),
        shares=(times * totals.prompts / max(1.0, trained_tokens)).repeat_interleave(lengths),
        sampled=sampled,
    )
    batch = plain.with_extra(drawn=drawn)
    tiles = {id(one): len(one) for sample in samples for one, _ in sample.media}
    numbers = numbers_of([counts_of(sample) for sample in samples]) | {"num_tiles": sum(tiles.values())}
    return MicroBatch(batch, tuple(range(len(samples))), broken=(), **numbers)


def metrics_of(
    groups: list[Group], rewards: Sequence[Reward], totals: StepTotals, mesh: Mesh, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return metrics by TRL's names: means over a prompt's answers, summed over prompts. Collective.

    A reward function may apply to some prompts only. Its sum is scaled up to all prompts, because every metric is later
    divided by the number of prompts.
    """

    def total(values) -> torch.Tensor:
        return torch.tensor(float(sum(values)), dtype=torch.float64, device=device)

    lengths = [[len(answer.ids) for answer in group.answers] for group in groups]
    means, applied = {}, []
    for i, reward in enumerate(rewards):
        rows = [group.by_function[i] for group in groups]
        means[f"rewards/{reward.name}/mean"] = own = [np.nanmean(row) for row in rows if not np.isnan(row).all()]
        applied.append(len(own))
    scales = [1.0] * len(rewards)
    if any(reward.of_user for reward in rewards):
        scales = [totals.prompts / max(1.0, number) for number in sums_of_ranks(applied, mesh, device)]
    return {
        "reward": total(group.rewards.mean() for group in groups),
        "reward_std": total(group.rewards.std(ddof=min(1, len(group.rewards) - 1)) for group in groups),
        "frac_reward_zero_std": total(has_no_signal(group) for group in groups),
        "completions/mean_length": total(np.mean(each) for each in lengths),
        "completions/clipped_ratio": total(np.mean([not one.ended for one in group.answers]) for group in groups),
        # This metric is a mean over a group's tokens; all others are means over its answers.
        "entropy": total(sum(a.entropy for a in g.answers) / sum(each) for g, each in zip(groups, lengths)),
        **{name: total(values) * scale for (name, values), scale in zip(means.items(), scales)},
    }


def sums_of_ranks(numbers: list[float], mesh: Mesh, device: torch.device) -> list[float]:
    """Sum numbers over the ranks. Collective."""
    with waiting("sums over the answers of a step"):
        return sum_over(mesh.data_group, torch.tensor(numbers, dtype=torch.float64, device=device)).tolist()
