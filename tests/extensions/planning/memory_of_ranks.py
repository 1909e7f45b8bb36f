"""Measure the memory of every rank at the boundary of an optimizer step: after the last backward, before the step.

Last argument: a JSON file with a list of {"flags": command line, "out": path}. Each goes through run/train.py's own
main() up to its loop, in whose place stands one that runs two optimizer steps and counts bytes by unique storage. Every
rank writes <out>-<rank>.json.
"""

import gc
import importlib.util
import json
import sys
import warnings
from pathlib import Path

import torch

from llava_ds.batch import Batch
from llava_ds.train import loop

TRAIN = Path(__file__).parents[3] / "run" / "train.py"


class _MeasuredError(Exception):
    """Ends main() where the rest does not matter."""


def main() -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)  # that looking at all objects touches
    spec = importlib.util.spec_from_file_location("train", TRAIN)
    train = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(train)
    for case in json.loads(Path(sys.argv[-1]).read_text()):
        gc.collect()
        gc.freeze()  # what exists by now is another case's
        found: dict[str, int] = {}
        loop.run_steps = _run_steps(found)
        try:
            train.main(case["flags"])
        except _MeasuredError as ended:
            ended.__traceback__ = None
        Path(f"{case['out']}-{torch.distributed.get_rank()}.json").write_text(json.dumps(found))
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _run_steps(found: dict[str, int]):
    def run_steps(runner, windows, *_):
        engine = runner.engine
        engine.train()
        for step in range(2):
            _run_backward(engine, next(windows).batches)
            if step == 1:
                found.update(_measure(engine))
                raise _MeasuredError
            engine.step()

    return run_steps


def _run_backward(engine, batches: list[Batch]) -> None:
    """All of an optimizer step but its end."""
    if hasattr(engine.module, "stage"):
        from llava_ds.extensions.pipeline.stage_runner import forward_and_backward

        forward_and_backward(engine, batches, lambda engine, batch: engine(batch), lambda _, loss: (loss / 100, None))
        return
    for i, batch in enumerate(batches):
        if i > 0:
            engine.step()
        engine.set_gradient_accumulation_boundary(i == len(batches) - 1)
        engine.backward(engine(batch) / 100, scale_wrt_gas=False)


def _measure(engine) -> dict[str, int]:
    """Bytes by what they are for, each storage counted once, where it is named first."""
    optimizer = engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    parameters = list(engine.module.parameters())

    def of(*names: str) -> list:
        return [getattr(optimizer, name, None) for name in names]

    kept = [p for p in parameters if not _is_gathered(p)]
    tensors = {
        "weights": [*(p.data for p in kept), *(getattr(p, "ds_tensor", None) for p in parameters)],
        "optimizer": [
            of("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups"),
            [list(state.values()) for state in inner.state.values()],
        ],
        "gradients": [of("averaged_gradients", "grad_partitions_flat_buffer"), [p.grad for p in parameters]],
        "buckets": [bucket.buffer for bucket in getattr(optimizer, "ipg_buckets", {}).values()],
        "gathered": [p.data for p in parameters],
    }
    seen: set[int] = set()
    sizes = {}
    for name, group in tensors.items():
        storages = dict(_storages(group))
        sizes[name] = sum(size for pointer, size in storages.items() if pointer not in seen)
        seen |= set(storages)
    sizes["unnamed"] = sum(size for pointer, size in _new_storages() if pointer not in seen)
    return sizes


def _is_gathered(parameter: torch.nn.Parameter) -> bool:
    return hasattr(parameter, "ds_id") and parameter.ds_status.name == "AVAILABLE" and not parameter.ds_persist


def _storages(tensors) -> set[tuple[int, int]]:
    """Address and size of the storage behind each tensor in any nesting of lists and dicts."""
    if isinstance(tensors, torch.Tensor):
        storage = tensors.untyped_storage()
        return {(storage.data_ptr(), storage.nbytes())} if storage.nbytes() else set()
    if isinstance(tensors, dict):
        tensors = list(tensors.values())
    return set().union(*map(_storages, tensors)) if isinstance(tensors, (list, tuple)) else set()


def _new_storages() -> set[tuple[int, int]]:
    gc.collect()
    tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]
    return set().union(*map(_storages, [t for t in tensors if t.device.type == "cpu"]))


if __name__ == "__main__":
    main()
