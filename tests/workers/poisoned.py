"""run_many.py with the last rank's memory or loss gone wrong in the third micro-batch of every run.

A loss that is not finite, once; from then on where --max_skipped_steps is given; one bit of the tower's weights in its
place where --check_divergence_steps is.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from run_many import load_train

from llava_ds.constants import DataError
from llava_ds.model.llava import LlavaModel

THIRD = 3


def poisoned(forward: Callable, argv: list[str]) -> Callable:
    """LlavaModel.forward for one run."""
    flips, stays = "--check_divergence_steps" in argv, "--max_skipped_steps" in argv
    calls = 0

    def changed(self, batch, logits_at=None):
        nonlocal calls
        calls += logits_at is None
        result = forward(self, batch, logits_at)
        last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
        if not last or logits_at is not None or not (calls == THIRD or (stays and calls > THIRD)):
            return result
        if flips:
            # At ZeRO-3, of a parameter that is not let go of after forward.
            weight = next(p for p in self.vision_tower.parameters() if p.numel() and getattr(p, "ds_persist", True))
            weight.data.view(-1).view(torch.int16)[0] ^= 1
            return result
        return result * float("nan")

    return changed


def main() -> None:
    train, forward = load_train(), LlavaModel.forward
    for argv in json.loads(Path(sys.argv[-1]).read_text()):
        LlavaModel.forward = poisoned(forward, argv)
        try:
            train.main(argv)
        except DataError as error:  # on all ranks together
            print(f"ended: {error}" if torch.distributed.get_rank() == 0 else "", flush=True)
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
