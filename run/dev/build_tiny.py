"""Rebuild the tiny base weights in the package: a CLIP tower and a Llama, trained separately.

python run/dev/build_tiny.py --output llava_ds/tiny/weights
"""

from llava_ds.runtime.command import Parser, begin, exit_with, new_folder

if __name__ == "__main__":
    begin("run/dev/build_tiny.py")


import time
from pathlib import Path
from typing import Annotated

import torch
from tiny_model.build_clip import build_clip
from tiny_model.build_llama import build_llama

from llava_ds.config.bounds import Bounds, Seed, number
from llava_ds.tiny import WEIGHTS_PATH

Threads = Annotated[int, Bounds(1, 4096)]


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("--output", type=new_folder, default=WEIGHTS_PATH, help="folder for clip/ and llama/")
    parser.add_argument("--seed", type=number(Seed), default=0, help="seed of scenes, texts and initial weights")
    parser.add_argument("--only", choices=("clip", "llama"), help="rebuild one of the two")
    parser.add_argument(
        "--threads", type=number(Threads), default=1, help="CPU threads; another number changes rounding"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    for name, build in (("clip", build_clip), ("llama", build_llama)):
        if args.only in (None, name):
            folder, start = Path(args.output) / name, time.monotonic()
            accuracies = build(folder, args.seed)
            size_bytes = sum(file.stat().st_size for file in folder.iterdir())
            print(f"{folder}: {size_bytes / 1e6:.2f} MB, {time.monotonic() - start:.0f} s. On held-out scenes:")
            for what, accuracy in accuracies.items():
                print(f"  {what:<10} {accuracy:.3f}")


if __name__ == "__main__":
    exit_with(main, "run/dev/build_tiny.py")
