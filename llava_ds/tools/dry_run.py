"""What a run would start with: its first optimizer step, and the memory that it needs."""

import torch
from transformers import PreTrainedTokenizerBase

from llava_ds.data.dataset import EncodedDataset
from llava_ds.data.loader import Layout, windows
from llava_ds.data.sampler import SampleOrder
from llava_ds.distributed import Ranks
from llava_ds.report.data_page import in_terminal
from llava_ds.tools.fitting import Run, advice, description, table
from llava_ds.tools.samples import shown_sample

LONGEST_TEXT = 800  # characters shown of a sample


def first_batch(
    dataset: EncodedDataset,
    layout: Layout,
    order: SampleOrder,
    start_step: int,
    num_steps: int,
    tokenizer: PreTrainedTokenizerBase,
) -> list[str]:
    """The first step that would be taken, this rank's first micro-batch in it, and that one's first sample.

    Its pictures are really decoded.
    """
    if start_step >= num_steps:
        return [f"the run is complete: {start_step:,} of {num_steps:,} steps are done"]
    samples, plan = next(layout.steps(order, dataset.lengths, start_step))
    window = next(
        windows(
            dataset,
            layout,
            order,
            start_step=start_step,
            num_steps=start_step + 1,
            num_workers=0,
            device=torch.device("cpu"),
        )
    )
    micro = window.micro_batches[0]
    lines = [
        f"step {start_step + 1:,}: {len(samples)} samples, {sum(dataset.lengths[i] for i in samples):,} tokens, "
        f"{sum(dataset.num_targets[i] for i in samples):,} supervised, on {len(plan)} ranks in {len(plan[0])} "
        "micro-batches",
        f"rank {layout.rank}'s first: {micro.num_samples} samples, {micro.num_tokens:,} tokens, {micro.num_targets:,} "
        f"supervised, {len(micro.batch.pixel_values)} image tiles",
        *(f"left out: {broken.id} ({broken.reason})" for broken in micro.broken),
    ]
    if mine := plan[layout.rank][0]:
        text = in_terminal(shown_sample(dataset, mine[0], tokenizer), coloured=False)
        lines.append(text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} ... ({len(text):,} characters)")
    return lines


def memory(run: Run, ranks: Ranks) -> list[str]:
    """The table of run/estimate.py for this run and its data; with a GPU, whether it fits."""
    gpu_memory = None
    if ranks.device.type == "cuda":
        gpu_memory = torch.cuda.get_device_properties(ranks.device).total_memory
    lines = [*description(run), *table(run, gpu_memory)]
    return lines if gpu_memory is None else [*lines, advice(run, gpu_memory)]
