"""Resolve a DeepSpeed JSON and the flags to the configuration for deepspeed.initialize.

DeepSpeed 0.19 does not resolve "auto": it fails at some of these values, and silently reads others as false.
"""

import copy
import json
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from llava_ds.config.arguments import Arguments
from llava_ds.constants import ConfigError
from llava_ds.engine.ds_config.activation import resolve_activation_checkpointing, resolve_compile
from llava_ds.engine.ds_config.batch_sizes import resolve_batch
from llava_ds.engine.ds_config.draft import AUTO, Draft, as_json, open_keys, value_at
from llava_ds.engine.ds_config.optimizer import EIGHT_BIT_NAMES, FROM_FLAGS, offloads
from llava_ds.engine.ds_config.parallel import take_axes, with_axes
from llava_ds.engine.ds_config.precision import resolve_precision, torch_dtype
from llava_ds.engine.ds_config.scheduler import RATE_KEYS, kwargs_problem
from llava_ds.engine.ds_config.zero import resolve_zero
from llava_ds.extensions.active import flags_class, own_keys, reading
from llava_ds.files.reading import MAX_JSON_BYTES, read_bytes
from llava_ds.files.writing import can_be_made

DEEPEST = 20  # maximum depth of nested objects and lists
MONITORS = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}  # monitor -> its package
COMMENT = re.compile(
    r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|#[^\n]*|/\*.*?\*/', re.DOTALL
)  # strings match first, because they may contain these characters


@dataclass(frozen=True)
class ResolvedConfig:
    """The configuration for deepspeed.initialize, and the flags with values of the JSON filled in.

    reasons: why each filled-in key has its value; device_type: type of the training device, such as "cuda".
    """

    config: dict
    args: Arguments
    reasons: dict[str, str]
    device_type: str = "cpu"

    @property
    def zero_stage(self) -> int:
        return self.config["zero_optimization"].get("stage", 0)

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the stored parameters."""
        if self.config["bf16"]["enabled"]:
            return torch.bfloat16
        return torch.float16 if self.config["fp16"]["enabled"] else torch.float32

    @property
    def compute_dtype(self) -> torch.dtype:
        """The precision of matrix products and attention: autocast's if it is on."""
        autocast = self.config.get("torch_autocast", {})
        return torch_dtype(autocast["dtype"]) if autocast.get("enabled") else self.dtype

    def autocast(self, device: torch.device) -> torch.autocast:
        """Return a context in which models without an engine compute as the engine does."""
        enabled = self.config.get("torch_autocast", {}).get("enabled", False)
        return torch.autocast(device.type, self.compute_dtype, enabled=enabled)

    def explain(self) -> list[str]:
        """Return one line per filled value."""
        width = max((len(key) for key in self.reasons), default=0)
        return [f"  {key:{width}} = {value_at(self.config, key)!s:10} {why}" for key, why in self.reasons.items()]


def read_ds_config(path: str | Path) -> dict:
    """Read the JSON object in a file. Accepts any Hjson, for example comments and trailing commas, as DeepSpeed 0.19
    does (runtime/config.py). Raises ConfigError."""
    try:
        config = _parsed(read_bytes(path, MAX_JSON_BYTES).decode("utf-8-sig"))
    except ConfigError as error:
        raise ConfigError(f"--deepspeed_config {path}: {error}") from error
    except (
        OSError,
        ValueError,
        RecursionError,
    ) as error:  # ValueError: invalid JSON or UTF-8, or a number of 5,000 digits
        raise ConfigError(f"--deepspeed_config {path} can't be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"--deepspeed_config {path} holds a {type(config).__name__}: expected a JSON object")
    return config


def _parsed(text: str) -> object:
    """Parse text as JSON with comments, or else as Hjson. If both fail, raises json's error, because it is clearer."""
    try:
        return json.loads(COMMENT.sub(_blanked, text), object_pairs_hook=_each_key_once)
    except json.JSONDecodeError:
        import hjson  # DeepSpeed needs it

        try:
            config = hjson.loads(text, object_pairs_hook=_each_key_once)
        except (hjson.HjsonDecodeError, OverflowError, RecursionError):
            config = None
        # Only accept objects: Hjson reads even a line of prose as a string.
        if not isinstance(config, dict) or not text.lstrip().startswith(("{", "//", "#", "/*")):
            raise
        if _swallows(config, text):
            raise
        return config


def _swallows(config: object, text: str) -> bool:
    """True if an unquoted string contains JSON syntax: after a missing comma or quote, Hjson reads the whole line."""
    if isinstance(config, (dict, list)):
        return any(_swallows(value, text) for value in (config.values() if isinstance(config, dict) else config))
    if not isinstance(config, str) or not any(sign in config for sign in ',:{}[]"'):
        return False
    inner = json.dumps(config, ensure_ascii=False)[1:-1]
    return not any(f"{quote}{inner}{quote}" in text for quote in "\"'")


def _blanked(match: re.Match) -> str:
    """Return a string unchanged, and a comment as blanks, to keep line and column numbers."""
    found = match[0]
    return found if found.startswith('"') else re.sub(r"[^\n]", " ", found)


def _each_key_once(pairs: list[tuple[str, object]]) -> dict:
    keys = [key for key, _ in pairs]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise ConfigError(f"{twice[0]} occurs twice in one object: remove one, because only the last would count")
    return dict(pairs)


def resolve_ds_config(
    raw: dict,
    args: Arguments,
    *,
    dp: int,
    hidden_size: int,
    device_type: str = "cpu",
    num_steps: int | None = None,
    is_local: bool = True,
) -> ResolvedConfig:
    """Fill in every "auto" of a DeepSpeed JSON with the formulas of Hugging Face's integration.

    raw: the unresolved JSON; dp: number of data-parallel ranks; hidden_size: width of the language model; device_type:
    "cpu", "cuda" or the like; num_steps: optimizer steps of the run, None before the data is read (values that depend
    on it then stay open); is_local: True if this machine trains, so its packages and compilers are checked. Returned
    flags have the JSON's values. Raises ConfigError for conflicts. Source: transformers, integrations/deepspeed.py.
    """
    draft = _draft(raw, args, dp, hidden_size, device_type, is_local=is_local)
    _resolve_precision_and_axes(draft)
    resolve_batch(draft)
    resolve_zero(draft)
    resolve_optimizer(draft)
    resolve_scheduler(draft, num_steps)
    resolve_activation_checkpointing(draft)
    resolve_compile(draft)
    resolve_monitoring(draft)
    for line in (line for flags in args.own.values() for line in flags.json_problems(draft.config)):
        draft.refuse(line)
    if draft.get("timers.throughput.enabled") is None:
        why = "DeepSpeed's timer would wait for the device twice per micro-step"
        draft.fill("timers.throughput.enabled", False, why)
    # engine/non_finite.py replaces DeepSpeed's check of gradients if the norm is computed and AdamW is torch's fused.
    normed = draft.get("zero_optimization.compute_grad_norm") is not False
    guarded = "optimizer" not in draft.config and not offloads(draft) and normed
    if draft.get("bf16.enabled") is True and draft.is_open("bf16.check_grad_overflow") and guarded:
        why = "non-finite gradients are skipped without waiting for the device"
        draft.fill("bf16.check_grad_overflow", False, why)
    _refuse_open(draft)
    if draft.problems:
        raise ConfigError("\n".join(draft.problems))
    return ResolvedConfig(draft.config, draft.args, draft.reasons, device_type)


def _refuse_open(draft: Draft) -> None:
    """Refuse values that are still "auto", except in a block of a refused type, where their meaning is unknown."""
    from llava_ds.engine.ds_config.schema import default_of

    refused = tuple(f"{block}.params." for block in ("optimizer", "scheduler") if f"{block}.type" in draft.wrong)
    for key in open_keys(draft.config):
        if key in draft.ruled | draft.wrong or key.startswith(refused):
            continue
        default = default_of(key)
        leave_out = "" if default is None else f"leave it out for DeepSpeed's default, {as_json(default)}, or "
        draft.refuse(
            f"{key} is \"auto\", but Hugging Face's integration and DeepSpeed don't fill it in: {leave_out}write a "
            "value"
        )


def flags_in(raw: dict) -> dict[str, str]:
    """Return "key value" for each flag whose value is in the JSON, by flag."""
    keys = {
        "train_batch_size": "train_batch_size",
        "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
        "gradient_accumulation_steps": "gradient_accumulation_steps",
        "gradient_clipping": "max_grad_norm",
        "bf16.enabled": "bf16",
        "fp16.enabled": "fp16",
        **{f"optimizer.params.{key}": flag for key, flags in FROM_FLAGS.items() for flag in flags},
        **{f"scheduler.params.{key}": "learning_rate" for key in RATE_KEYS.values()},
        **{key: flag for name in reading(raw) for key, flag in flags_class(name).keys.items()},
    }
    found = {flag: (key, value_at(raw, key)) for key, flag in keys.items() if value_at(raw, key) not in (None, AUTO)}
    return {flag: f"{key} {as_json(value)}" for flag, (key, value) in found.items()}


def axes_from(raw: dict, args: Arguments) -> Arguments:
    """Return the flags with the JSON's axis sizes. Called before the ranks connect.

    If a size is invalid, raises ConfigError that also lists the problems of the JSON that can be found at that time.
    """
    try:
        return with_axes(args, raw)
    except ConfigError:
        draft = _draft(raw, args, 1, 1, "cuda" if torch.cuda.is_available() else "cpu", is_local=False)
        _resolve_precision_and_axes(draft)
        resolve_optimizer(draft)
        resolve_scheduler(draft, None)
        raise ConfigError("\n".join(draft.problems)) from None


def _draft(raw: dict, args: Arguments, dp: int, hidden_size: int, device_type: str, *, is_local: bool) -> Draft:
    """Make a draft from a copy of the JSON. Raises ConfigError if it is nested too deeply."""
    if _depth(raw) > DEEPEST:
        raise ConfigError(f"the DeepSpeed JSON is nested deeper than {DEEPEST} levels, the most that valid keys need")
    return Draft(copy.deepcopy(raw), args, dp, hidden_size, device_type, is_local)


def _resolve_precision_and_axes(draft: Draft) -> None:
    from llava_ds.engine.ds_config.keys import check_keys  # importing DeepSpeed takes seconds and prints

    own = {key: draft.config.pop(key) for key in own_keys() if key in draft.config}
    check_keys(draft)
    resolve_precision(draft)
    draft.agree("gradient_clipping", "max_grad_norm")
    take_axes(draft, own)


def _depth(value: object) -> int:
    """Return the depth of nested objects and lists, counted up to DEEPEST + 1."""
    level, depth = [value], 0
    while level and depth <= DEEPEST:
        level = [
            item
            for holder in level
            if isinstance(holder, (dict, list))
            for item in (holder.values() if isinstance(holder, dict) else holder)
        ]
        depth += 1
    return depth


def resolve_optimizer(draft: Draft) -> None:
    """Fill in the optimizer block from the flags, and refuse optimizers that can't be used.

    If the JSON has no block, the run uses the optimizer of --optim. For adamw_torch this is torch's AdamW, but with
    optimizer offload DeepSpeed's CPU Adam, unless zero_force_ds_cpu_optimizer is false.
    """
    optim = draft.args.training.optim
    if "optimizer" not in draft.config:
        if optim != "adamw_torch":
            draft.fill("optimizer.type", EIGHT_BIT_NAMES[optim], f"--optim {optim}")
        elif offloads(draft) and draft.get("zero_force_ds_cpu_optimizer") is not False:
            draft.fill("optimizer.type", "AdamW", "under offload DeepSpeed's CPU Adam is fastest")
        else:
            return
    from llava_ds.engine.ds_config.optimizer_block import resolve_block

    resolve_block(draft)


def resolve_scheduler(draft: Draft, num_steps: int | None) -> None:
    """Fill in the scheduler block from the flags, and refuse invalid values. Without a block, check the kwargs flag.

    num_steps: optimizer steps of the run; None if unknown (values that depend on it stay open). The flag is
    --lr_scheduler_kwargs.
    """
    if "scheduler" not in draft.config:
        if problem := kwargs_problem(draft.args.training):
            draft.refuse(problem)
        return
    from llava_ds.engine.ds_config.scheduler_block import resolve_block

    resolve_block(draft, num_steps)


def resolve_monitoring(draft: Draft) -> None:
    """Fill in the output folders of DeepSpeed's monitors, and refuse monitors whose package is missing."""
    for section, package in MONITORS.items():
        if draft.is_local and draft.get(f"{section}.enabled") and find_spec(package) is None:
            draft.refuse(
                f"{section}.enabled is true in the DeepSpeed JSON, but {package} is not installed: "
                f"pip install {package}, or write false"
            )
    for section in ("tensorboard", "csv_monitor"):
        if draft.get(f"{section}.enabled") and not draft.get(f"{section}.output_path"):
            draft.fill(f"{section}.output_path", str(draft.args.training.output_dir), "--output_dir")
        path = draft.get(f"{section}.output_path")
        if draft.is_local and draft.get(f"{section}.enabled") and path and not can_be_made(path):
            draft.refuse(f"{section}.output_path {path} can't be written to: name another folder")
    if draft.get("dump_state") and draft.get("log_level") is None:
        draft.fill("log_level", "info", "dump_state prints at this level")
