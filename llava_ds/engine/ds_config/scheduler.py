"""The learning-rate schedule: from the JSON's scheduler block, or else from --lr_scheduler_type."""

import inspect
import json
import math
from collections.abc import Callable

import torch

from llava_ds.config.arguments import TrainingArguments
from llava_ds.config.bounds import json_object
from llava_ds.constants import in_short
from llava_ds.engine.ds_config.draft import trial_error

DEEPSPEED = ("LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR")
# Values of --lr_scheduler_type that need no trial, because they accept any rate and require no parameters.
NOT_TRIED = {"linear", "cosine", "cosine_with_restarts", "constant", "constant_with_warmup", "inverse_sqrt"}
# Schedulers and their parameter for the peak rate (the language model's).
RATE_KEYS = {
    "WarmupLR": "warmup_max_lr",
    "WarmupDecayLR": "warmup_max_lr",
    "OneCycle": "cycle_max_lr",
    "CyclicLR": "max_lr",
    "OneCycleLR": "max_lr",
}
# Parameters that can be a list with a rate per parameter group; a single number would apply to all groups.
PER_GROUP = {
    "warmup_min_lr",
    "warmup_max_lr",
    "cycle_min_lr",
    "cycle_max_lr",
    "lr_range_test_min_lr",
    "base_lr",
    "max_lr",
}
NOT_GIVEN = ("self", "optimizer", "last_batch_iteration", "last_epoch")


def warmup_steps(args: TrainingArguments, num_steps: int) -> int:
    """Return the number of steps in which the rate rises from 0: --warmup_steps, or --warmup_ratio of all steps.

    Source: transformers 5.
    """
    if args.warmup_steps >= 1:
        return int(args.warmup_steps)
    return math.ceil((args.warmup_steps or args.warmup_ratio) * num_steps)


def scheduler_class(name: str) -> type:
    """Return the class of this name from DeepSpeed, or from torch."""
    from deepspeed.runtime import lr_schedules

    return getattr(lr_schedules if name in DEEPSPEED else torch.optim.lr_scheduler, name)


def parsed_kwargs(args: TrainingArguments) -> dict:
    """Parse --lr_scheduler_kwargs. Raises ValueError if it is not a JSON object."""
    return json_object(args.lr_scheduler_kwargs or "{}")


def kwargs_problem(args: TrainingArguments) -> str | None:
    """Return the problem with --lr_scheduler_kwargs, found by building the schedule, or None."""
    try:
        kwargs = parsed_kwargs(args)
    except ValueError as error:
        given = f"--lr_scheduler_kwargs {in_short(args.lr_scheduler_kwargs)}"
        return f"{given} can't be read as a JSON object ({in_short(error)}): write it like '{{\"num_cycles\": 2}}'"
    name = args.lr_scheduler_type
    if not kwargs and name in NOT_TRIED:
        return None
    # Not imported at the top, because it takes seconds: it imports peft and bitsandbytes if they are installed.
    from transformers import get_scheduler
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=args.learning_rate)
    problem = trial_error(lambda: get_scheduler(name, optimizer, 0, 1000, kwargs))
    if problem is None:
        return None
    of_function = inspect.signature(TYPE_TO_SCHEDULER_FUNCTION[name]).parameters
    known = [key for key in of_function if key not in (*NOT_GIVEN, "num_warmup_steps", "num_training_steps")]
    if not kwargs:
        return f"--lr_scheduler_type {name} needs --lr_scheduler_kwargs ({problem}): it takes {', '.join(known)}"
    return (
        f"--lr_scheduler_type {name} can't take --lr_scheduler_kwargs {in_short(json.dumps(kwargs))} "
        f"({in_short(problem)}): it takes {', '.join(known) or 'none'}"
    )


def describe_schedule(args: TrainingArguments, num_steps: int, block: dict | None = None) -> str:
    """Describe the schedule that scheduler_factory builds from the same arguments."""
    if block is not None:
        return f"schedule {block['type']} from the DeepSpeed JSON"
    return f"{warmup_steps(args, num_steps)} of them warm-up, {args.lr_scheduler_type} schedule"


def scheduler_factory(
    args: TrainingArguments, num_steps: int, block: dict | None = None
) -> Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]:
    """Return the lr_scheduler for deepspeed.initialize: a function that makes a scheduler for an optimizer.

    The rates of the optimizer's groups are their peaks; the schedule keeps the ratios between groups.

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
