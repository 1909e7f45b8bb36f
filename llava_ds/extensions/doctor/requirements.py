"""Findings of checks, and the requirements of flags and DeepSpeed JSON on a machine."""

import math
import os
import re
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from llava_ds.constants import ConfigError

OK, WARNING, PROBLEM = "ok", "warning", "problem"

HIDDEN_SIZE = 4096  # a 7B model's value, needed to resolve the JSON; no check depends on it


@dataclass(frozen=True)
class Finding:
    """One result of a check. level: OK, WARNING if training can start nevertheless, or PROBLEM if it can't."""

    level: str
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Requirements:
    """Folders and DeepSpeed JSON of a run, and their requirements.

    Only checks with needs_imports may use the properties that depend on the JSON, because these import DeepSpeed.
    config: the resolved JSON, None if no JSON is given or training would refuse it; config_problems: why it would
    refuse it; ops: the compiled DeepSpeed operators that training would load, with the JSON keys that need them;
    nvme_paths: the offload folders, with their JSON keys.
    """

    output_dir: Path
    cache_dir: Path
    ds_config: Path | None = None

    @property
    def device_type(self) -> str:
        """Device type that ranks would train on: cuda or cpu."""
        import torch

        return "cuda" if torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR", "cuda") == "cuda" else "cpu"

    @property
    def config(self) -> dict | None:
        return self._resolved[0]

    @property
    def config_problems(self) -> list[Finding]:
        return self._resolved[1]

    @cached_property
    def ops(self) -> dict[str, str]:
        from llava_ds.engine.ds_config.optimizer import kernels_of

        return {} if self.config is None else kernels_of(self.config)

    @cached_property
    def nvme_paths(self) -> dict[str, str]:
        from llava_ds.engine.ds_config.zero import OFFLOADED, offload_device

        return {
            str(self.config["zero_optimization"][part]["nvme_path"]): f"zero_optimization.{part}.nvme_path"
            for part in OFFLOADED
            if self.config is not None and offload_device(self.config, part) == "nvme"
        }

    @cached_property
    def _resolved(self) -> tuple[dict | None, list[Finding]]:
        if self.ds_config is None:
            return None, []
        from llava_ds.config.parsing import parse_arguments
        from llava_ds.engine.ds_config.resolve import read_ds_config, resolve_ds_config

        try:
            raw = read_ds_config(self.ds_config)
        except ConfigError as error:
            return None, [Finding(PROBLEM, str(error), "correct the file; ds_configs/ has valid ones")]
        args, _ = parse_arguments(["--output_dir", str(self.output_dir)], to_train=False)
        machine = {"dp": _fitting_ranks(raw), "device_type": self.device_type, "is_local": True}
        try:
            return resolve_ds_config(raw, args, hidden_size=HIDDEN_SIZE, **machine).config, []
        except ConfigError as error:
            return None, [_refused(line) for line in str(error).splitlines()]


def _fitting_ranks(raw: dict) -> int:
    """Return a number of ranks that fits the JSON's batch sizes and groups, because the real number is unknown."""

    def count(value: object) -> int:
        return value if type(value) is int and value > 0 else 1

    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    zero = raw.get("zero_optimization")
    ranks = count(zero.get("zero_hpz_partition_size")) if isinstance(zero, dict) else 1
    if all(type(raw.get(key)) is int for key in keys):
        total, micro, accumulation = (count(raw[key]) for key in keys)
        share, rest = divmod(total, micro * accumulation)
        ranks = math.lcm(ranks, share) if share and not rest else ranks
    return ranks


def _refused(line: str) -> Finding:
    """Split a ConfigError's line into finding and remedy, at the last colon outside a JSON key."""
    found, remedy = re.fullmatch(r'(?:(.*[^"]): )?(.*)', line).groups()
    return Finding(PROBLEM, found, remedy) if found else Finding(PROBLEM, line, "correct the JSON")


def output_of(*command: str, timeout_s: float = 20.0) -> str | None:
    """Return a command's output; None if it is missing, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
