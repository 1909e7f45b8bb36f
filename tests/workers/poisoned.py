"""run_many.py with one rank's loss not finite in one step: the last rank's, in the third micro-batch of every run."""

import json
import sys
from pathlib import Path

import torch
from run_many import load_train

from llava_ds.model.llava import LlavaModel

THIRD = 3


def main() -> None:
    train, forward = load_train(), LlavaModel.forward
    for argv in json.loads(Path(sys.argv[-1]).read_text()):
        calls = 0

        def poisoned(self, batch, logits_at=None):
            nonlocal calls
            calls += logits_at is None
            result = forward(self, batch, logits_at)
            last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
            return result * float("nan") if last and calls == THIRD and logits_at is None else result

        LlavaModel.forward = poisoned
        train.main(argv)
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
