"""run/train.py that counts every so many steps what it holds, into soak-<rank>.json of the folder named last."""

import ctypes
import gc
import json
import os
import sys
from pathlib import Path

import psutil
from run_many import load_train

from llava_ds.train.hooks import Save, StepEnd

EVERY = 100  # steps, half-way between two saves


class Mallinfo2(ctypes.Structure):
    """glibc's, in bytes; of all arenas."""

    NAMES = "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in NAMES]


def main() -> None:
    *argv, folder = sys.argv[1:]
    libc, process = ctypes.CDLL("libc.so.6"), psutil.Process()
    libc.mallinfo2.restype = Mallinfo2
    after_step, looks = Save.after_step, []  # the last hook

    def look(save: Save, end: StepEnd) -> None:
        after_step(save, end)
        if end.step % EVERY == EVERY // 2:
            gc.collect()
            heap = libc.mallinfo2()
            looks.append(
                {
                    "step": end.step,
                    "in use": heap.uordblks + heap.hblkhd,
                    "resident": process.memory_info().rss,
                    "files": process.num_fds(),
                    "threads": process.num_threads(),
                    "children": len(process.children()),
                }
            )

    Save.after_step = look
    load_train().main([argument for argument in argv if not argument.startswith("--local_rank")])
    (Path(folder) / f"soak-{os.environ['RANK']}.json").write_text(json.dumps(looks))


if __name__ == "__main__":
    main()
