"""Compare the cost of encoding between two versions of the code, and between one machine and two.

    git worktree add /tmp/older 2b90f59 && python run/dev/measure_encoding.py --older /tmp/older

With --older: run/train.py --dry_run of both checkouts in turns, with one process, on records of text and images; the
processor time of a first start, without that of a second one, for which all is encoded. Then run/encode.py on one core,
and as two machines with a core each and one cache: seconds, which mean something on two idle cores alone; and of each
process the processor time and the shards that it encoded. The busier one's processor time is what two machines take.
"""

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure_preflight import records
from PIL import Image

from llava_ds.tiny import WEIGHTS_PATH

ROOT = Path(__file__).parents[2]
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
IMAGES = 200


def main() -> None:
    """Print a line a measurement, and the ratios at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--older", help="checkout of an older commit")
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--shared_records", type=int, default=1_000_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = prepare(folder, max(args.records, args.shared_records))
        if args.older:
            compare_versions(folder, Path(args.older).resolve(), flags, args.records, args.pairs)
        compare_machines(folder, flags, args.shared_records)


def prepare(folder: Path, number: int) -> list[str]:
    """Write images, and records of which every second one has one. Returns the flags of a model."""
    rng, lines = random.Random(0), []
    for i in range(IMAGES):
        Image.new("RGB", (rng.randint(60, 640), rng.randint(60, 640)), (i, 0, 0)).save(folder / f"{i}.png")
    for i, record in enumerate(records(number)):
        if i % 2:
            record["image"] = f"{i % IMAGES}.png"
            record["conversations"][0]["value"] = "<image>\n" + record["conversations"][0]["value"]
        lines.append(json.dumps(record))
    (folder / "all.jsonl").write_text("\n".join(lines))
    return ["--model_name_or_path", str(WEIGHTS_PATH / "llama"), "--vision_tower", str(WEIGHTS_PATH / "clip")]


def compare_versions(folder: Path, older: Path, flags: list[str], number: int, pairs: int) -> None:
    """Time both checkouts in turns."""
    data = folder / "part.jsonl"
    with (folder / "all.jsonl").open() as lines:
        data.write_text("".join(line for line, _ in zip(lines, range(number))))
    found = []
    for pair in range(pairs):
        costs = {}
        for which, root in (("older", older), ("this", ROOT)):
            cache = folder / f"cache-{which}-{pair}"
            command = dry_run(root, flags, data, folder, cache)
            first, second = cpu_time(command, root), cpu_time(command, root)
            costs[which] = (first - second) / number * 1e6
        found.append(costs["this"] / costs["older"])
        print(f"microseconds a record: older {costs['older']:.1f}, this {costs['this']:.1f}, ratio {found[-1]:.3f}")
    print(f"processor time of this version by the older one's, median of {pairs} pairs: {statistics.median(found):.3f}")


def dry_run(root: Path, flags: list[str], data: Path, images: Path, cache: Path) -> list[str]:
    """The command of a dry run, whose cost but for encoding is the same at every start."""
    run = [sys.executable, str(root / "run" / "train.py"), *flags, "--data_path", str(data)]
    run += ["--deepspeed_config", str(root / "ds_configs" / "zero2.json"), "--image_folder", str(images)]
    run += ["--cache_dir", str(cache), "--preprocessing_num_workers", "1", "--dry_run", "True"]
    return [*run, "--output_dir", str(cache / "out"), "--max_steps", "2", "--version", "v1"]


def cpu_time(command: list[str], root: Path) -> float:
    """Run a command with the package of a checkout. Returns its processor time in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = {**os.environ, "PYTHONPATH": str(root), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def compare_machines(folder: Path, flags: list[str], number: int) -> None:
    """Time run/encode.py on one core and on two with one process each."""
    data, seconds, busiest, prints = folder / "all.jsonl", {1: [], 2: []}, {1: [], 2: []}, set()
    for machines in (1, 2, 2, 1):
        cache = folder / f"shared-{machines}-{len(seconds[machines])}"
        command = [sys.executable, "-c", COUNTED, str(ROOT / "run" / "encode.py"), *flags, "--data_path", str(data)]
        command += ["--image_folder", str(folder), "--cache_dir", str(cache), "--preprocessing_num_workers", "1"]
        started = time.perf_counter()
        running = [
            subprocess.Popen(
                ["taskset", "-c", str(core), *command],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
            for core in range(machines)
        ]
        outputs = [process.communicate()[0] for process in running]
        seconds[machines].append(time.perf_counter() - started)
        prints |= {output.rpartition("fingerprint ")[2].split()[0] for output in outputs}
        used = [output.rpartition("used ")[2].split() for output in outputs]
        busiest[machines].append(max(float(cpu) for cpu, _ in used))
        shares = "; ".join(f"{float(cpu):.1f} s of processor time, {shards} shards" for cpu, shards in used)
        print(f"{number:,} records, {machines} machines: {seconds[machines][-1]:.1f} s ({shares})", flush=True)
    assert len(prints) == 1, prints
    for what, found in (("seconds", seconds), ("the busiest process's processor time", busiest)):
        print(f"by {what} two machines are {sum(found[1]) / sum(found[2]):.2f} times as fast as one; one fingerprint")


if __name__ == "__main__":
    main()
