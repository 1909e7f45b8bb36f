"""How a micro-batch's summed loss counts in the gradient of its optimizer step."""

import torch

from llava_ds.data.loader import Window


def loss_scales(window: Window, reduction: str, num_targets: torch.Tensor, world_size: int) -> list[torch.Tensor]:
    """The factor of each micro-batch's summed loss before backward, float32 scalars on num_targets' device.

    num_targets: supervised tokens of the step over all ranks, a scalar. DeepSpeed averages gradients over the ranks,
    so the factor holds world_size where a sum over ranks is meant. "token": the mean over all supervised tokens of the
    step, on all ranks. "micro_batch": LLaVA's mean over each micro-batch's tokens, then over micro-batches and ranks.
    """
    count = len(window.micro_batches)
    if reduction == "token":
        return [(world_size / num_targets.clamp(min=1)).float()] * count
    own = [1 / (max(1, micro.num_targets) * count) for micro in window.micro_batches]
    return list(torch.tensor(own, dtype=torch.float32, device=num_targets.device))
