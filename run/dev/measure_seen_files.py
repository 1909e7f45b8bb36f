"""Measure the cost of detecting changed image files: python run/dev/measure_seen_files.py [--images N] [--side N]

Prints the seconds of a preflight of small image files, how many of them go into hashing what the files hold, and what
the next start takes: with the stamps as they were, by one process and by --processes, and with all of them changed (as
by a copy without times). Of a start, also the processor time for each image of the process that takes most.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
from PIL import Image

from llava_ds.data import preflight, seen_files
from llava_ds.data.dataset import EncodedDataset, PreflightOptions, open_encoded
from llava_ds.data.encode import EncodingOptions
from llava_ds.data.rows import media_of_text
from llava_ds.data.sources import SourceOptions, open_sources
from llava_ds.geometry import ImageOptions
from llava_ds.tiny.build_tokenizer import save_tokenizer, train_tokenizer
from llava_ds.tokenizer import open_tokenizer

ANSWER = "A cat stands near a red car on the street, and a dog is holding a small green table in its mouth. "


def write_data(folder: Path, number: int, side: int) -> None:
    """A record for each of so many JPEGs of noise, a thousand of them painted and numbered in their comments."""
    (folder / "images").mkdir()
    rng, painted = np.random.default_rng(0), []
    for _ in range(min(number, 1000)):
        painted.append(Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)))
    records = []
    for i in range(number):
        painted[i % len(painted)].save(folder / "images" / f"{i}.jpg", comment=str(i))
        turns = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": ANSWER * 4}]
        records.append({"id": str(i), "image": f"{i}.jpg", "conversations": turns})
    (folder / "data.json").write_text(json.dumps(records))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=40_000)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--side", type=int, default=96, help="pixels; 96 makes files of 8 kB")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder, args.images, args.side)
        size = (folder / "images" / "0.jpg").stat().st_size
        save_tokenizer(train_tokenizer([ANSWER, "What is it?"], max_vocab_size=400), folder)
        tokenizer, image_options = open_tokenizer(name), ImageOptions(336, 14, (0.5, 0.5, 0.5))
        sources = open_sources(str(folder / "data.json"), SourceOptions(image_folder=str(folder / "images")))
        spent, genuine = [0.0], preflight.seen_files

        def timed(*arguments):
            started = time.perf_counter()
            found = genuine(*arguments)
            spent[0] += time.perf_counter() - started
            return found

        preflight.seen_files = timed

        def opened():
            return open_encoded(
                sources, tokenizer, EncodingOptions("v1", 2048), image_options, PreflightOptions(name, num_workers=1)
            )

        started = time.perf_counter()
        data = opened()
        whole = time.perf_counter() - started
        print(
            f"preflight of {len(data):,} images of {size:,} bytes in one process: {whole:.2f} s, {spent[0]:.2f} s of it"
        )
        for what in ("as they were", "all changed"):
            if what == "all changed":
                for path in (folder / "images").iterdir():
                    os.utime(path, ns=(1, 1))
            for processes in (1, args.processes):
                look(data, image_options, processes, what)


def look(data: EncodedDataset, image_options: ImageOptions, processes: int, what: str) -> None:
    """Print what the next start takes."""
    started, before = time.perf_counter(), cpu_times()
    assert not seen_files.changed_files(data.table, image_options, media_of_text, most_processes=processes)
    own, helpers = (after - earlier for after, earlier in zip(cpu_times(), before))
    each = max(own, helpers / processes) / len(data) * 1e6
    print(
        f"the next start, stamps {what}, up to {processes} processes: {time.perf_counter() - started:.2f} s, "
        f"{each:.2f} us of processor time an image"
    )


def cpu_times() -> tuple[float, float]:
    """Processor time of this process, and of those that it has ended."""
    used = os.times()
    return used.user + used.system, used.children_user + used.children_system


if __name__ == "__main__":
    main()
