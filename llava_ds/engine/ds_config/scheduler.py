"""The schedule: the scheduler block of the JSON, or --lr_scheduler_type where there is none."""

import difflib
import inspect
import json
import logging
import math
import warnings
from collections.abc import Callable

import torch

from llava_ds.config.arguments import TrainingArguments
from llava_ds.engine.ds_config.draft import AUTO, Draft, as_json, is_number
from llava_ds.engine.ds_config.precision import FLAG, Check, whole

DEEPSPEED = ("LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR")
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
# Of --lr_scheduler_type: those that any rate is right for, and that need no more parameters.
CONTENT = {"linear", "cosine", "cosine_with_restarts", "constant", "constant_with_warmup", "inverse_sqrt"}
IMPOSSIBLE = {
    "ReduceLROnPlateau": "it follows an evaluation, and nothing is evaluated while training",
    **{name: "it takes a function, which JSON can't hold" for name in ("LambdaLR", "MultiplicativeLR")},
    **{name: "it takes other schedulers, which JSON can't hold" for name in ("SequentialLR", "ChainedScheduler")},
}
# The parameter that says the language model's peak rate.
RATE_KEYS = {
    "WarmupLR": "warmup_max_lr",
    "WarmupDecayLR": "warmup_max_lr",
    "OneCycle": "cycle_max_lr",
    "CyclicLR": "max_lr",
    "OneCycleLR": "max_lr",
}
# Rates that a class takes as a list with one value per parameter group. Given a number, it would use it for all.
PER_GROUP = {
    "warmup_min_lr",
    "warmup_max_lr",
    "cycle_min_lr",
    "cycle_max_lr",
    "lr_range_test_min_lr",
    "base_lr",
    "max_lr",
}
# What classes raise over values that they can't use.
DISLIKES = (ValueError, TypeError, RuntimeError, LookupError, ArithmeticError, AttributeError, AssertionError)
TRIED_STEPS = 20_000  # of a schedule, before anything is built: half a second
NOT_GIVEN = ("self", "optimizer", "last_batch_iteration", "last_epoch")
WARMUP_TYPES = ("log", "linear")


def warmup_steps(args: TrainingArguments, num_steps: int) -> int:
    """Steps in which the rate rises from 0: --warmup_steps, or else --warmup_ratio of all. Source: transformers 5."""
    if args.warmup_steps >= 1:
        return int(args.warmup_steps)
    return math.ceil((args.warmup_steps or args.warmup_ratio) * num_steps)


def resolve_scheduler(draft: Draft, num_steps: int | None) -> None:
    """Fill the scheduler block from the flags, and refuse what makes no schedule.

    num_steps: optimizer steps of the run; None leaves open what follows from them. Without a block,
    --lr_scheduler_kwargs are checked.
    """
    if "scheduler" not in draft.config:
        if problem := kwargs_problem(draft.args.training):
            draft.refuse(problem)
        return
    block = draft.config["scheduler"]
    if not isinstance(block.get("type"), str):
        return  # refused with the keys
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
    for key in ("last_batch_iteration", "last_epoch"):  # DeepSpeed's word and torch's for where the schedule begins
        if (begins := params.pop(key, -1)) not in (-1, AUTO) or isinstance(begins, bool):
            draft.refuse(
                f"scheduler.params.{key} is {as_json(begins)} in the DeepSpeed JSON: remove it, or write -1; a resumed "
                "run goes on in its schedule by itself"
            )
    known = known_params(block["type"])
    _check_names(draft, block["type"], params, known)
    _fill_params(draft, block["type"], params, known, num_steps)
    _check_values(draft, block["type"], params)
    if len(draft.problems) == problems:
        _try_class(draft, block["type"], params, num_steps)


def scheduler_class(name: str) -> type:
    """DeepSpeed's class of a name, or torch's."""
    from deepspeed.runtime import lr_schedules

    return getattr(lr_schedules if name in DEEPSPEED else torch.optim.lr_scheduler, name)


def known_params(name: str) -> dict[str, object]:
    """What a scheduler takes, and the defaults."""
    of_class = inspect.signature(scheduler_class(name).__init__).parameters
    return {key: p.default for key, p in of_class.items() if key not in NOT_GIVEN}


def parsed_kwargs(args: TrainingArguments) -> dict:
    """--lr_scheduler_kwargs as an object. Raises ValueError where it is no JSON object."""
    kwargs = json.loads(args.lr_scheduler_kwargs or "{}")
    if not isinstance(kwargs, dict):
        raise ValueError("expected an object")
    return kwargs


def kwargs_problem(args: TrainingArguments) -> str | None:
    """What is wrong with --lr_scheduler_kwargs for --lr_scheduler_type; None if nothing."""
    given = f"--lr_scheduler_kwargs {args.lr_scheduler_kwargs}"
    try:
        kwargs = parsed_kwargs(args)
    except ValueError as error:
        return f"{given} can't be read as a JSON object ({error}): write it like '{{\"num_cycles\": 2}}'"
    name = args.lr_scheduler_type
    if not kwargs and name in CONTENT:
        return None
    # Not at the top: it brings peft and bitsandbytes where they are installed, which are seconds of every start.
    from transformers import get_scheduler
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

    of_function = inspect.signature(TYPE_TO_SCHEDULER_FUNCTION[name]).parameters
    known = [key for key in of_function if key not in (*NOT_GIVEN, "num_warmup_steps", "num_training_steps")]
    unknown = sorted(set(kwargs) - set(known))
    if unknown:
        takes = ", ".join(known) or "none"
        return f"{given}: {', '.join(unknown)} is unknown to --lr_scheduler_type {name}, which takes {takes}"
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=args.learning_rate)
    if name == "warmup_stable_decay" and "num_decay_steps" not in kwargs:
        return "--lr_scheduler_type warmup_stable_decay needs --lr_scheduler_kwargs '{\"num_decay_steps\": N}'"
    try:
        get_scheduler(name, optimizer, 0, 1000, kwargs)
    except DISLIKES as error:
        return f"--lr_scheduler_type {name} can't take --lr_scheduler_kwargs {json.dumps(kwargs)} ({error})"
    return None


def dry_run_problem(run: Callable[[], object]) -> str | None:
    """What a class of DeepSpeed's or torch's says against its parameters; None if nothing. What it only warns of is
    not said."""
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run()
    except DISLIKES as error:
        return str(error) or type(error).__name__
    finally:
        logger.setLevel(level)
    return None


def _is_known(draft: Draft, name: str) -> bool:
    if name in DEEPSPEED or name in TORCH:
        return True
    if name in IMPOSSIBLE:
        why, hint = f"can't be used here, for {IMPOSSIBLE[name]}", "use WarmupCosineLR or --lr_scheduler_type"
    else:
        every = {known.lower(): known for known in (*DEEPSPEED, *TORCH)}
        nearest = [every[key] for key in difflib.get_close_matches(name.lower(), every, n=2)]
        why = "is unknown"
        hint = (
            f"did you mean {' or '.join(nearest)}?" if nearest else f"give one of {', '.join(sorted(every.values()))}"
        )
    draft.refuse(f"scheduler.type {as_json(name)} in the DeepSpeed JSON {why}: {hint}")
    return False


def _check_names(draft: Draft, name: str, params: dict, known: dict[str, object]) -> None:
    for key in params:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"it takes {', '.join(known)}"
            draft.refuse(f"scheduler.params.{key} in the DeepSpeed JSON is unknown to {name}: {hint}")
    filled = {"total_num_steps", RATE_KEYS.get(name)}
    for key, default in known.items():
        if default is inspect.Parameter.empty and key not in params and key not in filled:
            draft.refuse(f"scheduler.params.{key} is missing in the DeepSpeed JSON: {name} has no default for it")


def _fill_params(draft: Draft, name: str, params: dict, known: dict[str, object], num_steps: int | None) -> None:
    if name in RATE_KEYS:
        draft.agree(f"scheduler.params.{RATE_KEYS[name]}", "learning_rate")
        if draft.args.training.learning_rate == 0:
            draft.refuse(f"--learning_rate is 0, and {name} scales every group's rate by it: give a rate above 0")
    if name == "LRRangeTest" and draft.is_open("scheduler.params.lr_range_test_min_lr"):
        # Where a test starts is not the rate to train with: written, it leaves the flag, and the groups' proportion.
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
            f"{'' if training.warmup_steps >= 1 else f', which is {wanted} of {num_steps} steps'}: make them equal, or "
            'write "auto"'
        )


def _check_momentum(draft: Draft, name: str, params: dict) -> None:
    """DeepSpeed's OneCycle turns beta 1 with the rate and sets beta 2 to 0.99 on the way."""
    if name != "OneCycle" or params.get("cycle_momentum", True) is not True:
        return
    given = [f"--{flag}" for flag in ("adam_beta1", "adam_beta2") if flag in draft.args.given]
    if given:
        draft.refuse(
            f"{' and '.join(given)} would be overwritten by OneCycle, which turns beta 1 and sets beta 2 to 0.99: "
            'leave the flag out, or write "cycle_momentum": false into scheduler.params'
        )
    draft.reasons["scheduler.type"] = (
        f"from the JSON, instead of {draft.args.training.lr_scheduler_type}; turns beta 1, sets beta 2 to 0.99"
    )


NUMBER: Check = is_number, "a number from 0"
SHARE: Check = (lambda v: is_number(v) and v <= 1), "a number from 0 to 1"
MOMENTUM: Check = (lambda v: is_number(v) and v < 1), "a number from 0 to below 1"


def _or_null(check: Check) -> Check:
    return (lambda v: v is None or check[0](v)), check[1]


# What DeepSpeed's schedulers take without a word and then do something else with.
CHECKS: dict[str, Check] = {
    "warmup_type": (lambda v: v in WARMUP_TYPES, " or ".join(WARMUP_TYPES)),
    "warmup_min_lr": NUMBER,
    "warmup_num_steps": whole(1),
    "total_num_steps": whole(1),
    "warmup_min_ratio": SHARE,
    "cos_min_ratio": SHARE,
    "lr_range_test_step_size": whole(1),
    "lr_range_test_step_rate": NUMBER,
    "lr_range_test_staircase": FLAG,
    "cycle_min_lr": NUMBER,
    "cycle_first_step_size": whole(1),
    "cycle_second_step_size": _or_null(whole(0)),
    "cycle_first_stair_count": whole(0),
    "cycle_second_stair_count": _or_null(whole(0)),
    "decay_step_size": whole(0),
    "decay_lr_rate": NUMBER,
    "decay_mom_rate": NUMBER,
    "cycle_momentum": FLAG,
    "cycle_min_mom": MOMENTUM,
    "cycle_max_mom": MOMENTUM,
}


def _check_values(draft: Draft, name: str, params: dict) -> None:
    for key in sorted(PER_GROUP & set(params) - {RATE_KEYS.get(name)}):  # that one was compared with the flag
        if params[key] != AUTO and not is_number(params[key]):
            draft.refuse(
                f"scheduler.params.{key} is {as_json(params[key])} in the DeepSpeed JSON: write a number from 0"
            )
    for key, value in params.items():
        if key not in PER_GROUP and name in DEEPSPEED and value != AUTO and key in CHECKS and not CHECKS[key][0](value):
            draft.refuse(f"scheduler.params.{key} is {as_json(value)} in the DeepSpeed JSON: write {CHECKS[key][1]}")
    total, warmup = params.get("total_num_steps"), params.get("warmup_num_steps")
    if (
        is_number(total)
        and is_number(warmup)
        and warmup > total
        and "scheduler.params.warmup_num_steps" not in draft.reasons
    ):
        draft.refuse(
            f"scheduler.params.warmup_num_steps is {warmup} in the DeepSpeed JSON, of total_num_steps {total}: the "
            "rate would never fall, write fewer"
        )
    low, high = params.get("cycle_min_lr"), params.get("cycle_max_lr")
    if is_number(low) and is_number(high) and low > high:
        draft.refuse(
            f"scheduler.params.cycle_min_lr is {low} in the DeepSpeed JSON, above cycle_max_lr {high}: swap them"
        )


def _try_class(draft: Draft, name: str, params: dict, num_steps: int | None) -> None:
    """Let the class go through the run's steps on an optimizer of its own, before a model is built with it."""
    values = {key: 1000 if value == AUTO else value for key, value in params.items()}
    if "total_num_steps" in known_params(name):
        values.setdefault("total_num_steps", 1000)

    def run() -> None:
        optimizer = _stand_in(draft)
        scheduler = scheduler_class(name)(optimizer, **values)
        for step in range(1, min(num_steps or 1, TRIED_STEPS)):
            optimizer.step()
            scheduler.step()
            rate = optimizer.param_groups[0]["lr"]
            if not 0 <= rate < math.inf:
                raise ValueError(f"the rate is {rate:g} after step {step}")

    if problem := dry_run_problem(run):
        draft.refuse(f"scheduler.params in the DeepSpeed JSON: {name} can't take them ({problem})")


def _stand_in(draft: Draft) -> torch.optim.Optimizer:
    """An optimizer like the run's as far as a schedule can see: with betas, with momentum, or with neither."""
    weights, rate = [torch.nn.Parameter(torch.zeros(1))], draft.args.training.learning_rate
    kind = draft.get("optimizer.type")
    if kind in ("SGD", "RMSprop"):
        return getattr(torch.optim, kind)(weights, lr=rate, momentum=draft.get("optimizer.params.momentum") or 0)
    if str(kind).lower() in ("adagrad", "adadelta", "adafactor", "asgd", "rprop"):
        return torch.optim.Adagrad(weights, lr=rate)
    return torch.optim.AdamW(weights, lr=rate)
