"""How a micro-batch's summed loss counts in the gradient of its optimizer step."""

from llava_ds.data.loader import Window


def loss_scales(window: Window, reduction: str, world_size: int) -> list[float]:
    """The factor of each micro-batch's summed loss before backward.

    DeepSpeed averages gradients over the ranks, so the factor holds world_size where a sum over ranks is meant.
    "token": the mean over all supervised tokens of the step, on all ranks. "micro_batch": LLaVA's mean over each
    micro-batch's tokens, then over micro-batches and ranks.
    """
    if reduction == "token":
        return [world_size / max(1, window.num_targets_all_ranks)] * len(window.batches)
    return [1 / (max(1, targets) * len(window.batches)) for targets in window.num_targets]
