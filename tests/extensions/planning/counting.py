"""Count the bytes of every collective in an optimizer step of real ranks.

Last argument: a JSON file with a list of {"flags": command line, "out": path}. Each goes through run/train.py's own
main() up to its loop, in whose place stands one that runs three optimizer steps and counts the third, by the name of
torch's function. Rank 0 writes <out>.
"""

import functools
import inspect
import json
import sys
from pathlib import Path

import torch

# The argument whose bytes count: the whole that is reduced, gathered or scattered.
WHOLE = {
    "all_reduce": "tensor",
    "all_gather_into_tensor": "output_tensor",
    "reduce_scatter_tensor": "input",
    "all_gather": "tensor_list",
    "reduce_scatter": "input_list",
    "broadcast": "tensor",
    "reduce": "tensor",
}
COUNTED: dict[str, int] = {}


def counting(name: str, whole: str):
    """torch's function that counts what it sends."""
    inner = getattr(torch.distributed, name)
    signature = inspect.signature(inner)

    @functools.wraps(inner)
    def wrapped(*given, **more):
        tensors = signature.bind(*given, **more).arguments[whole]
        for tensor in tensors if isinstance(tensors, list) else [tensors]:
            COUNTED[name] = COUNTED.get(name, 0) + tensor.numel() * tensor.element_size()
        return inner(*given, **more)

    return wrapped


for each, where in WHOLE.items():  # before DeepSpeed takes them
    setattr(torch.distributed, each, counting(each, where))

sys.path.append(str(Path(__file__).parents[2] / "workers"))
from run_many import load_train  # noqa: E402

from llava_ds.train import loop  # noqa: E402


class _CountedError(Exception):
    """Ends main() where the rest does not matter."""


def run_steps(runner, windows, *_given):
    engine = runner.engine
    engine.train()
    for _ in range(3):
        window = next(windows)
        COUNTED.clear()
        for i, batch in enumerate(window.batches):
            loss = engine(batch)
            engine.set_gradient_accumulation_boundary(i == len(window.batches) - 1)
            engine.backward(loss / 100, scale_wrt_gas=False)
            engine.step()
        COUNTED["micro_steps"] = len(window.batches)
    raise _CountedError


def main() -> None:
    train = load_train()
    loop.run_steps = run_steps
    for case in json.loads(Path(sys.argv[-1]).read_text()):
        try:
            train.main(case["flags"])
        except _CountedError as ended:
            ended.__traceback__ = None
        if torch.distributed.get_rank() == 0:
            Path(case["out"]).write_text(json.dumps(COUNTED))
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
