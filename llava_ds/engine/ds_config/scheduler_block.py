"""The scheduler block of the JSON, checked and filled from the flags."""

import inspect
import math

import torch

from llava_ds.constants import did_you_mean
from llava_ds.engine.ds_config.draft import AUTO, Draft, as_json, is_number, trial_error
from llava_ds.engine.ds_config.scheduler import (
    DEEPSPEED,
    NOT_GIVEN,
    PER_GROUP,
    RATE_KEYS,
    scheduler_class,
    warmup_steps,
)

TORCH = (
    "ConstantLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "CyclicLR",
    "ExponentialLR",
    "LinearLR",
    "MultiStepLR",
    "OneCycleLR",
    "PolynomialLR",
    "StepLR",
)
IMPOSSIBLE = {
    "ReduceLROnPlateau": "it needs an evaluation after every step, and training has none",
    **{name: "it takes a function, and JSON can't hold one" for name in ("LambdaLR", "MultiplicativeLR")},
    **{name: "it takes other schedulers, and JSON can't hold them" for name in ("SequentialLR", "ChainedScheduler")},
}
TRIED_STEPS = 20_000  # maximum number of steps of a schedule to try; they take half a second
# DeepSpeed's schedulers accept any value and fail later, so values are checked here. Apart from these bounds, a value
# must be of the same kind as its default.
AT_LEAST_ONE = ("warmup_num_steps", "total_num_steps", "lr_range_test_step_size", "cycle_first_step_size")
UP_TO_ONE = ("warmup_min_ratio", "cos_min_ratio")
BELOW_ONE = ("cycle_min_mom", "cycle_max_mom")
WARMUP_TYPES = ("log", "linear")


def resolve_block(draft: Draft, num_steps: int | None) -> None:
    """Fill in the block from the flags, and refuse invalid values. num_steps: see resolve_scheduler."""
    block = draft.config["scheduler"]
    if not isinstance(block.get("type"), str):
        return  # check_keys refused it
    for flag in ("lr_scheduler_type", "lr_scheduler_kwargs"):
        if flag in draft.args.given:
            draft.refuse(
                f"--{flag} {draft.args.as_dict()[flag]} and scheduler {block['type']} in the DeepSpeed JSON are two "
                "schedules: leave one of them out"
            )
    params = block.setdefault("params", {})
    if not _is_known(draft, block["type"]):
        return
    draft.reasons.setdefault("scheduler.type", f"from the JSON, instead of {draft.args.training.lr_scheduler_type}")
    problems = len(draft.problems)
    for key in ("last_batch_iteration", "last_epoch"):  # the first step's name in DeepSpeed and torch
        if (begins := params.pop(key, -1)) not in (-1, AUTO) or isinstance(begins, bool):
            draft.refuse(
                f"scheduler.params.{key} is {as_json(begins)} in the DeepSpeed JSON: remove it, or write -1; a resumed "
                "run continues its schedule by itself"
            )
    known = known_params(block["type"])
    _check_names(draft, block["type"], params, known)
    _fill_params(draft, block["type"], params, known, num_steps)
    _check_values(draft, block["type"], params, known)
    if len(draft.problems) == problems:
        _try_class(draft, block["type"], params, num_steps)


def known_params(name: str) -> dict[str, object]:
    """Return the parameters of a scheduler, with their defaults."""
    of_class = inspect.signature(scheduler_class(name).__init__).parameters
    return {key: p.default for key, p in of_class.items() if key not in NOT_GIVEN}


def _is_known(draft: Draft, name: str) -> bool:
    if name in DEEPSPEED or name in TORCH:
        return True
    every = (*DEEPSPEED, *TORCH)
    why, hint = "is unknown", did_you_mean(name, every, f"give one of {', '.join(sorted(every))}")
    if name in IMPOSSIBLE:
        why, hint = f"can't be used here, because {IMPOSSIBLE[name]}", "use WarmupCosineLR or --lr_scheduler_type"
    draft.refuse(f"scheduler.type {as_json(name)} in the DeepSpeed JSON {why}: {hint}")
    draft.wrong.add("scheduler.type")
    return False


def _check_names(draft: Draft, name: str, params: dict, known: dict[str, object]) -> None:
    for key in params:
        if key not in known:
            hint = did_you_mean(key, known, f"it takes {', '.join(known)}")
            draft.refuse(f"scheduler.params.{key} in the DeepSpeed JSON is unknown to {name}: {hint}")


def _fill_params(draft: Draft, name: str, params: dict, known: dict[str, object], num_steps: int | None) -> None:
    if name in RATE_KEYS:
        draft.agree(f"scheduler.params.{RATE_KEYS[name]}", "learning_rate")
        if draft.args.training.learning_rate == 0:
            draft.refuse(f"--learning_rate is 0, and {name} scales every group's rate by it: give a rate above 0")
    if name == "LRRangeTest" and draft.is_open("scheduler.params.lr_range_test_min_lr"):
        # A range test starts from the rate of the flag. Don't use agree() here: a start that the JSON gives is not the
        # training rate, so it must not change the flag.
        draft.fill("scheduler.params.lr_range_test_min_lr", draft.args.training.learning_rate, "--learning_rate")
    if params.get("warmup_min_lr") == AUTO:
        draft.fill("scheduler.params.warmup_min_lr", 0, "as in Hugging Face's integration")
    if "total_num_steps" in known:
        _fill_total(draft, num_steps)
    if "warmup_num_steps" in known:
        _fill_warmup(draft, num_steps)
    _check_momentum(draft, name, params)


def _fill_total(draft: Draft, num_steps: int | None) -> None:
    key = "scheduler.params.total_num_steps"
    draft.ruled.add(key)
    if num_steps is None:
        return
    if draft.is_open(key):
        draft.fill(key, num_steps, "the run's optimizer steps")
    elif draft.get(key) != num_steps:
        draft.reasons[key] = f"from the JSON; this run has {num_steps} steps"


def _fill_warmup(draft: Draft, num_steps: int | None) -> None:
    key, training = "scheduler.params.warmup_num_steps", draft.args.training
    draft.ruled.add(key)
    if num_steps is None and training.warmup_steps < 1:
        return
    wanted = max(1, warmup_steps(training, num_steps or 0))
    flag = "warmup_steps" if training.warmup_steps else "warmup_ratio"
    if draft.is_open(key):
        draft.fill(key, wanted, f"--{flag}, at least 1")
    elif flag in draft.args.given and draft.get(key) != wanted:
        draft.refuse(
            f"{key} is {as_json(draft.get(key))} in the DeepSpeed JSON but --{flag} is {getattr(training, flag):g}"
            f"{'' if training.warmup_steps >= 1 else f' ({wanted} of {num_steps} steps)'}: make them equal, or "
            'write "auto"'
        )


def _check_momentum(draft: Draft, name: str, params: dict) -> None:
    """Refuse betas that DeepSpeed's OneCycle would overwrite: it cycles beta 1, and sets beta 2 to 0.99."""
    if name != "OneCycle" or params.get("cycle_momentum", True) is not True:
        return
    given = [f"--{flag}" for flag in ("adam_beta1", "adam_beta2") if flag in draft.args.given]
    if given:
        draft.refuse(
            f"OneCycle would overwrite {' and '.join(given)}: it cycles beta 1 and sets beta 2 to 0.99: "
            'leave the flag out, or write "cycle_momentum": false into scheduler.params'
        )
    draft.reasons["scheduler.type"] = (
        f"from the JSON, instead of {draft.args.training.lr_scheduler_type}; cycles beta 1, sets beta 2 to 0.99"
    )


def _wanted(key: str, default: object, value: object) -> str | None:
    """Return the kind of value to write for a parameter of DeepSpeed's schedulers; None if the value is valid."""
    if key == "warmup_type":
        return None if value in WARMUP_TYPES else " or ".join(WARMUP_TYPES)
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "true or false"
    if key in UP_TO_ONE:
        return None if is_number(value) and value <= 1 else "a number from 0 to 1"
    if key in BELOW_ONE:
        return None if is_number(value) and value < 1 else "a number from 0 to below 1"
    if key in AT_LEAST_ONE or key.endswith(("_step_size", "_stair_count")):
        least = int(key in AT_LEAST_ONE)
        return (
            None if is_number(value) and isinstance(value, int) and value >= least else f"a whole number from {least}"
        )
    return None if is_number(value) else "a number from 0"


def _check_values(draft: Draft, name: str, params: dict, known: dict[str, object]) -> None:
    for key, value in params.items():
        if value == AUTO or key not in known or key == RATE_KEYS.get(name):  # agree() has checked the rate
            continue
        if (name in DEEPSPEED or key in PER_GROUP) and (wanted := _wanted(key, known[key], value)):
            draft.refuse(f"scheduler.params.{key} is {as_json(value)} in the DeepSpeed JSON: write {wanted}")
    total, warmup = params.get("total_num_steps"), params.get("warmup_num_steps")
    filled = "scheduler.params.warmup_num_steps" in draft.reasons
    if is_number(total) and is_number(warmup) and warmup > total and not filled:
        draft.refuse(
            f"scheduler.params.warmup_num_steps is {warmup} in the DeepSpeed JSON, total_num_steps is {total}: the "
            "rate would never fall, write fewer"
        )
    low, high = params.get("cycle_min_lr"), params.get("cycle_max_lr")
    if is_number(low) and is_number(high) and low > high:
        draft.refuse(
            f"scheduler.params.cycle_min_lr is {low} in the DeepSpeed JSON, above cycle_max_lr {high}: swap them"
        )


def _try_class(draft: Draft, name: str, params: dict, num_steps: int | None) -> None:
    """Try the class: build it on a tiny optimizer and take the run's steps."""
    values = {key: 1000 if value == AUTO else value for key, value in params.items()}
    if "total_num_steps" in known_params(name):
        values.setdefault("total_num_steps", 1000)

    def run() -> None:
        optimizer = _tiny_optimizer(draft)
        scheduler = scheduler_class(name)(optimizer, **values)
        for step in range(1, min(num_steps or 1, TRIED_STEPS)):
            optimizer.step()
            scheduler.step()
            rate = optimizer.param_groups[0]["lr"]
            if not 0 <= rate < math.inf:
                raise ValueError(f"the rate is {rate:g} after step {step}")

    if problem := trial_error(run):
        draft.refuse(f"scheduler.params in the DeepSpeed JSON: {name} rejects them ({problem})")


def _tiny_optimizer(draft: Draft) -> torch.optim.Optimizer:
    """Make an optimizer over one weight that has betas, momentum, or neither, like the run's optimizer."""
    weights, rate = [torch.nn.Parameter(torch.zeros(1))], draft.args.training.learning_rate
    kind = draft.get("optimizer.type")
    if kind in ("SGD", "RMSprop"):
        return getattr(torch.optim, kind)(weights, lr=rate, momentum=draft.get("optimizer.params.momentum") or 0)
    if str(kind).lower() in ("adagrad", "adadelta", "adafactor", "asgd", "rprop"):
        return torch.optim.Adagrad(weights, lr=rate)
    return torch.optim.AdamW(weights, lr=rate)
