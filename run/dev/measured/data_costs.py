"""Measure the costs of data preparation: encoding and packing."""

import collections
import itertools
import json
import math
import os
import random
import tempfile
import time
from functools import partial
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from benchmark.length_mix import FINETUNE, length_mix

from llava_ds.data import packing as packs
from llava_ds.data.dataset import ALONE, DataSpec, PreflightOptions, open_encoded
from llava_ds.data.encode import EncodingOptions
from llava_ds.data.sample_order import SampleOrder, shards_in_order
from llava_ds.data.sources import SourceOptions, open_sources
from llava_ds.data.step_plan import Packing
from llava_ds.geometry import ImageOptions
from llava_ds.tiny import WEIGHTS_PATH
from llava_ds.tokenizer import open_tokenizer

WORDS = (
    "the a of image cat dog red blue table chair person running stands near with holding large small green car street "
    "building sky water tree why what where how many there is are visible in describe scene answer using single word"
)


def write_records(folder: Path, number: int) -> Path:
    """Write LLaVA records, always the same: one to three turns, about 600 characters each."""
    rng, words = random.Random(0), WORDS.split()
    with (folder / "data.jsonl").open("w") as file:
        for i in range(number):
            turns = []
            for _ in range(rng.choice([1, 1, 2, 2, 3])):
                for role, longest in (("human", 25), ("gpt", 60)):
                    text = " ".join(rng.choices(words, k=rng.randint(5, longest))).capitalize() + "."
                    turns.append({"from": role, "value": text})
            file.write(json.dumps({"id": str(i), "conversations": turns}) + "\n")
    return folder / "data.jsonl"


def preflight(num_records: int = 100_000, workers: int = 1, tokenizer: str = "", stream: bool = False) -> None:
    """Measure the encoding of text records: records per second per process, in a first and a second run.

    --stream: seconds until the records are counted, the first step of 128 samples is encoded, and all are encoded.
    """
    with tempfile.TemporaryDirectory() as name:
        data = write_records(Path(name), num_records)
        given = (
            open_sources(str(data), SourceOptions(cache_dir=name, image_folder=name)),
            open_tokenizer(tokenizer or str(WEIGHTS_PATH / "llama")),
            EncodingOptions("v1", 2048),
            ImageOptions(336, 14, (0.5, 0.5, 0.5)),
            PreflightOptions(name, num_workers=workers),
        )
        started = time.perf_counter()
        if stream:
            from llava_ds.extensions.streaming.streamed_dataset import streamed

            encoded = streamed(DataSpec.of(*given), partial(shards_in_order, seed=0, epoch=0), ALONE)
            marks = [time.perf_counter()]
            order = SampleOrder(len(encoded), 128, 0, "shards", encoded.lengths_for("shards"), shuffled_together=4)
            for wait in (lambda: encoded.wait_for(next(order.steps())), lambda: encoded.encoded(ALONE)):
                wait()
                marks.append(time.perf_counter())
            counted, first, whole = (mark - started for mark in marks)
            print(f"{len(encoded):,} records: counted after {counted:.1f} s, ", end="")
            print(f"the first step's encoded after {first:.1f} s, all after {whole:.1f} s")
            return
        for run in ("first", "second"):
            encoded = open_encoded(*given)
            seconds, started = time.perf_counter() - started, time.perf_counter()
            rate = len(encoded) / seconds / workers
            print(f"{run} run: {seconds:.2f} s, {rate:,.0f} records per second per process ({workers})")
        print(*encoded.summary(), sep="\n")


def fill_and_balance(
    steps: list[list[int]], lengths: list[int], dp: int, max_tokens: int, pair_cost: float
) -> tuple[float, float, float]:
    """Return fill, its arithmetic upper bound, and balance of some steps."""
    tokens = packed = needed = work = slowest = 0
    for samples in steps:
        own = [lengths[i] for i in samples]
        plan = packs.plan_by_tokens(samples, own, dp, max_tokens, [int(n + pair_cost * n**2) for n in own])
        costs = [[sum(lengths[i] + pair_cost * lengths[i] ** 2 for i in micro) for micro in rank] for rank in plan]
        tokens += sum(own)
        packed += dp * len(plan[0])
        needed += dp * math.ceil(sum(own) / (dp * max_tokens))
        work += sum(map(sum, costs)) / dp
        slowest += sum(max(together) for together in zip(*costs))
    return tokens / (packed * max_tokens), tokens / (needed * max_tokens), work / slowest


def packing(
    max_tokens: int = 8192,
    pair_cost: float = 2e-5,
    num_samples: int = 665_000,
    num_steps: int = 100,
    plain: bool = False,
) -> None:
    """Measure fill and balance of packs, and the cost of planning, on LLaVA-1.5's stage 2 length mix in random order.

    fill: tokens / (packs * bound). balance: mean rank's work / slowest rank's, per round, in tokens. most: the fill if
    packs could be filled to the last token, given the sizes of the steps. --plain: without the local search that
    balances packs. --pair_cost: a 7B model's.
    """
    if plain:
        packs._balance = lambda *_: None
    lengths = length_mix(FINETUNE, num_samples, seed=0).tokens
    print("batch  ranks    fill   most by arithmetic   balance")
    for batch_size, dp in itertools.product((128, 256, 512, 1024, 2048), (1, 2, 4, 8, 64)):
        steps = list(itertools.islice(SampleOrder(num_samples, batch_size, seed=0).steps(), num_steps))
        fill, most, balance = fill_and_balance(steps, lengths, dp, max_tokens, pair_cost)
        print(f"{batch_size:5} {dp:6} {fill:7.3f} {most:12.3f} {balance:17.4f}", flush=True)
    print("\nbatch  ranks   order, us/sample    planning, us/sample     (processor time, all samples)")
    for batch_size, dp in itertools.product((128, 1024), (1, 8)):
        order, times = SampleOrder(num_samples, batch_size, seed=0), [time.process_time()]
        layout = Packing(dp, batch_size // dp, 1, max_tokens, pair_cost=pair_cost)
        for steps in (order.steps(), layout.steps(order, lengths, 0)):
            collections.deque(itertools.islice(steps, order.steps_per_epoch), maxlen=0)
            times.append(time.process_time())
        alone, both = (1e6 * (end - begin) / num_samples for begin, end in itertools.pairwise(times))
        print(f"{batch_size:5} {dp:6} {alone:12.2f} {both - alone:22.2f}", flush=True)
