"""The DeepSpeed JSON as a contract: every "auto" filled from the flags, every conflict reported together.

DeepSpeed itself does not resolve "auto": some keys fail, others are silently taken as false (0.19).
"""

import copy
import difflib
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from llava_ds.arguments import Arguments
from llava_ds.constants import ConfigError

# Sections that this trainer builds itself or does not drive yet; passing them on would train something else.
NOT_DRIVEN = {
    "optimizer": "the optimizer is AdamW by --learning_rate, --weight_decay, --adam_beta1, --adam_beta2",
    "scheduler": "the schedule comes from --lr_scheduler_type and --warmup_ratio",
    "amp": "use --bf16 or --fp16",
}
# Top-level keys that DeepSpeed 0.19 reads; it ignores all others silently.
KNOWN_KEYS = {
    "activation_checkpointing", "aio", "amp", "autotuning", "bf16", "checkpoint", "comet", "comms_logger",
    "communication_data_type", "compile", "csv_monitor", "data_efficiency", "data_types", "dataloader_drop_last",
    "disable_allgather", "dump_state", "eigenvalue", "elasticity", "expert_parallel", "flops_profiler", "fp16",
    "gradient_accumulation_steps", "gradient_clipping", "gradient_predivide_factor", "hybrid_engine",
    "keep_in_fp32_modules", "managed_gradient_accumulation", "memory_breakdown", "optimizer", "pipeline",
    "prescale_gradients", "scheduler", "seq_parallel_communication_data_type", "sequence_parallel_size",
    "steps_per_print", "tensor_parallel", "tensorboard", "timers", "torch_autocast", "train_batch_size",
    "train_micro_batch_size_per_gpu", "use_data_before_expert_parallelism", "use_node_local_storage",
    "vocabulary_size", "wall_clock_breakdown", "wandb", "weight_quantization", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer", "zero_optimization",
}  # fmt: skip
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
NOT_DRIVEN_IN_ZERO = ("offload_optimizer", "offload_param")


@dataclass(frozen=True)
class ResolvedConfig:
    """What goes to deepspeed.initialize, the flags as the JSON completed them, and why each value was filled."""

    config: dict
    args: Arguments
    reasons: dict[str, str]

    @property
    def zero_stage(self) -> int:
        return self.config["zero_optimization"].get("stage", 0)

    @property
    def dtype(self) -> torch.dtype:
        """The precision that parameters are held in."""
        if self.config["bf16"]["enabled"]:
            return torch.bfloat16
        return torch.float16 if self.config["fp16"]["enabled"] else torch.float32

    def explain(self) -> list[str]:
        """One line per filled value."""
        width = max((len(key) for key in self.reasons), default=0)
        return [f"  {key:{width}} = {_get(self.config, key)!s:10} {why}" for key, why in self.reasons.items()]


def read_ds_config(path: str | Path) -> dict:
    """The JSON object in a file. Raises ConfigError when it is not one."""
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"--deepspeed_config {path} can't be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"--deepspeed_config {path} holds a {type(config).__name__}: expected a JSON object")
    return config


def resolve_ds_config(
    raw: dict, args: Arguments, *, world_size: int, hidden_size: int, device_type: str = "cpu"
) -> ResolvedConfig:
    """Fill every "auto" of a DeepSpeed JSON by the formulas of Hugging Face's integration.

    raw: the JSON as read; hidden_size: the language model's width; device_type: "cpu" or the accelerator's. A value
    in the JSON that no flag contradicts is taken over into the returned flags. Raises ConfigError, which lists every
    conflict.
    Source: transformers, integrations/deepspeed.py.
    """
    config = copy.deepcopy(raw)
    reasons: dict[str, str] = {}
    problems = [f"{key} in the DeepSpeed JSON: remove it, {why}" for key, why in NOT_DRIVEN.items() if key in config]
    for key in sorted(set(config) - KNOWN_KEYS):
        nearest = difflib.get_close_matches(key, KNOWN_KEYS, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else "DeepSpeed would ignore it, remove it"
        problems.append(f"{key} in the DeepSpeed JSON is no key of DeepSpeed's: {hint}")
    zero = config.setdefault("zero_optimization", {"stage": 0})
    for section in ("zero_optimization", "bf16", "fp16", "timers"):
        if not isinstance(config.setdefault(section, {}), dict):
            raise ConfigError(f"{section} in the DeepSpeed JSON is {config[section]!r}: expected an object")
    throughput = config["timers"].setdefault("throughput", {})
    if not isinstance(throughput, dict):
        raise ConfigError(f"timers.throughput in the DeepSpeed JSON is {throughput!r}: expected an object")
    problems += [
        f"zero_optimization.{key} in the DeepSpeed JSON: offload is not supported yet, remove it"
        for key in NOT_DRIVEN_IN_ZERO
        if key in zero
    ]

    def fill(key: str, value: object, why: str) -> None:
        _set(config, key, value)
        reasons[key] = why

    def agree(key: str, flag: str) -> object:
        """One value for a JSON key and a flag: the flag's where the JSON says auto or nothing, else the JSON's."""
        nonlocal args
        written, wanted = _get(config, key), args.as_dict()[flag]
        if written in (None, "auto"):
            fill(key, wanted, f"--{flag}")
            return wanted
        if isinstance(wanted, bool):
            fits, kind = isinstance(written, bool), "true or false"
        else:
            number = isinstance(written, (int, float)) and not isinstance(written, bool)
            fits, kind = number and 0 <= written < float("inf"), "a number from 0"
        if not fits:
            problems.append(f'{key} is {_json(written)} in the DeepSpeed JSON: write {kind}, or "auto"')
            return wanted
        if written != wanted and flag in args.given:
            problems.append(
                f"{key} is {_json(written)} in the DeepSpeed JSON but --{flag} is {wanted}: "
                'make them equal, or write "auto"'
            )
        else:
            args = args.replaced(**{flag: written})
        return written

    bf16, fp16 = agree("bf16.enabled", "bf16"), agree("fp16.enabled", "fp16")
    if bf16 is True and fp16 is True:
        problems.append("bf16.enabled and fp16.enabled are both true: choose one")
    if fp16 is True and device_type == "cpu":
        problems.append(
            "fp16 is on, but there is no GPU and DeepSpeed trains in float16 on GPUs only: use --bf16 or fp32"
        )
    agree("gradient_clipping", "max_grad_norm")
    batch_problems: list[str] = []
    args = _agree_on_batch(config, args, world_size, fill, batch_problems)
    problems += batch_problems

    stage = zero.get("stage", 0)
    if not isinstance(stage, int) or stage not in (0, 1, 2, 3):
        problems.append(f"zero_optimization.stage is {_json(stage)}: write 0, 1, 2 or 3")
    elif stage == 0 and (bf16 is True or fp16 is True):
        problems.append(
            "zero_optimization.stage is 0 with bf16 or fp16, where DeepSpeed takes an optimizer step before training: "
            "use ds_configs/zero1.json, which holds the same and shards the optimizer"
        )
    for key, value, formula in (
        ("reduce_bucket_size", hidden_size * hidden_size, "hidden size squared"),
        ("stage3_prefetch_bucket_size", int(0.9 * hidden_size * hidden_size), "0.9 x hidden size squared"),
        ("stage3_param_persistence_threshold", 10 * hidden_size, "10 x hidden size"),
    ):
        if zero.get(key) == "auto":
            fill(f"zero_optimization.{key}", value, f"{formula} ({hidden_size})")
    if _get(config, "timers.throughput.enabled") is None:
        fill("timers.throughput.enabled", False, "DeepSpeed's timer would wait for the device twice per micro-step")

    left = [key for key in _auto_keys(config) if key not in reasons and not (batch_problems and key in BATCH_KEYS)]
    problems += [f'{key} is "auto", for which there is no rule: write a value' for key in left]
    if problems:
        raise ConfigError("\n".join(problems))
    return ResolvedConfig(config, args, reasons)


def _agree_on_batch(config: dict, args: Arguments, world_size: int, fill, problems: list[str]) -> Arguments:
    """Fill the three batch keys so that train_batch_size = micro x accumulation x ranks."""
    keys = {
        "train_batch_size": "train_batch_size",
        "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
        "gradient_accumulation_steps": "gradient_accumulation_steps",
    }
    fixed: dict[str, int] = {}  # what the JSON or the user fixed, by flag
    flags = args.as_dict()
    for key, flag in keys.items():
        written = config.get(key)
        if written in (None, "auto"):
            if flag in args.given:
                fixed[flag] = flags[flag]
        elif not isinstance(written, int) or isinstance(written, bool) or written < 1:
            problems.append(f'{key} is {_json(written)} in the DeepSpeed JSON: write a whole number above 0, or "auto"')
        elif flag in args.given and flags[flag] != written:
            problems.append(
                f"{key} is {written} in the DeepSpeed JSON but --{flag} is {flags[flag]}: "
                'make them equal, or write "auto"'
            )
        else:
            fixed[flag] = written
    if problems:
        return args  # what follows would only repeat the conflict in other words

    total = fixed.get("train_batch_size", flags["train_batch_size"])
    if "train_batch_size" not in fixed and {"per_device_train_batch_size", "gradient_accumulation_steps"} <= set(fixed):
        total = None  # the user's two numbers win over a default total
    micro = fixed.get("per_device_train_batch_size", flags["per_device_train_batch_size"])
    accumulation = fixed.get("gradient_accumulation_steps")
    why = "--per_device_train_batch_size", "--gradient_accumulation_steps"
    if total is None:
        accumulation = accumulation or flags["gradient_accumulation_steps"]
        total = micro * accumulation * world_size
        total_why = f"micro x accumulation x {world_size} ranks"
    else:
        total_why = "--train_batch_size"
        share, rest = divmod(total, world_size)
        if rest or share == 0:
            below, above = total - rest, total - rest + world_size
            nearest = f"{below} or {above}" if below else f"{above}"
            problems.append(
                f"train_batch_size is {total}, which {world_size} ranks can't share evenly: give {nearest}, or start "
                "another number of ranks"
            )
            return args
        if accumulation is None and isinstance(config.get("train_micro_batch_size_per_gpu"), int):
            accumulation = max(1, share // micro)
        elif accumulation is None:
            # per_device_train_batch_size bounds the micro-batch: take the largest divisor of the share within it.
            micro = max(m for m in range(1, min(micro, share) + 1) if share % m == 0)
            accumulation = share // micro
            why = (f"largest within --per_device_train_batch_size that divides {share}", "what is left to reach it")
        elif "per_device_train_batch_size" not in fixed and share % accumulation == 0:
            micro = share // accumulation
        if micro * accumulation * world_size != total:
            problems.append(
                f"train_batch_size is {total}, but {micro} samples per micro-batch x {accumulation} micro-batches x "
                f"{world_size} ranks are {micro * accumulation * world_size}: leave one of the three out"
            )
    for key, value, reason in zip(keys, (total, micro, accumulation), (total_why, *why)):
        if config.get(key) in (None, "auto") or config[key] != value:
            fill(key, value, reason)
    return args.replaced(
        train_batch_size=total, per_device_train_batch_size=micro, gradient_accumulation_steps=accumulation
    )


def check_engine(engine, resolved: ResolvedConfig) -> None:
    """Compare what the engine understood with what was meant. Raises ConfigError on any difference."""
    config = resolved.config
    understood = {
        "train_batch_size": (engine.train_batch_size(), config["train_batch_size"]),
        "train_micro_batch_size_per_gpu": (
            engine.train_micro_batch_size_per_gpu(),
            config["train_micro_batch_size_per_gpu"],
        ),
        "gradient_accumulation_steps": (engine.gradient_accumulation_steps(), config["gradient_accumulation_steps"]),
        "zero_optimization.stage": (engine.zero_optimization_stage(), resolved.zero_stage),
        "gradient_clipping": (engine.gradient_clipping(), config["gradient_clipping"]),
        "dtype": (engine.get_data_types()[0], resolved.dtype),
    }
    wrong = [
        f"{key}: {got} in the engine, {meant} in the resolved JSON"
        for key, (got, meant) in understood.items()
        if got != meant
    ]
    if wrong:
        raise ConfigError("DeepSpeed understood its configuration differently:\n" + "\n".join(wrong))


def _get(config: dict, key: str) -> object:
    value: object = config
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            return None
        value = value[part]
    return value


def _set(config: dict, key: str, value: object) -> None:
    *path, last = key.split(".")
    for part in path:
        config = config.setdefault(part, {})
    config[last] = value


def _auto_keys(config: dict, prefix: str = "") -> list[str]:
    found = []
    for key, value in config.items():
        if isinstance(value, dict):
            found += _auto_keys(value, f"{prefix}{key}.")
        elif value == "auto":
            found.append(prefix + key)
    return found


def _json(value: object) -> str:
    return json.dumps(value)
