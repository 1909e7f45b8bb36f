"""The learning rate of each optimizer step."""

from collections.abc import Callable

import torch

from llava_ds.config.arguments import TrainingArguments
from llava_ds.engine.ds_config.scheduler import PER_GROUP, parsed_kwargs, scheduler_class, warmup_steps


def describe_schedule(args: TrainingArguments, num_steps: int, block: dict | None = None) -> str:
    """Describe the schedule that scheduler_factory makes from the same arguments."""
    if block is not None:
        return f"schedule {block['type']} from the DeepSpeed JSON"
    return f"{warmup_steps(args, num_steps)} of them warm-up, {args.lr_scheduler_type} schedule"


def scheduler_factory(
    args: TrainingArguments, num_steps: int, block: dict | None = None
) -> Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]:
    """Return the lr_scheduler for deepspeed.initialize: a function of the optimizer.

    The optimizer's groups hold their peak rates, and the rates keep their proportions.

    block: the scheduler of the resolved JSON; None: use --lr_scheduler_type (with warm-up, its first step has rate 0).
    """
    if block is not None:
        return lambda optimizer: _from_json(block, optimizer, args.learning_rate)

    def by_flags(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        from transformers import get_scheduler  # not at the top: see kwargs_problem

        optimizer.defaults.setdefault("lr", args.learning_rate)  # some schedules read it; DeepSpeed's Muon lacks it
        return get_scheduler(
            args.lr_scheduler_type, optimizer, warmup_steps(args, num_steps), num_steps, parsed_kwargs(args)
        )

    return by_flags


def _from_json(block: dict, optimizer: torch.optim.Optimizer, learning_rate: float):
    """Build the JSON's scheduler with each group's own rates; DeepSpeed would give all groups the same rate."""
    params = dict(block["params"])
    for key in PER_GROUP & set(params):
        params[key] = [params[key] * group["lr"] / learning_rate for group in optimizer.param_groups]
    return scheduler_class(block["type"])(optimizer, **params)
