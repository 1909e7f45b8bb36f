"""Measure the speed of the preflight on text records: python run/dev/measure_preflight.py [--records N] [--workers N]

Made-up English conversations of one to three turns, some 600 characters each; a Llama-like tokenizer of their words, or
the one that --tokenizer names. Prints records a second and process, of the first run and of the second; with --stream
the seconds until the first step of 128 samples could be trained, and until all is encoded.
"""

import argparse
import json
import os
import random
import tempfile
import time
from functools import partial
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from llava_ds.data.dataset import ALONE, DataSpec, PreflightOptions, open_encoded
from llava_ds.data.encode import EncodingOptions
from llava_ds.data.sample_order import SampleOrder, shards_in_order
from llava_ds.data.sources import SourceOptions, open_sources
from llava_ds.data.stream import streamed
from llava_ds.geometry import ImageOptions
from llava_ds.tiny.build_tokenizer import save_tokenizer, train_tokenizer
from llava_ds.tokenizer import open_tokenizer

WORDS = (
    "the a of image cat dog red blue table chair person running stands near with holding large small green car street "
    "building sky water tree why what where how many there is are visible in describe scene answer using single word"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--tokenizer")
    parser.add_argument("--stream", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "text.json"
        data.write_text(json.dumps(list(records(args.records))), encoding="utf-8")
        if args.tokenizer is None:
            texts = [turn["value"] for record in records(3000) for turn in record["conversations"]]
            save_tokenizer(train_tokenizer(texts, max_vocab_size=4000), Path(folder))
        tokenizer = open_tokenizer(args.tokenizer or folder)
        options = (
            open_sources(str(data), SourceOptions(cache_dir=folder)),
            tokenizer,
            EncodingOptions("v1", 2048),
            ImageOptions(336, 14, (0.5, 0.5, 0.5)),
            PreflightOptions(folder, num_workers=args.workers),
        )
        if args.stream:
            measure_stream(DataSpec.of(*options))
            return
        for name in ("first", "second"):
            started = time.perf_counter()
            encoded = open_encoded(*options)
            seconds = time.perf_counter() - started
            rate = len(encoded) / seconds / args.workers
            print(f"{name} run: {seconds:.2f} s, {rate:,.0f} records a second and process ({args.workers})")
        print(*encoded.summary(), sep="\n")


def measure_stream(spec: DataSpec) -> None:
    """Print when records are counted, when the first step's are encoded, and when all are."""
    started = time.perf_counter()
    encoded = streamed(spec, partial(shards_in_order, seed=0, epoch=0), ALONE)
    counted = time.perf_counter() - started
    order = SampleOrder(len(encoded), 128, 0, "shards", encoded.lengths_for("shards"), shuffled_together=4)
    encoded.wait_for(next(order.steps()))
    first = time.perf_counter() - started
    encoded.encoded(ALONE)
    whole = time.perf_counter() - started
    print(
        f"{len(encoded):,} records: counted after {counted:.1f} s, the first step's encoded after {first:.1f} s, ",
        end="",
    )
    print(f"all after {whole:.1f} s")


def records(number: int):
    """LLaVA records, the same ones every time."""
    rng, words = random.Random(0), WORDS.split()
    for i in range(number):
        turns = []
        for _ in range(rng.choice([1, 1, 2, 2, 3])):
            for role, longest in (("human", 25), ("gpt", 60)):
                text = " ".join(rng.choices(words, k=rng.randint(5, longest))).capitalize() + "."
                turns.append({"from": role, "value": text})
        yield {"id": str(i), "conversations": turns}


if __name__ == "__main__":
    main()
