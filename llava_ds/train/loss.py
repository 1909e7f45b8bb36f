"""How a micro-batch's summed loss counts in the gradient of its optimizer step."""

import torch

from llava_ds.data.loader import Window


def loss_scales(window: Window, reduction: str, counts: torch.Tensor, world_size: int) -> list[torch.Tensor]:
    """The factor of each micro-batch's summed loss before backward, scalars on counts' device and of its dtype.

    counts: Window.counts summed over all ranks, a tensor in the order of Counts. DeepSpeed averages gradients over the
    ranks, so the factor holds world_size where a sum over ranks is meant. "token": the mean over all supervised tokens
    of the step, on all ranks. "micro_batch": LLaVA's mean over each micro-batch's tokens, then over the micro-batches
    of all ranks that have any.
    """
    _, _, num_targets, num_micro_batches, *_ = counts.clamp(min=1)
    if reduction == "token":
        return [world_size / num_targets] * len(window.micro_batches)
    return [world_size / (num_micro_batches * max(1, m.num_targets)) for m in window.micro_batches]
