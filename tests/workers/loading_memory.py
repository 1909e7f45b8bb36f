"""Measure the memory of loading a model on each rank: its own, and with the pages of mapped files.

Last argument: a JSON file with {"cases": {name: flags of the model}, "out": folder, "stages": {name: ZeRO stage}}.
Every case is built at its stage, by default 3, in float32, and every rank writes <out>/<name>-<rank>.json with bytes:
"share" (its partition), "anonymous" and "resident" (the largest growth while loading), and "left" (the growth
afterwards). The first case should be a small one, for what libraries do once is counted to it.
"""

import ctypes
import gc
import json
import sys
import threading
import time
from pathlib import Path

import torch

from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.engine.construct import build_model
from llava_ds.engine.process_group import init_ranks
from llava_ds.model.open.folder import take_from_model
from llava_ds.model.open.model_plan import plan_model
from llava_ds.runtime.ranks import quiet_libraries


def zero(stage: int) -> dict[str, object]:
    """A DeepSpeed JSON."""
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}


class Watch(threading.Thread):
    """The largest memory of this process while it runs, looked at every millisecond."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.peak = memory()
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.001):
            self.peak = tuple(map(max, self.peak, memory()))


def memory() -> tuple[int, int]:
    """(anonymous, resident) bytes of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "VmRSS"))}
    return sizes["RssAnon"], sizes["VmRSS"]


def settle() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    time.sleep(0.05)


def main() -> None:
    work = json.loads(Path(sys.argv[-1]).read_text())
    quiet_libraries()
    ranks = init_ranks()
    for name, flags in work["cases"].items():
        args = Arguments(ModelArguments(), DataArguments(), TrainingArguments(), frozenset(flags)).replaced(**flags)
        args, _ = take_from_model(args)
        settle()
        torch.distributed.barrier()
        watch = Watch()
        watch.start()
        plan = plan_model(args.model, 64)
        model = build_model(plan, args.model, zero(work["stages"].get(name, 3)), torch.float32, 0, ranks)
        watch.over.set()
        watch.join()
        settle()
        found = {
            "share": sum(getattr(p, "ds_tensor", p).numel() * 4 for p in model.parameters()),
            "anonymous": watch.peak[0] - watch.before[0],
            "resident": watch.peak[1] - watch.before[1],
            "left": memory()[0] - watch.before[0],
        }
        Path(work["out"], f"{name}-{ranks.rank}.json").write_text(json.dumps(found))
        del model, plan
        settle()
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
