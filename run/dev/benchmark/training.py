"""Run the same training with run/train.py and with transformers' Trainer in turns, each run in new processes."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmark import workload
from benchmark.comparison import OURS, PADDED, RECOMPUTED, SIDES, Run, read_run, turns
from benchmark.length_mix import FINETUNE, PRETRAIN, length_mix
from benchmark.workload import Shape

from llava_ds.config.parsing import parse_arguments
from llava_ds.constants import ConfigError
from llava_ds.data.collate import counts_of
from llava_ds.data.dataset import open_data
from llava_ds.data.step_plan import largest_share, plan_by_count, sample_order
from llava_ds.engine.ds_config.resolve import read_ds_config, resolve_ds_config
from llava_ds.model.open.folder import take_from_model
from llava_ds.model.open.model_plan import plan_model
from llava_ds.runtime.launchers import free_port
from llava_ds.runtime.processes import RUNNER_MODULE
from llava_ds.tiny.build_tokenizer import save_tokenizer, train_tokenizer
from llava_ds.tracking.flops import model_flops

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
TRAIN = ROOT / "run" / "train.py"

OWN_COMPOSITION = ("version", "tune_mm_mlp_adapter", "image_aspect_ratio")  # flags that ready models don't use
SEED = 20  # with this seed, a few steps have about the padded share of the whole mix


@dataclass(frozen=True)
class Case:
    """A training that all sides run. captions: True for stage 1 (projector only, ZeRO-2), else stage 2 (ZeRO-3)."""

    name: str
    shape: Shape
    captions: bool
    batch_size: int  # per rank and padded micro-batch, as in LLaVA
    accumulation: int  # padded micro-batches per rank and step
    num_steps: int  # including warm-up
    tokens_per_micro_batch: int
    grouped: bool = False  # the order of LLaVA's sampler; else random

    def num_batches(self, num_ranks: int) -> int:
        """Number of padded micro-batches over all ranks and steps."""
        return self.num_steps * self.accumulation * num_ranks


@dataclass(frozen=True)
class StepWork:
    """The work of an optimizer step and its padding.

    useful_flops: FLOPs that MFU counts; tokens: tokens of the samples; padded_tokens: tokens of the padded batches.
    """

    useful_flops: float
    tokens: int
    padded_tokens: int


def write_case(case: Case, folder: Path, num_ranks: int, *, hollow: bool = False) -> list[str]:
    """Write model and data; returns all sides' training flags. hollow: zero weights, initialized on the device."""
    model, data = folder / "model", folder / "data"
    model.mkdir(parents=True, exist_ok=True)
    parts = PRETRAIN if case.captions else FINETUNE
    mix = length_mix(parts, case.num_batches(num_ranks) * case.batch_size, SEED)
    flags = {
        "model_name_or_path": model,
        "data_path": data / "data.json",
        "image_folder": data / "images",
        "cache_dir": folder / "cache",
        "version": "plain" if case.captions else "mistral_instruct",
        "tune_mm_mlp_adapter": case.captions,
        "image_aspect_ratio": "square" if case.captions else "pad",
        "shuffle": False,
        "group_by_modality_length": case.grouped,
        "warmup_steps": 0.03,
        "save_strategy": "no",
        "deepspeed_config": ROOT / "ds_configs" / f"zero{2 if case.captions else 3}.json",
        "per_device_train_batch_size": case.batch_size,
        "gradient_accumulation_steps": case.accumulation,
        "max_steps": case.num_steps,
        "learning_rate": 1e-3 if case.captions else 1e-4,
        "max_grad_norm": 1.0,  # makes both sides compute the norm
    }
    if case.shape.is_ready:
        flags = {name: value for name, value in flags.items() if name not in OWN_COMPOSITION}
    else:
        save_tokenizer(train_tokenizer(workload.tokenizer_texts(), case.shape.vocab), model)
    (workload.write_hollow_model if hollow else workload.write_model)(model, case.shape)
    workload.write_samples(data, case.shape, mix, captions=case.captions)
    return [token for name, value in flags.items() for token in (f"--{name}", str(value))]


def opened(flags: list[str]) -> tuple:
    """Return the arguments, the model's plan and the encoded data."""
    args, _ = take_from_model(parse_arguments(flags, to_train=False)[0])
    plan = plan_model(args.model, args.data.model_max_length)
    return args, plan, open_data(args, plan.tokenizer, plan.tower.image_options(args))


def work_of_steps(flags: list[str], num_ranks: int) -> list[StepWork]:
    """Return the work of every optimizer step, from the encoded data."""
    args, plan, dataset = opened(flags)
    flops = model_flops(plan.text_config, plan.tower, args.model)
    training = args.training
    layout = training.gradient_accumulation_steps, training.per_device_train_batch_size
    order = sample_order(args, dataset, num_ranks)
    every_length = dataset.lengths.tolist()
    work = []
    for _, samples in zip(range(training.max_steps), order.steps()):
        counts = [counts_of(each) for each in dataset.undecoded(*samples)]
        batches = [batch for rank in plan_by_count(samples, num_ranks, *layout) for batch in rank]
        padded = sum(len(batch) * max(every_length[i] for i in batch) for batch in batches)
        useful = sum(flops.of(one.tokens, one.pairs, one.tiles, one.targets, one.tile_pairs) for one in counts)
        work.append(StepWork(useful, sum(one.tokens for one in counts), padded))
    return work


def estimated_bytes(flags: list[str], num_ranks: int) -> int:
    """Return run/estimate.py's peak GPU memory for these flags and their encoded data."""
    from llava_ds.extensions.planning.auto import Data, Devices, planned_run
    from llava_ds.extensions.planning.shapes import shape_of

    args, plan, dataset = opened(flags)
    shape = shape_of(plan.text_config, plan.tower, args)
    raw = read_ds_config(args.training.deepspeed_config)
    machine = {"dp": num_ranks, "device_type": "cuda", "is_local": False}
    resolved = resolve_ds_config(raw, args, hidden_size=shape.hidden_size, **machine)
    share = largest_share(sample_order(args, dataset, num_ranks), dataset.lengths, num_ranks)
    data = Data(int(dataset.lengths.max()), float(dataset.num_targets.sum() / dataset.lengths.sum()), share)
    return planned_run(shape, resolved, data, Devices(num_ranks, num_ranks)).estimate().total


def run_case(case: Case, flags: list[str], folder: Path, num_ranks: int, rounds: int) -> list[Run]:
    """Run all sides of a case in every round, and return the runs."""
    runs = []
    for number, side in turns(sides_of(case), rounds):
        own = folder / f"{SIDES.index(side)}-{number}"
        own.mkdir(parents=True, exist_ok=True)
        peak, steps = own / "peak.json", own / "steps.json"
        common = [*flags, "--output_dir", str(own / "output")]
        started = time.perf_counter()
        script, more = HERE / "hf_trainer.py", ["--steps_file", str(steps), *["--recompute"] * (side == RECOMPUTED)]
        if side == OURS:
            script, more = TRAIN, ["--tokens_per_micro_batch", str(case.tokens_per_micro_batch)]
        launch(num_ranks, "timed", peak, [str(script), *common, *more], own / "log.txt")
        run = read_run(side, number, own / "output" if side == OURS else steps, peak)
        runs.append(run)
        seconds = time.perf_counter() - started
        print(f"  round {number + 1}, {side}: {sum(run.step_time_s):.1f} s of {seconds:.0f}", flush=True)
    return runs


def sides_of(case: Case) -> tuple[str, ...]:
    """Return the sides of a case; ready models run without recomputation."""
    return (OURS, PADDED) if case.shape.is_ready else SIDES


def launch(num_ranks: int, how: str, report: Path, command: list[str], log: Path, on_cpu: bool = True) -> None:
    """Run and measure a script through the deepspeed launcher, on single-threaded CPU ranks or on GPUs.

    how, report: arguments of measured_run.py. Raises ConfigError with the end of the log if the script fails.
    """
    launcher = [sys.executable, "-m", RUNNER_MODULE, "--log_level", "warning"]
    launcher += ["--num_accelerators", str(num_ranks), "--master_port", str(free_port())]
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in ranks}
    environment |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"} if on_cpu else {}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    # The programs start as scripts, so they need PYTHONPATH to import llava_ds and each other.
    paths = [str(ROOT), str(HERE.parent), environment.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    launcher += [str(HERE / "measured_run.py"), how, str(report)]
    with log.open("w") as file:
        done = subprocess.run([*launcher, *command], env=environment, stdout=file, stderr=subprocess.STDOUT)
    if done.returncode:
        raise ConfigError(f"{command[0]} failed, see its log {log}:\n{log.read_text()[-3000:]}")
