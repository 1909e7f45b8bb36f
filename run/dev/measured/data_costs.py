"""Costs of preparing data: encoding, the check of image files, packing."""

import collections
import itertools
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from unittest import mock

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
from benchmark.length_mix import FINETUNE, PRETRAIN, length_mix
from PIL import Image

from llava_ds.data import packing as packs
from llava_ds.data import preflight as preflights
from llava_ds.data import seen_files as stamps
from llava_ds.data.dataset import ALONE, DataSpec, PreflightOptions, open_encoded
from llava_ds.data.encode import EncodingOptions
from llava_ds.data.sample_order import SampleOrder, shards_in_order
from llava_ds.data.sources import SourceOptions, open_sources
from llava_ds.data.step_plan import Packing
from llava_ds.geometry import ImageOptions
from llava_ds.tiny import WEIGHTS_PATH
from llava_ds.tokenizer import open_tokenizer

ROOT = Path(__file__).parents[3]
WORDS = (
    "the a of image cat dog red blue table chair person running stands near with holding large small green car street "
    "building sky water tree why what where how many there is are visible in describe scene answer using single word"
)
# run/encode.py, which ends with a line: processor time, shards encoded
COUNTED = """
import atexit, os, runpy, sys
from llava_ds.data import shards
encode, taken = shards._encode, []
shards._encode = lambda work, shard, *rest: (taken.append(shard), encode(work, shard, *rest))
atexit.register(lambda: print("used", sum(os.times()[:4]), len(taken)))
sys.argv[:] = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def records(number: int):
    """LLaVA records, the same ones every time: one to three turns, some 600 characters each."""
    rng, words = random.Random(0), WORDS.split()
    for i in range(number):
        turns = []
        for _ in range(rng.choice([1, 1, 2, 2, 3])):
            for role, longest in (("human", 25), ("gpt", 60)):
                text = " ".join(rng.choices(words, k=rng.randint(5, longest))).capitalize() + "."
                turns.append({"from": role, "value": text})
        yield {"id": str(i), "conversations": turns}


def write_records(folder: Path, number: int, sides: list[int], every: int) -> Path:
    """Write records, and images of noise as wide, of which every so many-th record has one."""
    rng, lines = np.random.default_rng(0), []
    for i, side in enumerate(sides):
        Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(folder / f"{i}.jpg")
    for i, record in enumerate(records(number)):
        if sides and i % every == 0:
            record["image"] = f"{i // every % len(sides)}.jpg"
            record["conversations"][0]["value"] = "<image>\n" + record["conversations"][0]["value"]
        lines.append(json.dumps(record))
    (folder / "data.jsonl").write_text("\n".join(lines))
    return folder / "data.jsonl"


def options(folder: Path, data: Path, workers: int, tokenizer: str = "") -> tuple:
    """Arguments of open_encoded."""
    return (
        open_sources(str(data), SourceOptions(cache_dir=str(folder), image_folder=str(folder))),
        open_tokenizer(tokenizer or str(WEIGHTS_PATH / "llama")),
        EncodingOptions("v1", 2048),
        ImageOptions(336, 14, (0.5, 0.5, 0.5)),
        PreflightOptions(str(folder), num_workers=workers),
    )


def preflight(num_records: int = 100_000, workers: int = 1, tokenizer: str = "", stream: bool = False) -> None:
    """Encoding of text records: records a second and process, of the first run and of the second.

    --stream: seconds until the records are counted, the first step of 128 samples is encoded, and all are.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given = options(folder, write_records(folder, num_records, [], 1), workers, tokenizer)
        started = time.perf_counter()
        if stream:
            from llava_ds.extensions.streaming.dataset import streamed

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
            print(f"{run} run: {seconds:.2f} s, {rate:,.0f} records a second and process ({workers})")
        print(*encoded.summary(), sep="\n")


def seen_files(images: int = 40_000, side: int = 96, processes: int = len(os.sched_getaffinity(0))) -> None:
    """The check for changed image files: the hashes' part of a preflight, and what the next start takes.

    With the stamps as they were, and with all of them changed (as by a copy without times); by one process and by
    --processes: also the processor time for each image of the process that takes most. --side 96: files of 8 kB.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, spent, hashed = Path(name), [0.0], preflights.seen_files
        given = options(folder, write_records(folder, images, [side] * images, 1), 1)

        def timed(*arguments):
            started = time.perf_counter()
            found = hashed(*arguments)
            spent[0] += time.perf_counter() - started
            return found

        started = time.perf_counter()
        with mock.patch.object(preflights, "seen_files", timed):
            data = open_encoded(*given)
        print(
            f"preflight of {len(data):,} images: {time.perf_counter() - started:.2f} s, hashes {spent[0]:.2f} s of it"
        )
        for what, each in itertools.product(("as they were", "all changed"), (1, processes)):
            if what == "all changed":
                for path in folder.glob("*.jpg"):
                    os.utime(path, ns=(each, each))
            started, before = time.perf_counter(), os.times()
            refs = preflights.media_of_text
            assert not stamps.changed_files(data.table, given[3], refs, most_processes=each)
            used = [after - earlier for after, earlier in zip(os.times(), before)]
            most = max(used[0] + used[1], (used[2] + used[3]) / each) / len(data) * 1e6
            print(
                f"the next start, stamps {what}, up to {each} processes: {time.perf_counter() - started:.2f} s, ",
                end="",
            )
            print(f"{most:.2f} us of processor time an image")


def encoding(num_records: int = 1_000_000) -> None:
    """run/encode.py on one core, and as two machines with a core each and one cache; every second record has an image.

    Seconds, which mean something on two idle cores alone; and of each process the processor time and the shards that it
    encoded. The busier one's processor time is what two machines take.
    """
    seconds, busiest, prints = {1: [], 2: []}, {1: [], 2: []}, set()
    with tempfile.TemporaryDirectory() as name:
        folder, rng = Path(name), random.Random(0)
        data = write_records(folder, num_records, [rng.randint(60, 640) for _ in range(200)], 2)
        command = [sys.executable, "-c", COUNTED, str(ROOT / "run" / "encode.py"), "--data_path", str(data)]
        command += ["--model_name_or_path", str(WEIGHTS_PATH / "llama"), "--vision_tower", str(WEIGHTS_PATH / "clip")]
        command += ["--image_folder", str(folder), "--preprocessing_num_workers", "1", "--cache_dir"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        for machines in (1, 2, 2, 1):
            cache, started = str(folder / f"{machines}-{len(seconds[machines])}"), time.perf_counter()
            pinned = [["taskset", "-c", str(core), *command, cache] for core in range(machines)]
            running = [subprocess.Popen(one, stdout=subprocess.PIPE, text=True, env=environment) for one in pinned]
            outputs = [process.communicate()[0] for process in running]
            seconds[machines].append(time.perf_counter() - started)
            prints |= {output.rpartition("fingerprint ")[2].split()[0] for output in outputs}
            used = [output.rpartition("used ")[2].split() for output in outputs]
            busiest[machines].append(max(float(cpu) for cpu, _ in used))
            shares = "; ".join(f"{float(cpu):.1f} s of processor time, {shards} shards" for cpu, shards in used)
            print(f"{num_records:,} records, {machines} machines: {seconds[machines][-1]:.1f} s ({shares})", flush=True)
    assert len(prints) == 1, prints
    for what, found in (("seconds", seconds), ("the busiest process's processor time", busiest)):
        print(f"by {what} two machines are {sum(found[1]) / sum(found[2]):.2f} times as fast as one; one fingerprint")


def fill_and_balance(
    steps: list[list[int]], lengths: list[int], dp: int, max_tokens: int, pair_cost: float
) -> tuple[float, float, float]:
    """fill, its least upper bound by arithmetic, and balance of some steps."""
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


def padding(num_samples: int) -> None:
    """Print the useful share of LLaVA-1.5's batches on 8 ranks: stage 2 in its sampler's order, stage 1 at random."""
    print("stage  batch   mean length   useful in padded batches   where ranks wait for the slowest")
    for stage, parts, size in ((2, FINETUNE, 16), (1, PRETRAIN, 32)):
        mix = length_mix(parts, num_samples, seed=0)
        signed = np.where(mix.images > 0, mix.tokens, -mix.tokens)
        order = SampleOrder(num_samples, 8 * size, 0, "modality" if stage == 2 else "random", signed, size)
        steps = np.array(list(itertools.islice(order.steps(), num_samples // (8 * size))))
        each = mix.tokens[steps].reshape(len(steps), 8, size)
        longest = each.max(2)
        useful, with_waiting = each.sum() / (size * longest.sum()), each.sum() / (8 * size * longest.max(1).sum())
        print(f"{stage:5} {8 * size:6} {mix.tokens.mean():13.0f} {useful:26.3f} {with_waiting:34.3f}", flush=True)


def packing(
    max_tokens: int = 8192,
    pair_cost: float = 2e-5,
    num_samples: int = 665_000,
    num_steps: int = 100,
    plain: bool = False,
    padded: bool = False,
) -> None:
    """Fill and balance of packs, and the cost of planning, on the length mix of LLaVA-1.5's stage 2 in random order.

    fill: tokens / (packs * bound). balance: the mean rank's work / the slowest one's, round by round, in tokens.
    most: the fill if packs could be filled to the last token, by the sizes of the steps alone. --plain: without the
    local search that evens packs out. --padded: the padding of LLaVA's recipes instead. --pair_cost: of a 7B model.
    """
    if padded:
        return padding(num_samples)
    if plain:
        packs._even = lambda *_: None
    lengths = length_mix(FINETUNE, num_samples, seed=0).tokens
    print("batch  ranks    fill   most by arithmetic   balance")
    for batch_size, dp in itertools.product((128, 256, 512, 1024, 2048), (1, 2, 4, 8, 64)):
        steps = list(itertools.islice(SampleOrder(num_samples, batch_size, seed=0).steps(), num_steps))
        fill, most, balance = fill_and_balance(steps, lengths, dp, max_tokens, pair_cost)
        print(f"{batch_size:5} {dp:6} {fill:7.3f} {most:12.3f} {balance:17.4f}", flush=True)
    print("\nbatch  ranks   order, us a sample   planning, us a sample   (processor time, all samples)")
    for batch_size, dp in itertools.product((128, 1024), (1, 8)):
        order, times = SampleOrder(num_samples, batch_size, seed=0), [time.process_time()]
        layout = Packing(dp, batch_size // dp, 1, max_tokens, pair_cost=pair_cost)
        for steps in (order.steps(), layout.steps(order, lengths, 0)):
            collections.deque(itertools.islice(steps, order.steps_per_epoch), maxlen=0)
            times.append(time.process_time())
        alone, both = (1e6 * (end - begin) / num_samples for begin, end in itertools.pairwise(times))
        print(f"{batch_size:5} {dp:6} {alone:12.2f} {both - alone:22.2f}", flush=True)
