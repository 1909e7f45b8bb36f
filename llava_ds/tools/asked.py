"""What a check has to say, and what a run will ask of the machine as far as flags and the DeepSpeed JSON tell."""

import os
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

OK, WARNING, PROBLEM = "ok", "warning", "problem"

# What DeepSpeed builds for an optimizer in the JSON: where its states stay on the device, and where they are offloaded.
OPTIMIZER_OPS = {
    "adam": ("fused_adam", "cpu_adam"),
    "adamw": ("fused_adam", "cpu_adam"),
    "adagrad": (None, "cpu_adagrad"),
    "lion": ("fused_lion", "cpu_lion"),
    "lamb": ("fused_lamb", None),
}


@dataclass(frozen=True)
class Finding:
    """One thing that a check found: ok; a warning, with which training starts; a problem, with which it can't."""

    level: str
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Asked:
    """Where the run would write, and the DeepSpeed JSON as it is on disk (None: none was named)."""

    output_dir: Path
    cache_dir: Path
    config: dict | None = None

    @cached_property
    def ops(self) -> dict[str, str]:
        """The compiled operators of DeepSpeed that the JSON asks for, and by what."""
        config = self.config or {}
        optimizer, found = _section(config, "optimizer"), {}
        offload = self._offload("offload_optimizer")
        name = str(optimizer.get("type", "adamw" if offload else "")).lower()
        own_adam = _section(optimizer, "params").get("torch_adam") is True
        # Without an optimizer in the JSON, offload takes DeepSpeed's Adam unless the JSON says that it need not.
        if optimizer or config.get("zero_force_ds_cpu_optimizer", True) is not False:
            op = OPTIMIZER_OPS.get(name, (None, None))[offload is not None]
            if op is not None and not own_adam:
                found[op] = "zero_optimization.offload_optimizer" if offload else f"optimizer.type {optimizer['type']}"
        for key in ("offload_optimizer", "offload_param"):
            if self._offload(key) == "nvme":
                found["async_io"] = f"zero_optimization.{key}.device nvme"
        return found

    @cached_property
    def nvme_paths(self) -> dict[str, str]:
        """The folders that are offloaded to, and the JSON's keys that name them."""
        zero, found = _section(self.config or {}, "zero_optimization"), {}
        for key in ("offload_optimizer", "offload_param"):
            if self._offload(key) == "nvme":
                found[str(_section(zero, key).get("nvme_path"))] = f"zero_optimization.{key}.nvme_path"
        return found

    def wants(self, precision: str) -> bool:
        """Whether the JSON itself turns "bf16" or "fp16" on; "auto" leaves it to the flags."""
        return _section(self.config or {}, precision).get("enabled") is True

    def _offload(self, key: str) -> str | None:
        device = _section(_section(self.config or {}, "zero_optimization"), key).get("device")
        return device if device in ("cpu", "nvme") else None


def _section(config: dict, key: str) -> dict:
    """A section of the JSON; empty where there is none, or no object, which run/train.py refuses."""
    section = config.get(key)
    return section if isinstance(section, dict) else {}


def output_of(*command: str, timeout_s: float = 20.0) -> str | None:
    """What a command prints; None where it is not there, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def nearest_folder(path: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    path = path.expanduser().absolute()
    while not path.exists():
        path = path.parent
    return path


def can_be_written(path: Path) -> bool:
    """Whether the folder may be written to, or made."""
    nearest = nearest_folder(path)
    return nearest.is_dir() and os.access(nearest, os.W_OK)
