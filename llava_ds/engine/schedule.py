"""How many optimizer steps there are, and the learning rate of each."""

import math
from collections.abc import Callable

import torch

from llava_ds.config.arguments import Arguments, TrainingArguments
from llava_ds.engine.ds_config.scheduler import PER_GROUP, parsed_kwargs, scheduler_class, warmup_steps


def total_steps(args: TrainingArguments, steps_per_epoch: int) -> int:
    """Optimizer steps of the whole run."""
    return args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * steps_per_epoch)


def with_steps_of_epochs(args: Arguments, steps_per_epoch: int) -> Arguments:
    """The flags with --save_steps and --eval_steps as the strategies mean them, in optimizer steps (--eval_steps may
    still be a part of all steps: see steps_between).

    Source: transformers' TrainingArguments, where eval_strategy "steps" without eval_steps takes logging_steps.
    """
    training = args.training
    if training.save_strategy == "epoch":
        args = args.replaced(save_steps=steps_per_epoch)
    eval_steps = {
        None: training.eval_steps,
        "no": None,
        "steps": training.eval_steps or training.logging_steps,
        "epoch": steps_per_epoch,
    }
    return args.replaced(eval_steps=eval_steps[training.eval_strategy])


def steps_between(every: float | None, num_steps: int) -> int | None:
    """Optimizer steps from one measurement to the next; None for None and 0: there is none before the end.

    every: steps, or below 1 a part of num_steps, which is rounded up. Source: transformers' TrainerState.compute_steps.
    """
    if not every:
        return None
    return math.ceil(every * num_steps) if every < 1 else int(every)


def describe_schedule(args: TrainingArguments, num_steps: int, block: dict | None = None) -> str:
    """What scheduler_factory makes of the same, in a few words."""
    if block is not None:
        return f"schedule {block['type']} from the DeepSpeed JSON"
    return f"{warmup_steps(args, num_steps)} of them warm-up, {args.lr_scheduler_type} schedule"


def scheduler_factory(
    args: TrainingArguments, num_steps: int, block: dict | None = None
) -> Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]:
    """What deepspeed.initialize takes as lr_scheduler: it is called with the optimizer, whose groups hold their peak
    rates, and every rate keeps its proportion to the others.

    block: the scheduler of the resolved JSON; without one, --lr_scheduler_type, whose first step has rate 0 where there
    is a warm-up.
    """
    if block is not None:
        return lambda optimizer: _from_json(block, optimizer, args.learning_rate)

    def by_flags(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        from transformers import get_scheduler  # not at the top: see kwargs_problem

        optimizer.defaults.setdefault("lr", args.learning_rate)  # some schedules ask for it; DeepSpeed's Muon has none
        return get_scheduler(
            args.lr_scheduler_type, optimizer, warmup_steps(args, num_steps), num_steps, parsed_kwargs(args)
        )

    return by_flags


def _from_json(block: dict, optimizer: torch.optim.Optimizer, learning_rate: float):
    """DeepSpeed builds it itself from the JSON, with the same rates for all groups: here each has its own."""
    params = dict(block["params"])
    for key in PER_GROUP & set(params):
        params[key] = [params[key] * group["lr"] / learning_rate for group in optimizer.param_groups]
    return scheduler_class(block["type"])(optimizer, **params)
