"""Compare training speed with transformers' Trainer in one run: python run/dev/bench.py

Takes about an hour on two idle cores; --quick takes a few minutes at toy sizes, with meaningless ratios. Writes
bench.json with all measurements and table.md to --output_dir.
"""

import sys

from llava_ds.runtime.command import Parser, begin, exit_with, new_folder

if __name__ == "__main__":
    begin("run/dev/bench.py")


import argparse
import datetime
import importlib.util
import json
import os
import platform
import re
import subprocess
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from benchmark import comparison, preset
from benchmark.comparison import PADDED, RECOMPUTED
from benchmark.decoding_speed import measure_decoding
from benchmark.loss_cost import measure_output_loss
from benchmark.table import Row, Spread, markdown
from benchmark.training import ROOT, TRAIN, Case, launch, run_case, sides_of, work_of_steps, write_case
from benchmark.workload import Shape

from llava_ds.config.bounds import Count, number
from llava_ds.constants import ConfigError
from llava_ds.runtime.ranks import quiet_libraries

RANKS = 2
WARM_UP = 1  # step

# LLaVA-1.5 with a ninth of its lengths (64 features per image). Attention, tower and padding have about the same shares
# of the work as at 7B. Deep and narrow, because some tensors are saved only in the last layer. The vocabularies give
# the output layer the share that it has in a 7B model with 32k ids, and in a 0.5B model with 152k ids.
SMALL_VOCABULARY = Shape(
    "small vocabulary", hidden=256, intermediate=688, layers=12, heads=4, vocab=768,
    tower_hidden=128, tower_layers=3, tower_heads=2, patches=8, patch_size=8,
)  # fmt: skip
LARGE_VOCABULARY = replace(SMALL_VOCABULARY, name="large vocabulary", vocab=16_384)
# The frozen tower computes 0.27 and 0.73 of the language model's work per image token, as in Qwen2.5-VL-3B (0.30) and
# SmolVLM2-2.2B (0.76); the output layer's share is about the same as there.
QWEN2_5_VL = Shape(
    "Qwen2.5-VL", family="qwen2_5_vl", hidden=256, intermediate=1408, layers=10, heads=8, key_heads=2, vocab=5_120,
    tower_hidden=160, tower_mlp=432, tower_layers=8, tower_heads=4,
)  # fmt: skip
SMOLVLM = Shape(
    "SmolVLM", family="smolvlm", hidden=256, intermediate=1024, layers=10, heads=8, key_heads=8, vocab=2_560,
    tower_hidden=192, tower_mlp=720, tower_layers=6, tower_heads=4,
)  # fmt: skip
QUICK = {
    "hidden": 64, "intermediate": 176, "layers": 2, "heads": 2, "tower_hidden": 32, "tower_heads": 2, "vocab": 512,
}  # fmt: skip
QUICK_READY = {
    **QUICK, "key_heads": 2, "tower_mlp": 64, "tower_layers": 2,
}  # fmt: skip


# Minimum speed-up over the Trainer, without and with recomputation.
TARGETS = {
    ("stage2", SMALL_VOCABULARY.name): (1.8, 2.2),
    ("stage2", LARGE_VOCABULARY.name): (2.2, 2.5),
    ("stage1", SMALL_VOCABULARY.name): (1.1, 1.1),
    ("stage1", LARGE_VOCABULARY.name): (1.5, 1.5),
    ("ready", QWEN2_5_VL.name): (2.0,),
    ("ready", SMOLVLM.name): (2.0,),
}


@dataclass(frozen=True)
class Part:
    """The result of one part of the bench: table rows and JSON values."""

    rows: list[Row]
    measured: object


def main(argv: list[str]) -> None:
    own = read_flags(argv)
    quiet_libraries()
    started = datetime.datetime.now(datetime.timezone.utc)
    folder = Path(own.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    parts = {}
    for name in own.only:
        print(f"{name} ...", flush=True)
        parts[name] = {**PARTS, **PRESETS}[name](name, own, folder / name)
    rows = [row for part in parts.values() for row in part.rows]
    measured = {
        "machine": machine(),
        "started": started.isoformat(timespec="seconds"),
        "command": ["run/dev/bench.py", *argv],
        "warm_up_steps": WARM_UP,
        **{name: part.measured for name, part in parts.items()},
        "table": [{"what": row.what, **asdict(row.values), "asked": row.asked} for row in rows],
    }
    (folder / "bench.json").write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    (folder / "table.md").write_text(markdown(rows) + "\n", encoding="utf-8")
    print(markdown(rows))
    print(f"all measurements: {folder / 'bench.json'}")


def read_flags(argv: list[str]) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = Parser(description=__doc__)
    parser.add_argument("--only", help=f"parts to run, separated by commas: {', '.join(PARTS)} (default: all)")
    parser.add_argument(
        "--rounds", type=number(Count), help="runs per side, or timed steps with --preset (default: 3, with --quick 1)"
    )
    parser.add_argument("--quick", action="store_true", help="toy sizes: a functional test, not a speed test")
    parser.add_argument(
        "--grouped",
        action="store_true",
        help="stage 2 in the order of LLaVA's sampler (less padding); default: random order, like the Trainer",
    )
    parser.add_argument(
        "--preset",
        choices=list(PRESETS),
        help="run LLaVA-1.5-7B in both stages on one H200 instead, with random weights",
    )
    parser.add_argument(
        "--train_flags", default="", help="with --preset: additional flags of run/train.py, in one argument"
    )
    parser.add_argument("--output_dir", type=new_folder, default="output/bench", help="default: %(default)s")
    own = parser.parse_args(argv)
    own.only = list(PARTS) if own.only is None else own.only.split(",")
    if unknown := [name for name in own.only if name not in PARTS]:
        raise ConfigError(f"--only has unknown parts {', '.join(unknown)}: choose from {', '.join(PARTS)}")
    if own.preset is not None:
        own.only = [own.preset]
    own.rounds = (1 if own.quick else 3) if own.rounds is None else own.rounds
    return own


def compare_training(stage: str, own: argparse.Namespace, folder: Path) -> Part:
    """Compare run/train.py with the Trainer, at both shapes."""
    if importlib.util.find_spec("accelerate") is None:
        raise ConfigError(
            "transformers' Trainer needs accelerate: install the extra llava_ds[bench], or leave stages out"
        )
    rows, measured = [], {}
    of_cpu = stage == "ready"
    shapes, quick = (SMALL_VOCABULARY, LARGE_VOCABULARY), QUICK
    if stage == "ready":
        shapes, quick = (QWEN2_5_VL, SMOLVLM), QUICK_READY
    for shape in shapes:
        case = case_of(stage, replace(shape, **quick) if own.quick else shape, own)
        case_folder = folder / shape.name.replace(" ", "-")
        flags = write_case(case, case_folder, RANKS)
        work = work_of_steps(flags, RANKS)
        padded = sum(w.padded_tokens for w in work)
        share = case.shape.output_share(padded / (case.num_batches(RANKS) * case.batch_size))
        title = f"{stage}, {shape.name}, output layer {share:.0%}"
        print(f"{title}: {sum(w.tokens for w in work) / padded:.2f} of the padded tokens are useful", flush=True)
        runs = run_case(case, flags, case_folder, RANKS, own.rounds)
        differences = comparison.refuse_different(runs, title)
        for side, least in zip((PADDED, RECOMPUTED), TARGETS[stage, shape.name]):
            values = Spread.of(comparison.ratios(runs, side, WARM_UP, of_cpu))
            rows.append(Row(f"{title}: speed-up over {side}{' (processor time)' * of_cpu}", values, asked=least))
        useful = [w.useful_flops for w in work]
        for side in sides_of(case):
            values = Spread.of(comparison.fractions_of_peak(runs, side, useful, RANKS, WARM_UP))
            rows.append(Row(f"{title}: MFU of {side}", values, "{:.1%}"))
        measured[title] = {
            "case": asdict(case),
            "useful_share_of_padded": sum(w.tokens for w in work) / padded,
            "output_layer_share": share,
            "work": [asdict(w) for w in work],
            "largest_differences": differences,
            "runs": [asdict(run) for run in runs],
        }
    return Part(rows, measured)


def measure_loop(name: str, own: argparse.Namespace, folder: Path) -> Part:
    """Measure the overhead of run/train.py's loop over the bare engine, in stage 2."""
    shape = replace(SMALL_VOCABULARY, **QUICK) if own.quick else SMALL_VOCABULARY
    case = replace(case_of("stage2", shape, own), accumulation=1, num_steps=3)
    flags = write_case(case, folder, RANKS)
    report, more = folder / "loop.json", ["--tokens_per_micro_batch", "4096", "--output_dir", str(folder / "output")]
    launch(RANKS, "loop", report, [str(TRAIN), *flags, *more], folder / "log.txt")
    measured = json.loads(report.read_text())
    values = Spread(measured["overhead"], measured["overhead_least"], measured["overhead_most"])
    what = "overhead of the loop over the bare engine (target: at most 2 %)"
    return Part([Row(what, values, "{:.2%}")], measured)


def measure_loss(name: str, own: argparse.Namespace, folder: Path) -> Part:
    """Compare the loss over supervised rows with the loss over all rows, at 32,000 ids, in this process."""
    torch.set_num_threads(1)
    rows, measured = [], []
    for trains in (True, False):
        found = measure_output_loss(trains=trains, repeats=own.rounds + 2, **({"num_tokens": 256} if own.quick else {}))
        what = f"loss over supervised rows, output layer {'trained' if trains else 'frozen'}"
        pairs = zip(found["all_seconds"]["full"], found["all_seconds"]["ours"])
        rows.append(Row(f"{what}: times faster", Spread.of([full / ours for full, ours in pairs]), asked=6.0))
        rows.append(Row(f"{what}: memory reduction factor", Spread.of([found["times_less_memory"]]), asked=6.0))
        measured.append(found)
    return Part(rows, measured)


def measure_loader(name: str, own: argparse.Namespace, folder: Path) -> Part:
    """Measure decoded images per second per core of LLaVA's, the exact and the fast path, on new images per round."""
    size = {"num_images": 3, "seconds": 1.0} if own.quick else {"num_images": 12, "seconds": 30.0}
    measured = [measure_decoding(**size, seed=number) for number in range(own.rounds)]
    rows = []
    for ratio in ("pad", "square"):
        columns = {name: Spread.of([found[ratio][name] for found in measured]) for name in measured[0][ratio]}
        for way, label in (("llava", "LLaVA's path"), ("ours", "exact"), ("fast", "--fast_image_decoding")):
            rows.append(Row(f"images/s per core, {ratio}: {label}", columns[f"{way}_per_s"], "{:.0f}"))
        rows.append(Row(f"{ratio}: --fast_image_decoding over LLaVA's path", columns["fast_over_llava"], asked=2.5))
        rows.append(Row(f"{ratio}: its largest error, of 255 (target: at most 2)", columns["max_error"], "{:.0f}"))
    return Part(rows, measured)


def run_preset(name: str, own: argparse.Namespace, folder: Path) -> Part:
    """Run LLaVA-1.5-7B on one GPU, both stages; without a GPU, a toy model."""
    lines = [] if torch.cuda.is_available() else list(preset.NOT_MEASURED)
    print(*lines, sep="\n")
    rows, measured = [], {"notes": lines}
    for stage in preset.STAGES:
        num_steps = preset.WARM_UP + own.rounds + 1
        found = preset.run_stage(stage, folder, num_steps, own.train_flags.split())
        rows += preset.rows_of(found)
        measured[stage.name] = found
    return Part(rows, measured)


def case_of(stage: str, shape: Shape, own: argparse.Namespace) -> Case:
    """Return a stage's case with LLaVA-1.5's global batch size: 256 samples per step in stage 1, 128 in stage 2."""
    captions = stage == "stage1"
    return Case(
        name=stage,
        shape=shape,
        captions=captions,
        batch_size=32 if captions else 16,
        accumulation=1 if own.quick else 8 // RANKS,
        num_steps=WARM_UP + (2 if own.quick else 3),
        tokens_per_micro_batch=4096,
        grouped=own.grouped and not captions,
    )


def machine() -> dict[str, object]:
    """Describe the machine and the versions used."""
    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    cpu = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "commit": git.stdout.strip() or None,
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "deepspeed", "transformers")},
        "cpu": cpu[1] if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "ranks": RANKS,
        "threads_per_rank": 1,
        "load_average_at_start": os.getloadavg(),
    }


# Part names for --only, with the function that measures each.
PARTS = {
    "stage2": compare_training,
    "stage1": compare_training,
    "ready": compare_training,
    "loader": measure_loader,
    "loop": measure_loop,
    "loss": measure_loss,
}
PRESETS = {"gpu-7b": run_preset}


if __name__ == "__main__":
    exit_with(partial(main, sys.argv[1:]), "run/dev/bench.py")
