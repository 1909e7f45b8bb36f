"""Measure the speed of the preflight on text records: python run/dev/measure_preflight.py [--records N] [--workers N]

Made-up English conversations of one to three turns, some 600 characters each; a Llama-like tokenizer of their words, or
the one that --tokenizer names. Prints records a second and process, of the first run and of the second.
"""

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from llava_ds.data.dataset import PreflightOptions, open_encoded
from llava_ds.data.encode import EncodingOptions
from llava_ds.data.sources import SourceOptions, open_sources
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
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "text.json"
        data.write_text(json.dumps(list(records(args.records))), encoding="utf-8")
        if args.tokenizer is None:
            texts = [turn["value"] for record in records(3000) for turn in record["conversations"]]
            save_tokenizer(train_tokenizer(texts, max_vocab_size=4000), Path(folder))
        tokenizer = open_tokenizer(args.tokenizer or folder)
        for name in ("first", "second"):
            started = time.perf_counter()
            encoded = open_encoded(
                open_sources(str(data), SourceOptions(cache_dir=folder)),
                tokenizer,
                EncodingOptions("v1", 2048),
                ImageOptions(336, 14, (0.5, 0.5, 0.5)),
                PreflightOptions(folder, num_workers=args.workers),
            )
            seconds = time.perf_counter() - started
            rate = len(encoded) / seconds / args.workers
            print(f"{name} run: {seconds:.2f} s, {rate:,.0f} records a second and process ({args.workers})")
        print(*encoded.summary(), sep="\n")


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
