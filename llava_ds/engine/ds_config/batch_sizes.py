"""The batch invariant: train_batch_size = micro-batch x accumulation x data-parallel ranks."""

import math

from llava_ds.config.bounds import MOST
from llava_ds.constants import in_short
from llava_ds.engine.ds_config.draft import Draft, as_json

# JSON key -> flag
KEYS = {
    "train_batch_size": "train_batch_size",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}


def resolve_batch(draft: Draft) -> None:
    """Fill in the three batch-size keys and the equivalent flags from the ones that are given."""
    draft.ruled.update(KEYS)
    fixed = _fixed(draft)
    if fixed is None:
        return
    args, dp = draft.args, draft.dp
    flags = args.as_dict()
    total = fixed.get("train_batch_size", flags["train_batch_size"])
    if "train_batch_size" not in fixed and {"per_device_train_batch_size", "gradient_accumulation_steps"} <= set(fixed):
        total = None  # the user's two numbers override a default total
    micro = fixed.get("per_device_train_batch_size", flags["per_device_train_batch_size"])
    accumulation = fixed.get("gradient_accumulation_steps")
    why = "--per_device_train_batch_size", "--gradient_accumulation_steps"
    if total is None:
        accumulation = accumulation or flags["gradient_accumulation_steps"]
        total = micro * accumulation * dp
        total_why = f"micro x accumulation x {dp} ranks"
    else:
        total_why = "--train_batch_size"
        share, rest = divmod(total, dp)
        if rest or share == 0:
            below, above = total - rest, total - rest + dp
            nearest = f"{below} or {above}" if below else f"{above}"
            draft.refuse(
                f"train_batch_size is {total}, but {dp} ranks can't share it evenly: give {nearest}, or start "
                "another number of ranks"
            )
            return
        if accumulation is None and isinstance(draft.get("train_micro_batch_size_per_gpu"), int):
            accumulation = max(1, share // micro)
            why = (why[0], "remaining factor of the total")
        elif accumulation is None:
            # Take the largest micro-batch up to per_device_train_batch_size that divides the rank's share.
            micro = _largest_divisor(share, micro)
            accumulation = share // micro
            why = (f"largest up to --per_device_train_batch_size that divides {share}", "remaining factor of it")
        elif "per_device_train_batch_size" not in fixed and share % accumulation == 0:
            micro = share // accumulation
        if micro * accumulation * dp != total and "gradient_accumulation_steps" not in fixed:
            draft.refuse(
                f"train_batch_size is {total}, but micro-batches of {micro} on {dp} ranks do not add up to it: "
                f'give a multiple of {micro * dp}, or write "auto" for train_micro_batch_size_per_gpu'
            )
        elif micro * accumulation * dp != total:
            draft.refuse(
                f"train_batch_size is {total}, but {micro} samples per micro-batch x {accumulation} micro-batches x "
                f"{dp} ranks are {micro * accumulation * dp}: leave one of the three out"
            )
    for key, value, reason in zip(KEYS, (total, micro, accumulation), (total_why, *why)):
        if draft.is_open(key) or draft.config[key] != value:
            draft.fill(key, value, reason)
    draft.args = args.replaced(
        train_batch_size=total, per_device_train_batch_size=micro, gradient_accumulation_steps=accumulation
    )


def _fixed(draft: Draft) -> dict[str, int] | None:
    """Map flags to the sizes given in the JSON or on the command line. Returns None if a size was refused."""
    fixed: dict[str, int] = {}
    flags, problems = draft.args.as_dict(), len(draft.problems)
    for key, flag in KEYS.items():
        written = draft.config.get(key)
        if draft.is_open(key):
            if flag in draft.args.given:
                fixed[flag] = flags[flag]
        elif not isinstance(written, int) or isinstance(written, bool) or written < 1:
            draft.refuse(f'{key} is {as_json(written)} in the DeepSpeed JSON: write a whole number above 0, or "auto"')
        elif written > MOST:
            draft.refuse(f"{key} is {in_short(written)} in the DeepSpeed JSON: write {MOST:,} or less")
        elif flag in draft.args.given and flags[flag] != written:
            draft.refuse(
                f"{key} is {written} in the DeepSpeed JSON but --{flag} is {flags[flag]}: "
                'make them equal, or write "auto"'
            )
        else:
            fixed[flag] = written
    return fixed if len(draft.problems) == problems else None


def _largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of number up to most."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return max(divisor for each in small for divisor in (each, number // each) if divisor <= most)
