"""Compare the micro-batches that arrive with the plan of the step."""

from collections import deque

import torch

from llava_ds.constants import IMAGE_TOKEN_INDEX
from llava_ds.data.dataset import BrokenSample
from llava_ds.data.loader import MicroBatch, Window
from llava_ds.data.step_plan import StepPlan

EARLIER = 16  # steps whose tokens are kept, to tell a repeated batch from another wrong one


class PlannedBatches:
    """Lays out the steps a second time. Compares the supervised tokens of every micro-batch, and the tokens of its
    first sample. done: steps that are over."""

    def __init__(self, steps: StepPlan, dp_rank: int, done: int) -> None:
        self.dataset, self._dp_rank, self._layouts = steps.dataset, dp_rank, steps.after(done)
        self._seen: deque[torch.Tensor] = deque(maxlen=EARLIER)

    def check(self, window: Window) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two bool scalars: the step repeats an earlier one; it is wrong in another way."""
        planned = next(self._layouts).of_ranks[self._dp_rank]
        wrong = torch.stack([self._differs(*pair) for pair in zip(window.micro_batches, planned)]).any()
        ids = torch.cat([batch.input_ids.flatten() for batch in window.batches])
        same = [(ids == seen).all() for seen in self._seen if len(seen) == len(ids)]
        again = torch.stack(same).any() if same else torch.zeros_like(wrong)
        self._seen.append(ids)
        return wrong & again, wrong & ~again

    def _differs(self, micro: MicroBatch, planned: list[int]) -> torch.Tensor:
        samples, found = [planned[place] for place in micro.places if place < len(planned)], micro.batch.input_ids[0]
        never = torch.zeros((), dtype=torch.bool, device=found.device)
        if len(samples) < len(micro.places) or self.dataset.num_targets[samples].sum() != micro.num_targets:
            return ~never
        first = self.dataset.undecoded(*samples[:1])
        if not first or isinstance(first[0], BrokenSample):
            return never
        ids = first[0].samples[0].input_ids
        ids = ids.masked_fill(ids == IMAGE_TOKEN_INDEX, 0)[: len(found)]
        ids = ids.pin_memory().to(found.device, non_blocking=True) if found.is_cuda else ids
        return (found[: len(ids)] != ids).any()
