# P prompts of a rank in a step, G answers to each, A distinct answers that train, S their tokens
"""From the rewards of drawn answers to micro-batches: advantages, the weight of every token, and packs.

Equal answers to a prompt with one advantage are computed once, and weigh as often as they were given. Answers without
an advantage, of groups whose rewards are all equal, are left out unless a reference model holds them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from llava_ds.constants import IGNORE_INDEX
from llava_ds.data.collate import LoadedSample, collate
from llava_ds.data.loader import MicroBatch
from llava_ds.data.packing import plan_by_tokens
from llava_ds.data.step_plan import Packing
from llava_ds.extensions.rl.flags import Flags
from llava_ds.extensions.rl.grpo import Drawn, advantages_of
from llava_ds.extensions.rl.rewards import Reward
from llava_ds.geometry import ImageOptions
from llava_ds.runtime.mesh import Mesh, sum_over
from llava_ds.runtime.waiting import waiting
from llava_ds.train.sampling import Answer


@dataclass(frozen=True)
class AskedPrompt:
    """A sample up to its last answer. text: the question, as its reward sees it; reference: that answer."""

    index: int
    id: str
    sample: LoadedSample
    text: str
    reference: str


@dataclass(frozen=True)
class Group:
    """The answers to one prompt.

    by_function (functions, G): their rewards, nan where one does not apply; rewards (G,): the weighted sum of the rest.
    """

    prompt: AskedPrompt
    answers: list[Answer]
    by_function: np.ndarray
    rewards: np.ndarray


@dataclass(frozen=True)
class TrainedAnswer:
    """An answer that trains, with its prompt, and how often it was given with this score (Drawn.scores)."""

    prompt: AskedPrompt
    answer: Answer
    score: float
    times: int

    @property
    def sample(self) -> LoadedSample:
        """Prompt and answer, of which the answer is supervised. Those to one prompt share its images."""
        return with_answer(self.prompt.sample, self.answer.ids)


def with_answer(asked: LoadedSample, answer: Sequence[int]) -> LoadedSample:
    """A prompt followed by the ids of an answer, which is supervised."""
    ids = torch.tensor(answer)
    labels = torch.cat([torch.full_like(asked.input_ids, IGNORE_INDEX), ids])
    return LoadedSample(torch.cat([asked.input_ids, ids]), labels, asked.media, asked.source)


@dataclass(frozen=True)
class StepTotals:
    """Numbers of a step over all ranks. tokens: of the answers whose loss counts, also those without an advantage;
    spread: the standard deviation of all rewards."""

    prompts: float
    answers: float
    tokens: float
    spread: float


def totals_of(groups: list[Group], mesh: Mesh, device: torch.device, only_ended: bool = False) -> StepTotals:
    """Count the answers of a step, and the tokens of all, or of those that ended. All ranks call it together."""
    answers = [answer for group in groups for answer in group.answers]
    rewards = np.concatenate([np.zeros(0), *(group.rewards for group in groups)])
    tokens = sum(len(answer.ids) for answer in answers if answer.ended or not only_ended)
    own = [len(groups), len(answers), tokens, rewards.sum()]
    prompts, answers, tokens, total = sums_of_ranks(own, mesh, device)
    [squares] = sums_of_ranks([((rewards - total / max(1.0, answers)) ** 2).sum()], mesh, device)
    return StepTotals(prompts, answers, tokens, (squares / max(1.0, answers - 1)) ** 0.5)


def trained_answers(groups: list[Group], totals: StepTotals, flags: Flags) -> list[list[TrainedAnswer]]:
    """The distinct answers of each group that train."""
    found = []
    for group in groups:
        rewards = torch.from_numpy(group.rewards)[None]
        advantages = advantages_of(rewards, flags.scale_rewards, totals.spread)[0].tolist()
        if has_no_signal(group):
            advantages = [0.0] * len(advantages)  # not what rounding of the mean leaves
        found.append(
            [
                one
                for one in distinct_answers(group, advantages)
                if (one.score or flags.beta) and (one.answer.ended or not flags.mask_truncated_completions)
            ]
        )
    return found


def distinct_answers(group: Group, scores: list[float]) -> list[TrainedAnswer]:
    """The answers of a group, equal ones with one score once."""
    times = Counter(zip(group.answers, scores))
    return [TrainedAnswer(group.prompt, answer, score, number) for (answer, score), number in times.items()]


def has_no_signal(group: Group) -> bool:
    """True where all answers have one reward."""
    return bool((group.rewards == group.rewards[0]).all())


def pack(units: list[list[TrainedAnswer]], packing: Packing) -> list[list[TrainedAnswer]]:
    """Lay this rank's answers out in micro-batches. Those to one prompt stay together, or in as few as have room.

    With a bound of tokens by it, else so many prompts a micro-batch.
    """
    most = packing.tokens_per_micro_batch
    if most is None:
        units = [unit for unit in units if unit]
        size = packing.micro_batch_size
        return [[one for unit in units[first : first + size] for one in unit] for first in range(0, len(units), size)]
    parts: list[list[TrainedAnswer]] = []
    for unit in units:
        room = 0
        for one in unit:
            length = len(one.sample.input_ids)
            if not room or length > room:
                parts.append([])
                room = most
            parts[-1].append(one)
            room = max(0, room - length)
    if not parts:
        return []
    lengths = np.array([sum(len(one.sample.input_ids) for one in part) for part in parts])
    [packs] = plan_by_tokens(range(len(parts)), lengths, 1, most, packing.costs(lengths))
    return [[one for i in each for one in parts[i]] for each in packs]


def policy_batch(
    answers: list[TrainedAnswer], totals: StepTotals, trained_tokens: float, flags: Flags, options: ImageOptions
) -> MicroBatch:
    """Collate answers to a micro-batch, with the weight of every token in the loss of the step.

    trained_tokens: of all ranks, each as often as its answer was given.
    """
    samples = [one.sample for one in answers]
    plain = collate(samples, options)
    lengths = torch.tensor([len(one.answer.ids) for one in answers], dtype=torch.int64)
    times = torch.tensor([one.times for one in answers], dtype=torch.float64)
    weights = {
        "dapo": times / max(1.0, totals.tokens),
        "grpo": times / lengths.clamp(min=1) / max(1.0, totals.answers),
        "dr_grpo": times / (max(1.0, totals.answers) * flags.max_completion_length),
    }[flags.loss_type]
    scores = torch.tensor([one.score for one in answers] or [0.0], dtype=torch.float64)
    sampled = torch.tensor([value for one in answers for value in one.answer.log_probs], dtype=torch.float64)
    drawn = Drawn(
        scores=scores,
        weights=weights.repeat_interleave(lengths),
        shares=(times * totals.prompts / max(1.0, trained_tokens)).repeat_interleave(lengths),
        sampled=sampled,
    )
    batch = plain.with_extra(drawn=drawn)
    sizes = [len(sample.input_ids) for sample in samples]
    tiles = {id(one): len(one) for sample in samples for one, _ in sample.media}
    pairs = sum(size * (size + 1) // 2 for size in sizes)
    return MicroBatch(batch, tuple(range(len(samples))), sum(sizes), int(lengths.sum()), pairs, sum(tiles.values()), ())


def metrics_of(
    groups: list[Group], rewards: Sequence[Reward], totals: StepTotals, mesh: Mesh, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return sums over prompts, each a mean over its answers, by TRL's names. All ranks call it together.

    A reward of the user's counts for the prompts with answers that it applies to: its sum is scaled to the number of
    all prompts, which every number is divided by.
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
        # Of the tokens of each group, as the others are of its answers.
        "entropy": total(sum(a.entropy for a in g.answers) / sum(each) for g, each in zip(groups, lengths)),
        **{name: total(values) * scale for (name, values), scale in zip(means.items(), scales)},
    }


def sums_of_ranks(numbers: list[float], mesh: Mesh, device: torch.device) -> list[float]:
    """Sum numbers over the ranks. All ranks call it together."""
    with waiting("sums over the answers of a step"):
        return sum_over(mesh.data_group, torch.tensor(numbers, dtype=torch.float64, device=device)).tolist()
