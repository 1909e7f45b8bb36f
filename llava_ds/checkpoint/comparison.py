"""Compare a run's settings with those of the checkpoint to resume, and find differences that change the result."""

import json
import math
from pathlib import Path

from llava_ds.checkpoint.run_identity import RunIdentity
from llava_ds.config.arguments import declared_in, every_flag, flag_default, flags_free_on_resume
from llava_ds.config.flags import Flag
from llava_ds.constants import ConfigError, did_you_mean
from llava_ds.engine.ds_config.optimizer import BITSANDBYTES, SHARDED, optimizer_name
from llava_ds.engine.shards.pieces import has_layout

# Sample orders of LLaVA-NeXT, and for each the layout flag that affects which samples a step contains.
ORDERED_BY_LAYOUT = {
    "group_by_length": "per_device_train_batch_size",
    "group_by_modality_length_auto": "per_device_train_batch_size",
    "group_by_varlen": "gradient_accumulation_steps",
}


class Comparison:
    """Compares a run's identity with a checkpoint's. saved: the checkpoint's identity, read from JSON."""

    def __init__(self, run: RunIdentity, saved: dict) -> None:
        self._run, self._saved = run, saved
        declared = declared_in(run.flags.keys() | saved["flags"].keys())
        # Flags that only affect on which rank and in which micro-batch a sample is computed.
        self._layout_flags = {name: flag for name, flag in declared.items() if flag.resume in ("layout", "placement")}
        # Layout flags that affect which samples a step contains.
        self._ordering_flags = {flag for order, flag in ORDERED_BY_LAYOUT.items() if run.flags[order]}

    def differences(self) -> dict[str, str]:
        """Return a line for each difference that changes the trained model, by its name in --allow_changed_flags."""
        # If an identity lacks a flag, use the flag's default: the extension was not loaded, or an earlier version did
        # not have the flag.
        run, saved, flags = self._run, self._saved, every_flag()
        absent = saved["flags"].keys() - run.flags.keys()
        left_out = [
            name for name in saved["flags"] if name in absent & flags.keys() and flags[name].resume == "compared"
        ]
        lines = {
            name: f"--{name} is {value}, was {before}"
            for name, value in [*run.flags.items(), *((name, flag_default(name)) for name in left_out)]
            if (before := saved["flags"].get(name, flag_default(name))) != value
            and (name not in self._layout_flags or name in self._ordering_flags)
        }
        if saved["data"] != run.data:
            lines["data"] = "the data set or its encoding has changed"
        for key, line in self._section_changes().items():
            if key != "optimizer" or not self._same_optimizer:
                lines[key] = f"{lines[key]}; {line}" if key in lines else line
        by_layout = ", ".join(self._depend_on_layout)
        return lines | {
            name: f"{line}; this changes the result with {by_layout}"
            for name, line in self._layout_changes().items()
            if self._decides(name)
        }

    def reshaped(self) -> list[str]:
        """Return a line for each difference that only changes rounding."""
        run, saved, changes = self._run, self._saved, self._layout_changes().items()
        lines = [line for name, line in changes if name not in self._ordering_flags and not self._decides(name)]
        if saved["zero_stage"] != run.zero_stage:
            lines.append(f"zero_stage is {run.zero_stage}, was {saved['zero_stage']}")
        if self._same_optimizer:
            lines += [line for key, line in self._section_changes().items() if key == "optimizer"]
        return lines

    def unfit_states(self, path: Path) -> str | None:
        """Return the reason why the checkpoint at `path` can't be re-sharded for this run, or None."""
        run, saved = self._run, self._saved
        if (saved["world_size"], saved["zero_stage"]) == (run.world_size, run.zero_stage):
            return None
        where = (
            f"start {saved['world_size']} ranks at ZeRO-{saved['zero_stage']}, or give --resume never to start again"
        )
        optimizer, changes = run.deepspeed.get("optimizer"), "; ".join(self.reshaped())
        name = optimizer and optimizer_name(optimizer)
        if name in SHARDED or name == "Muon" or name in BITSANDBYTES:
            why = f"{name} sees shards instead of {SHARDED[name]}" if name in SHARDED else "Muon keeps whole matrices"
            if name in BITSANDBYTES:
                why = f"{name}'s 8-bit states have scales per block of a rank's shard"
            return f"{path} can't be resumed: {changes}, but {why}, so its states can't be re-sharded: {where}"
        if not has_layout(path):
            return (
                f"{path} can't be resumed: {changes}, but an earlier version saved it without a record of its "
                f"sharding: {where}"
            )
        return None

    def _section_changes(self) -> dict[str, str]:
        return {
            key: f"{key} in the DeepSpeed JSON is {json.dumps(value)}, was {json.dumps(before)}"
            for key, value in self._run.deepspeed.items()
            if (before := self._saved.get("deepspeed", {}).get(key)) != value
        }

    @property
    def _same_optimizer(self) -> bool:
        return _optimizer_of(vars(self._run)) == _optimizer_of(self._saved)

    @property
    def _depend_on_layout(self) -> list[str]:
        """List the flags of this run that make the loss, or a step's samples, depend on ranks and micro-batches."""
        flags = self._run.flags
        depend = {
            "--loss_reduction micro_batch": flags["loss_reduction"] == "micro_batch",
            "--steps_across_epochs": flags["steps_across_epochs"],
        }
        for name in (name for name, flag in declared_in(flags).items() if flag.of_micro_batch and name in flags):
            depend[f"--{name}"] = flags[name] != flag_default(name)
        return [flag for flag, is_given in depend.items() if is_given]

    def _decides(self, name: str) -> bool:
        """Return True if a change of a layout flag changes the trained model."""
        same_ranks = name == "world_size" and data_ranks(self._saved) == data_ranks(vars(self._run))
        flag: Flag | None = self._layout_flags.get(name)
        same_samples = same_ranks or (flag is not None and (flag.shares_samples or flag.resume == "placement"))
        return bool(self._depend_on_layout) and not same_samples

    def _layout_changes(self) -> dict[str, str]:
        run, saved = self._run, self._saved
        lines = {
            name: f"--{name} is {value}, was {before}"
            for name in self._layout_flags
            if (before := saved["flags"].get(name, flag_default(name)))
            != (value := run.flags.get(name, flag_default(name)))
        }
        if saved["world_size"] != run.world_size:
            lines["world_size"] = f"world_size is {run.world_size}, was {saved['world_size']}"
        return lines


def data_ranks(identity: dict) -> int:
    """Return the number of data-parallel ranks in an identity. Ranks that share samples count as one."""
    flags = identity["flags"]
    shared = (flags.get(name, 1) for name, flag in declared_in(flags).items() if flag.shares_samples)
    return identity["world_size"] // math.prod(shared)


def _optimizer_of(identity: dict) -> dict | None:
    """Return the optimizer block of an identity, or None for AdamW with the values of the flags.

    None means torch's AdamW or DeepSpeed's AdamW for states in CPU memory.
    """
    block, flags = identity.get("deepspeed", {}).get("optimizer"), identity["flags"]
    if block is None or optimizer_name(block) not in ("Adam", "AdamW"):
        return block
    params = dict(block.get("params", {}))
    by_flags = {
        "lr": flags.get("learning_rate"),
        "weight_decay": flags.get("weight_decay"),
        "betas": [flags.get("adam_beta1"), flags.get("adam_beta2")],
        "eps": flags.get("adam_epsilon"),
    }
    decoupled = params.pop("adam_w_mode", True)
    params.pop("torch_adam", None)
    if isinstance(params.get("betas"), tuple):
        params["betas"] = list(params["betas"])
    return None if decoupled and params == by_flags else block


def refuse_uneven(total: int, world_size: int) -> None:
    """Raise ConfigError if this number of ranks can't divide the samples of a step."""
    if total % world_size:
        shares = [str(n) for n in range(1, total + 1) if total % n == 0]
        raise ConfigError(
            f"the checkpoint being resumed uses {total} samples per step, and {world_size} ranks can't share them "
            f"evenly: start {', '.join(shares[:-1])} or {shares[-1]} ranks, or give --resume never to start again"
        )


def batch_size_hint(total: int, world_size: int) -> str:
    """Return a hint that names the flags with which a step keeps this number of samples."""
    share, rest = divmod(total, world_size)
    if rest or not share:
        return f"{world_size} ranks can't share the {total} samples of a step evenly: start another number of ranks"
    ways = [f"{share // n} x {n}" for n in range(1, share + 1) if share % n == 0]
    return (
        f"{total} samples per step on {world_size} ranks are --per_device_train_batch_size x "
        f"--gradient_accumulation_steps = {' or '.join(ways[:6])}; or give --train_batch_size {total} instead of "
        "--gradient_accumulation_steps"
    )


def permitted_changes(allowed: str, run: RunIdentity) -> set[str]:
    """Parse --allow_changed_flags. Raises ConfigError for names that are not compared on a resume.

    Flags of every extension are accepted, because an earlier start may have used the extension.
    """
    flags = every_flag()
    free = flags_free_on_resume(flags)
    known = {*run.flags, *run.deepspeed, "data", "world_size", *(name for name in flags if name not in free)}
    names = {name.strip().removeprefix("--") for name in allowed.split(",")}
    if names == {"all"}:
        return set(known)
    for name in sorted(names - set(known)):
        hint = did_you_mean(name, known, "give flag names separated by commas, or all")
        if name in free:
            hint = "its value does not change the result, leave it out"
        raise ConfigError(f"--allow_changed_flags {name} is not compared on a resume: {hint}")
    return names
