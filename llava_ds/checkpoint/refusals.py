"""What a run can't go on from, and what to give instead."""

import difflib
from collections.abc import Collection
from pathlib import Path

from llava_ds.constants import ConfigError
from llava_ds.engine.ds_config.optimizer import SHARDED, optimizer_name
from llava_ds.engine.pieces import has_layout


def permitted(allowed: str | None, known: Collection[str], free: Collection[str]) -> set[str]:
    """The names in --allow_changed_flags. Raises ConfigError for one that there is not.

    known: what is compared; free: flags that are not, for their value changes no result.
    """
    if allowed is None:
        return set()
    names = {name.strip().removeprefix("--") for name in allowed.split(",")}
    if names == {"all"}:
        return set(known)
    for name in sorted(names - set(known)):
        nearest = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else "give names of flags with commas between, or all"
        if name in free:
            hint = "another value changes no result, so leave it out"
        raise ConfigError(f"--allow_changed_flags {name} is nothing that a resume compares: {hint}")
    return names


def refuse_uneven(total: int, world_size: int) -> None:
    """Raise ConfigError where that many ranks can't share the samples of a step."""
    if total % world_size:
        shares = [str(n) for n in range(1, total + 1) if total % n == 0]
        raise ConfigError(
            f"the checkpoint being resumed uses {total} samples per step, which {world_size} ranks can't share "
            f"evenly: start {', '.join(shares[:-1])} or {shares[-1]} of them, or give --resume never to start again"
        )


def about_batch_size(total: int, world_size: int) -> str:
    """Which flags keep that many samples per step."""
    share, rest = divmod(total, world_size)
    if rest or not share:
        return f"{world_size} ranks can't share the {total} samples of a step evenly: start another number of them"
    ways = [f"{share // n} x {n}" for n in range(1, share + 1) if share % n == 0]
    return (
        f"{total} samples per step on {world_size} ranks are --per_device_train_batch_size x "
        f"--gradient_accumulation_steps = {' or '.join(ways[:6])}; or give --train_batch_size {total} instead of the "
        "second"
    )


def refuse_uncuttable(path: Path, saved: dict, reshaped: list[str], optimizer: dict | None) -> None:
    """Raise ConfigError, before a model is built, where the checkpoint can't be re-sharded.

    saved: the checkpoint's identity; reshaped: lines that say what is another; optimizer: the JSON's block.
    """
    where = f"start {saved['world_size']} ranks at ZeRO-{saved['zero_stage']}, or give --resume never to start again"
    name = optimizer and optimizer_name(optimizer)
    if name in SHARDED or name == "Muon":
        why = f"{name} sees shards instead of {SHARDED[name]}" if name in SHARDED else "Muon keeps whole matrices"
        raise ConfigError(
            f"{path} can't be resumed: {'; '.join(reshaped)}, but {why}, so its states can't be re-sharded: {where}"
        )
    if not has_layout(path):
        raise ConfigError(
            f"{path} can't be resumed: {'; '.join(reshaped)}, but it was saved by an earlier version, which did "
            f"not write down where its numbers lie: {where}"
        )
