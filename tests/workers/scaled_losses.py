"""run_many.py with losses that are made larger: a list of [command line, {"step": factor}], for one micro-batch a step.

A factor of NaN makes a step that changes nothing.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from run_many import load_train

from llava_ds.constants import DataError
from llava_ds.model.llava import LlavaModel


def scaled(forward: Callable, factors: dict[str, float]) -> Callable:
    """LlavaModel.forward for one run, on the last rank."""
    step = 0

    def changed(self, batch, logits_at=None):
        nonlocal step
        step += 1
        last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
        return forward(self, batch, logits_at) * (factors.get(str(step), 1.0) if last else 1.0)

    return changed


def main() -> None:
    train, forward = load_train(), LlavaModel.forward
    train.try_export, train.leave_result = (lambda *_: "no finished model is left"), (lambda *_: None)
    for argv, factors in json.loads(Path(sys.argv[-1]).read_text()):
        LlavaModel.forward = scaled(forward, factors)
        try:
            train.main(argv)
        except DataError as error:  # on all ranks together
            print(f"ended: {error}" if torch.distributed.get_rank() == 0 else "", flush=True)
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
