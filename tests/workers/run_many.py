"""Runs of run/train.py in processes that the ranks of one launch fork, for most of what a launch takes is imports.

Arguments: a folder, and the process that writes requests into it: 0.json, 1.json and so on, null for the end, else
command lines, each of which goes through the same main() as a launch of its own, all in one process of each rank; where
nothing is to be finished, up to where the finished model would be written. 0.done says that all runs are through, and
that rank 0 has ended well. A rank that fails ends the launch.
"""

import importlib.util
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

TRAIN = Path(__file__).parents[2] / "run" / "train.py"
# What a run imports where it needs it, and most runs do.
LATER = (
    "matplotlib.backends.backend_agg", "matplotlib.figure", "transformers.models.clip.modeling_clip",
    "transformers.models.llama.modeling_llama", "transformers.optimization",
)  # fmt: skip


def load_train():
    """run/train.py as a module."""
    spec = importlib.util.spec_from_file_location("train", TRAIN)
    train = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(train)
    return train


def leave_no_model() -> None:
    """Let runs try and export no finished model, which takes as long as a few steps."""
    from llava_ds.export import final_export, trial

    trial.try_export = lambda *_, **more: "nothing is exported"
    final_export.export_model = lambda *_: None


def requests(folder: Path, writer: int) -> Iterator[tuple[dict, Path]]:
    """What is asked for, until the end is, or the writer is gone; and the file that says that it is done."""
    for number in itertools.count():
        asked = folder / f"{number}.json"
        while not asked.exists():
            if not Path(f"/proc/{writer}").exists():
                return
            time.sleep(0.02)
        if (request := json.loads(asked.read_text())) is None:
            return
        yield request, asked.with_suffix(".done")


def run(train: ModuleType, request: dict) -> None:
    """Become the rank of a request, to the end of this process."""
    os.environ["MASTER_PORT"] = str(request["port"])
    if not request["finished"]:
        leave_no_model()
    for argv in request["runs"]:
        train.main(argv)
        torch.distributed.barrier()  # the next run may read what rank 0 has just written
    torch.distributed.destroy_process_group()


def main() -> None:
    train = load_train()
    for name in LATER:
        importlib.import_module(name)
    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    # pyarrow's allocator takes care of forks itself.
    assert len([name for name in threads if name != "jemalloc_bg_thd"]) == 1, f"forks would be without them: {threads}"
    for request, done in requests(Path(sys.argv[-2]), int(sys.argv[-1])):
        if (process := os.fork()) == 0:
            return run(train, request)
        if code := os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]):
            sys.exit(code)
        if os.environ["RANK"] == "0":
            done.touch()


if __name__ == "__main__":
    main()
