"""Print the report of --dry_run on data, memory and time."""

import statistics
from functools import partial
from pathlib import Path

import psutil
import torch
from transformers import PreTrainedTokenizerBase

from llava_ds.data.loader import windows
from llava_ds.data.step_plan import StepPlan
from llava_ds.export.trial import try_export
from llava_ds.extensions.planning.auto import run_on_ranks
from llava_ds.extensions.planning.drawing import drawing_lines, drawing_of
from llava_ds.extensions.planning.fit import Run, advice, description, table, verdict
from llava_ds.runtime.mesh import Mesh
from llava_ds.runtime.ranks import Ranks, broadcast_from_first, print_details, print_first
from llava_ds.tracking.data_page import in_terminal
from llava_ds.tracking.run_files import read_run
from llava_ds.tracking.sample_text import shown_sample
from llava_ds.tracking.series import is_number
from llava_ds.tracking.wording import duration, num_bytes
from llava_ds.train.plan import Plan

LONGEST_TEXT = 800  # characters of a sample to show
# Sentences by the result of fit.verdict, the worst result first.
STATES = {"too big": "would run out of memory", "tight": "may run out of memory", "fits": "ready"}


def show_dry_run(plan: Plan, ranks: Ranks) -> int:
    """Print whether the run can start, its steps and the memory estimate. Returns the exit code.

    With --verbose, also prints the resolved DeepSpeed JSON and the first batch.
    """
    steps, done = plan.steps, plan.resumed_step
    planned = run_on_ranks(plan.resolved, plan.model, steps.dataset, steps.order, ranks)
    trial = partial(try_export, plan.export, plan.output_dir, dry_run=True)
    export = [broadcast_from_first(ranks, trial)] if plan.export.is_whole_model else []
    if ranks.is_first:
        device, host = ranks.device, float(psutil.virtual_memory().available)
        gpu = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
        step_s = measured_step_s(plan.output_dir, done)
        batch = first_batch(steps, done, plan.model.tokenizer)  # decodes images, so that bad ones are found now
        print_first(conclusion(planned, gpu, host, (done, steps.num_steps), steps.batch_size, step_s))
        drawing = drawing_of(planned, plan.args)
        drawn = [] if drawing is None else drawing_lines(drawing, gpu)
        device = "CPU rank" if gpu is None else "GPU"
        print_first(*description(planned, device), *plan.describe(), *table(planned, gpu, device), *drawn)
        print_details(*plan.details(), *export, *batch)
        if gpu is not None:
            print_first(advice(planned, gpu))
    return 0


def first_batch(plan: StepPlan, done: int, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Describe the next step, rank 0's first micro-batch (its images are decoded), and its first sample."""
    if done >= plan.num_steps:
        return [f"the run is complete: {done:,} of {plan.num_steps:,} steps are done"]
    dataset, (samples, of_ranks) = plan.dataset, plan.step(done + 1)
    window = next(windows(plan, Mesh(plan.packing.dp, 0), done=done, num_workers=0, device=torch.device("cpu")))
    micro = window.micro_batches[0]
    lines = [
        f"step {done + 1:,}: {len(samples)} samples, {sum(dataset.lengths[i] for i in samples):,} tokens, "
        f"{sum(dataset.num_targets[i] for i in samples):,} supervised, on {_ranks(plan)} in "
        f"{len(of_ranks[0])} micro-batches",
        f"rank 0's first: {micro.num_samples} samples, {micro.num_tokens:,} tokens, {micro.num_targets:,} "
        f"supervised, {len(micro.batch.pixel_values)} image tiles",
        *(f"left out: {broken.id} ({broken.reason})" for broken in micro.broken),
    ]
    if mine := of_ranks[0][0]:
        text = in_terminal(shown_sample(dataset, mine[0], tokenizer), coloured=False)
        lines.append(text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} ... ({len(text):,} characters)")
    return lines


def _ranks(plan: StepPlan) -> str:
    dp, shared = plan.packing.dp, plan.packing.shared
    return f"{dp} ranks" if shared == 1 else f"{dp * shared} ranks, of which {shared} share each sample,"


def conclusion(
    run: Run,
    gpu_memory: float | None,
    host_memory: float,
    steps: tuple[int, int],
    batch_size: int,
    step_s: float | None,
) -> str:
    """Return one line that says if the run can start and fits, its number of steps and, if known, the time.

    gpu_memory: bytes of a GPU, None on a CPU. host_memory: free bytes of a node. steps: done and total. step_s:
    measured seconds of an optimizer step, or None.
    """
    done, total = steps
    if done >= total:
        return f"dry run: nothing to do, {total:,} of {total:,} optimizer steps are done"
    estimate, local = run.estimate(), min(run.setup.num_gpus, run.setup.gpus_per_node)
    on_host = estimate.cpu + (local * estimate.total if gpu_memory is None else 0)
    host_word = verdict(on_host, host_memory) if on_host else "fits"
    words = [host_word] if gpu_memory is None else [verdict(estimate.total, gpu_memory), host_word]
    state = next(text for word, text in STATES.items() if word in words)
    host = f"{num_bytes(on_host)} of {num_bytes(host_memory)} free on this machine: {host_word}"
    parts = [] if gpu_memory is None else [advice(run, gpu_memory)]
    parts += [host] if on_host else []
    count = f"{total:,} optimizer steps" if done == 0 else f"{total - done:,} of {total:,} optimizer steps left,"
    time = "" if step_s is None else f", about {duration((total - done) * step_s)} at the {step_s:.3g} s measured"
    ranks = "1 rank" if run.setup.num_gpus == 1 else f"{run.setup.num_gpus:,} ranks"
    return f"dry run: {state}. {count} of {batch_size:,} samples on {ranks}{time}. Memory: {'; '.join(parts)}"


def measured_step_s(output_dir: Path, from_step: int) -> float | None:
    """Return the median seconds per optimizer step before the resume step; None for a new run."""
    if from_step == 0:
        return None
    run = read_run(output_dir)
    times = [
        row["step_time_s"] for row in run.metrics if row["step"] <= from_step and is_number(row.get("step_time_s"))
    ]
    return statistics.median(times) if times else None
