"""How many optimizer steps there are, and the learning rate of each."""

import math
from collections.abc import Callable

import torch
from transformers import get_scheduler

from llava_ds.arguments import TrainingArguments


def total_steps(args: TrainingArguments, steps_per_epoch: int) -> int:
    """Optimizer steps of the whole run."""
    return args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * steps_per_epoch)


def warmup_steps(args: TrainingArguments, num_steps: int) -> int:
    """Steps in which the rate rises from 0."""
    return math.ceil(args.warmup_ratio * num_steps)


def scheduler_factory(
    args: TrainingArguments, num_steps: int
) -> Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]:
    """What deepspeed.initialize takes as lr_scheduler: it is called with the optimizer. The first step's rate is 0
    where there is a warm-up."""
    return lambda optimizer: get_scheduler(args.lr_scheduler_type, optimizer, warmup_steps(args, num_steps), num_steps)
