# A answers of a micro-batch, P prompts of a rank in a step, G answers per prompt
"""Subtract the KL distance from the reference model from RLOO's rewards, instead of adding it to the loss."""

from collections.abc import Sequence

import torch

from llava_ds.batch import Batch
from llava_ds.extensions.rl.flags import Flags
from llava_ds.extensions.rl.policy_batches import TrainedAnswer
from llava_ds.model.heads import sum_by_sample
from llava_ds.runtime.waiting import waiting


def with_distances(
    batches: list[Batch], packs: Sequence[list[TrainedAnswer]], flags: Flags
) -> tuple[list[Batch], dict[str, torch.Tensor]]:
    """Subtract beta times (an answer's distance minus the mean distance of the other answers) from its advantage.

    packs: the answers of each batch; Requires Drawn.old and Drawn.frozen. An answer's distance is the sum of its
    tokens' log p_old - log p_ref, or 0 if it was left out of training. Also returns a metric: the distance per token,
    summed over prompts. Source: TRL's RLOOTrainer.
    """
    number, held = flags.num_generations, [one for pack in packs for one in pack]
    numbers = {id(one.prompt): None for one in held}
    place = {prompt: i for i, prompt in enumerate(numbers)}
    drawn = [batch.extra["drawn"] for batch in batches]
    total = sum(((each.old - each.frozen) * each.shares).sum() for each in drawn)
    sums = [sum_by_sample(each.old - each.frozen, batch)[0] for each, batch in zip(drawn, batches)]
    distances = torch.cat([each[: len(pack)] for each, pack in zip(sums, packs)])  # (A of all)
    with waiting("the number of each answer's prompt"):
        rows = torch.tensor([place[id(one.prompt)] for one in held], dtype=torch.int64, device=distances.device)
        times = torch.tensor([one.times for one in held], dtype=torch.float64, device=distances.device)
    is_of = rows == torch.arange(len(place), device=rows.device)[:, None]  # (P, A of all)
    means = torch.where(is_of, distances * times, 0.0).sum(1) / number
    taken = flags.beta * (distances - means[rows]) * (number / (number - 1))
    parts = taken.split([len(pack) for pack in packs])
    changed = [
        batch.with_extra(drawn=each._replace(scores=each.scores - part)) if len(part) else batch
        for batch, each, part in zip(batches, drawn, parts)
    ]
    return changed, {"kl": total}
