"""What a run will do, for this machine's devices and its own data."""

import itertools
import math
from pathlib import Path

from llava_ds.checkpoint.run_identity import saved_identity
from llava_ds.data.dataset import EncodedDataset
from llava_ds.data.sample_order import SampleOrder
from llava_ds.data.step_plan import StepPlan
from llava_ds.engine.activation_budget import free_memory
from llava_ds.engine.ds_config.resolve import ResolvedConfig
from llava_ds.engine.schedule import describe_schedule
from llava_ds.model.plan import ModelPlan
from llava_ds.planning.fit import Run
from llava_ds.planning.inputs import Data, planned_run
from llava_ds.planning.shapes import shape_of
from llava_ds.runtime.ranks import Ranks, broadcast_from_first, gather, local_ranks, print_first

MOST_TOKENS_ON_CPU = 8192  # more gain nothing there


def plan_lines(resolved: ResolvedConfig, steps: StepPlan) -> list[str]:
    """Describe the data, the steps and the DeepSpeed configuration of a run, before it begins."""
    training, num_steps = resolved.args.training, steps.num_steps
    epochs = num_steps / steps.steps_per_epoch
    schedule = describe_schedule(training, num_steps, resolved.config.get("scheduler"))
    return [
        *steps.dataset.summary(),
        f"{num_steps:,} optimizer steps of {steps.batch_size} samples ({epochs:.2f} epochs), {schedule}",
        f"DeepSpeed configuration ({training.deepspeed_config}, filled in):",
        *resolved.explain(),
    ]


def planned_here(
    resolved: ResolvedConfig, plan: ModelPlan, dataset: EncodedDataset, order: SampleOrder, ranks: Ranks
) -> Run:
    """The run on this machine's devices and its data. The rank with the least free memory decides; all call it
    together."""
    share = largest_share(order, dataset.lengths, ranks.world_size)
    return planned_run(
        shape_of(plan.text_config, plan.tower, resolved.args),
        resolved,
        Data(
            longest_sample=max(dataset.lengths),
            supervised_fraction=sum(dataset.num_targets) / sum(dataset.lengths),
            share=min(share, MOST_TOKENS_ON_CPU) if ranks.device.type == "cpu" else share,
        ),
        num_gpus=ranks.world_size,
        gpus_per_node=local_ranks(),
        memory=min(gather(free_memory(ranks.device), ranks)),
    )


def tokens_per_micro_batch(
    resolved: ResolvedConfig, plan: ModelPlan, dataset: EncodedDataset, order: SampleOrder, ranks: Ranks
) -> int | None:
    """What --tokens_per_micro_batch comes to, and says so where it says auto. All ranks call it together.

    auto is what the run to go on with has, for another would round otherwise; else as many as have room.
    """
    training = resolved.args.training
    if training.tokens_per_micro_batch != "auto":
        return training.tokens_per_micro_batch
    saved = broadcast_from_first(ranks, lambda: saved_identity(training.resume, Path(training.output_dir)))
    tokens, why = saved.get("flags", {}).get("tokens_per_micro_batch"), "as the run that is gone on with has it"
    if tokens is None:
        tokens, why = planned_here(resolved, plan, dataset, order, ranks).batch.num_tokens, "chosen for this memory"
    print_first(f"--tokens_per_micro_batch {tokens} ({why})")
    return tokens


def largest_share(order: SampleOrder, lengths: list[int], world_size: int) -> int:
    """Tokens with which every step is one micro-batch on each rank: an even share of the largest, and a sample more,
    by which balanced packs may differ."""
    steps = itertools.islice(order.steps(0), order.steps_per_epoch)
    return math.ceil(max(sum(lengths[i] for i in samples) for samples in steps) / world_size) + max(lengths)
