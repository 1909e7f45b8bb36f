"""Estimate memory and speed of training: python run/estimate.py --model llava-v1.5-7b --num_gpus 8 --gpu h100 --speed

Takes the flags of run/train.py (also recipes); instead of folders, a named size or a number of parameters. No weights
are read and no GPU is needed. GB are 10**9 bytes. --deepspeed_config auto shows training's choice, --speed the time of
a step, tokens/s, MFU and their limits.
"""

import argparse
import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from llava_ds.config.bounds import AtLeastOne, Count, Part, PartAboveZero, Positive, Rate, number
from llava_ds.constants import ConfigError
from llava_ds.extensions.planning.named_models import NAMED, SUPERVISED
from llava_ds.runtime.command import Parser, begin, exit_with
from llava_ds.runtime.gpus import GPUS, Gpu, gpu_named

if TYPE_CHECKING:
    from llava_ds.config.arguments import Arguments

MOST_GPUS = 100_000
SPEED_FLAGS = {
    "mean_sample_tokens": (AtLeastOne, "mean length of a sample with its images (default: --model_max_length)"),
    "tiles_per_sample": (Rate, "mean number of image tiles per sample (default: 1)"),
    "useful_fraction": (PartAboveZero, "share of the computed tokens that are not padding (default: 1, as in packs)"),
    "matmul_share": (PartAboveZero, "share of the GPU's peak that matrix products reach (default: depends on the GPU)"),
    "network_gbit": (Positive, "Gbit/s of all network cards of a node (default: as in the vendor's node, else 100)"),
    "overlap": (Part, "share of compute that can hide traffic, if DeepSpeed overlaps them (default: 0.8)"),
}


def parse(argv: list[str]) -> "tuple[argparse.Namespace, Arguments]":
    """Parse this script's flags and training's. Raises ConfigError."""
    from llava_ds.config.parsing import parse_arguments  # Ctrl-C has to work during the import

    parser = Parser(description=__doc__)
    add_flags(parser.add_argument)
    own, rest = parser.parse_known_args(argv)
    args, _ = parse_arguments(rest, to_train=False, own_flags=[f"--{name}" for name in vars(own)])
    if found := problems(own, args):
        raise ConfigError("\n".join(found))
    return own, args


def add_flags(add: Callable[..., object]) -> None:
    """Add the flags of this script that training does not have."""
    add(
        "--model",
        metavar="SIZE",
        help=f"{', '.join(NAMED)}, or a number of parameters like 13e9, all trained; else --model_name_or_path and "
        "--vision_tower name folders; with neither of these, the tiny model",
    )
    add("--num_gpus", type=number(Count), default=8, help="ranks that train together (default: %(default)s)")
    add("--gpus_per_node", type=number(Count), default=8, help="for a node's memory and links (default: %(default)s)")
    add("--gpu_memory", type=number(Positive), metavar="GB", help="memory of each GPU: say if the run fits, and advise")
    add(
        "--gpu",
        metavar="NAME",
        help=f"{', '.join(gpu.name for gpu in GPUS)}: for --speed, and instead of --gpu_memory",
    )
    add(
        "--zero_stage",
        type=int,
        choices=(0, 1, 2, 3),
        help="stage of the estimate, without --deepspeed_config (default: 2 for the projector alone and for "
        "upcycled experts, else 3)",
    )
    add(
        "--supervised_fraction",
        type=number(Part),
        default=SUPERVISED,
        help="fraction of the tokens that are supervised, and so need logits (default: %(default)s)",
    )
    add("--json", action="store_true", help="print one JSON object, in bytes, instead of the table")
    add("--speed", action="store_true", help="also estimate the time of a step, by a roofline; needs --gpu")
    for name, (kind, text) in SPEED_FLAGS.items():
        add(f"--{name}", type=number(kind), help=f"for --speed: {text}")


def problems(own: argparse.Namespace, args: "Arguments") -> list[str]:
    """Return a line for every problem with the flags."""
    from llava_ds.config.rules import CHOOSE_DS_CONFIG

    model, training = args.model, args.training
    has_folders = model.model_name_or_path is not None or model.vision_tower is not None
    return [
        message
        for is_wrong, message in (
            (own.num_gpus > MOST_GPUS, f"--num_gpus is {own.num_gpus}: give {MOST_GPUS:,} or fewer"),
            (own.speed and own.gpu is None, "--speed estimates a GPU's time: give --gpu"),
            *(
                (
                    not own.speed and getattr(own, name) is not None,
                    f"--{name} is for the estimate of time: give --speed",
                )
                for name in SPEED_FLAGS
            ),
            (
                own.model is not None and has_folders,
                "--model names a size, --model_name_or_path and --vision_tower name folders: give only one kind",
            ),
            (
                model.model_name_or_path is None and model.vision_tower is not None,
                "--vision_tower goes with --model_name_or_path: give both, or --model with a size",
            ),
            (
                own.zero_stage is not None and training.deepspeed_config is not None,
                "--zero_stage and --deepspeed_config both name a stage: give only one",
            ),
            (
                training.deepspeed_config == CHOOSE_DS_CONFIG and own.gpu_memory is None,
                "--deepspeed_config auto chooses what fits a GPU: give --gpu_memory",
            ),
        )
        if is_wrong
    ]


if __name__ == "__main__":
    begin("run/estimate.py", reads=parse, ends_without_reader=True)


import contextlib
import json
from functools import partial

from llava_ds.config.arguments import trains_projector_only
from llava_ds.config.recipes import DS_CONFIGS
from llava_ds.config.rules import CHOOSE_DS_CONFIG
from llava_ds.engine.ds_config.resolve import ResolvedConfig, axes_from, read_ds_config, resolve_ds_config
from llava_ds.extensions.planning.auto import Data, Devices, choose_ds_config, planned_run
from llava_ds.extensions.planning.drawing import drawing_lines, drawing_of
from llava_ds.extensions.planning.fit import GB, Run, advice, as_json, description, table
from llava_ds.extensions.planning.shapes import ModelShape, shape_named, shape_of_folders
from llava_ds.extensions.planning.speed import OVERLAP, Machine
from llava_ds.extensions.planning.speed_report import SpeedRun, load_of, speed_json, speed_lines, speed_table
from llava_ds.runtime.mesh import check_sizes
from llava_ds.runtime.ranks import quiet_libraries
from llava_ds.tiny import CLIP_PATH, LLAMA_PATH


def main(argv: list[str]) -> None:
    own, args = parse(argv)
    quiet_libraries()
    gpu = None if own.gpu is None else gpu_named(own.gpu)
    if own.gpu_memory is None and gpu is not None:
        own.gpu_memory = gpu.memory
    gpu_memory = None if own.gpu_memory is None else own.gpu_memory * GB
    devices = Devices(own.num_gpus, own.gpus_per_node, memory=gpu_memory)
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed prints when it is imported
        run, resolved = read_run(own, args, devices)
    speed = read_speed(own, run, resolved, gpu, gpu_memory) if own.speed else None
    drawing = drawing_of(run, resolved.args)
    seconds = None if drawing is None or speed is None else drawing.seconds(speed.load, speed.machine)
    if own.json:
        figures = as_json(run, gpu_memory) | ({} if speed is None else {"speed": speed_json(speed)})
        figures |= {} if drawing is None else {"drawing": {"bytes": drawing.memory(), "seconds": seconds}}
        print(json.dumps(figures, indent=1))
        return
    print(*description(run), *auto_lines(args, run, gpu_memory), *table(run, gpu_memory), sep="\n")
    if gpu_memory is not None:
        print(advice(run, gpu_memory))
    if drawing is not None:
        print(*drawing_lines(drawing, gpu_memory, seconds), sep="\n")
    if speed is not None:
        print("", *speed_table(speed), *speed_lines(speed), sep="\n")


def auto_lines(args: "Arguments", run: Run, gpu_memory: float | None) -> list[str]:
    """Return a line about the values that auto chooses; [] if no flag is auto."""
    names = ("tokens_per_micro_batch", "gradient_checkpointing")
    flags = ", ".join(f"--{name}" for name in names if getattr(args.training, name) == "auto")
    if not flags or run.batch is None:
        return []
    if gpu_memory is None and args.training.activation_memory_gb is None:
        return [f"auto ({flags}) depends on memory: give --gpu_memory; without it, memory is assumed to be enough"]
    tokens, recomputed = run.batch.num_tokens, run.batch.num_recomputed
    return [
        f"auto ({flags}), as estimated: {tokens:,} tokens per micro-batch, {recomputed} of "
        f"{run.shape.text.num_layers} layers are checkpointed"
    ]


def read_run(own: argparse.Namespace, args: "Arguments", devices: Devices) -> tuple[Run, ResolvedConfig]:
    """Return the run described by the flags, and its resolved flags and DeepSpeed JSON.

    Without --deepspeed_config, it uses this repository's zero3.json, by default in bf16.
    """
    raw = None
    if args.training.deepspeed_config != CHOOSE_DS_CONFIG:
        raw = read_ds_config(args.training.deepspeed_config or DS_CONFIGS / "zero3.json")
    args = axes_from(raw or {}, args)
    check_sizes(own.num_gpus, args.all_axes)
    if own.model is not None:
        shape = shape_named(own.model, args)
    else:
        if args.model.model_name_or_path is None:
            args = args.replaced(model_name_or_path=str(LLAMA_PATH), vision_tower=str(CLIP_PATH))
        shape = shape_of_folders(args)
    sizes = {axis.flag: axis.size for axis in args.all_axes if axis.divides_model}
    held = shape.tp * (len(shape.stages) or 1) * shape.ep
    if held != math.prod(sizes.values()):
        flags = ", ".join(f"--{flag} {size}" for flag, size in sizes.items() if size > 1)
        raise ConfigError(f"{flags} needs the model's layers: name a size or folders")
    if shape.text is None and "routerless_mlps" in args.broken:
        asked = (found for flags in args.own.values() for found in flags.features())
        name = next(name for name, _, breaks in asked if "routerless_mlps" in breaks)
        raise ConfigError(f"{name} needs the model's layers: name a size or folders")
    resolved = resolve(own, args, raw, shape, devices)
    longest = args.data.model_max_length
    # The data are not read, so assume that every sample has the maximum length.
    share = resolved.args.training.per_device_train_batch_size * longest
    return planned_run(shape, resolved, Data(longest, own.supervised_fraction, share), devices), resolved


def read_speed(own: argparse.Namespace, run: Run, resolved: ResolvedConfig, gpu: Gpu, gpu_memory: float) -> SpeedRun:
    """Return the work of a step and the machine's figures, for the speed estimate."""
    training, longest = resolved.args.training, resolved.args.data.model_max_length
    if own.mean_sample_tokens is not None and own.mean_sample_tokens > longest:
        raise ConfigError(
            f"--mean_sample_tokens is {own.mean_sample_tokens:g}, but samples are limited to --model_max_length "
            f"{longest}: raise that"
        )
    if gpu.tf32 is None and training.bf16:
        raise ConfigError(f"--gpu {gpu.name} has no bf16: give --fp16 True")
    load = load_of(
        run,
        resolved.args,
        supervised=own.supervised_fraction,
        sample_tokens=own.mean_sample_tokens or longest,
        tiles=1.0 if own.tiles_per_sample is None else own.tiles_per_sample,
        useful=own.useful_fraction or 1.0,
    )
    overlap = OVERLAP if own.overlap is None else own.overlap
    machine = Machine.of(gpu, own.matmul_share, own.network_gbit, overlap, bool(training.tf32))
    return SpeedRun(run, load, machine, gpu_memory)


def resolve(
    own: argparse.Namespace, args: "Arguments", raw: dict | None, shape: ModelShape, devices: Devices
) -> ResolvedConfig:
    """Return the DeepSpeed JSON as training would resolve it on these GPUs. raw: the JSON, None to choose one."""
    if raw is None:
        raw, line = choose_ds_config(DS_CONFIGS, shape, args, devices)
        print(line, file=sys.stderr)
    if args.training.deepspeed_config is None:
        needs_two = trains_projector_only(args.model) or (shape.text is not None and shape.text.expert_rows > 0)
        default_stage = 2 if needs_two else 3
        raw["zero_optimization"]["stage"] = default_stage if own.zero_stage is None else own.zero_stage
        if not {"bf16", "fp16"} & args.given:
            args = args.replaced(bf16=True)
    dp = own.num_gpus // args.ranks_per_sample
    machine = {"dp": dp, "device_type": "cuda", "is_local": False}
    return resolve_ds_config(raw, args, hidden_size=shape.hidden_size, **machine)


if __name__ == "__main__":
    exit_with(partial(main, sys.argv[1:]), "run/estimate.py")
