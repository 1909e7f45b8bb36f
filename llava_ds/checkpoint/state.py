"""What a checkpoint holds beside the engine's part, and how a run goes on from it."""

import dataclasses
import hashlib
import json
import random
import time
from pathlib import Path

import numpy as np
import torch

from llava_ds.arguments import Arguments
from llava_ds.checkpoint import commit, safe_load
from llava_ds.constants import ConfigError
from llava_ds.distributed import Ranks, barrier
from llava_ds.ds_config.zero import offload_device
from llava_ds.model.lora import ADAPTER_CONFIG, NON_LORA, adapter_file

ENGINE = "engine"  # the tag under which DeepSpeed writes its part
TRAINER = "trainer.json"

# Flags that say where a run lies or how it is watched: another value gives the same model.
FREE_FLAGS = {
    "output_dir", "resume", "logging_steps", "save_strategy", "save_steps", "save_total_limit", "cache_dir",
    "dataloader_num_workers", "deepspeed_config", "max_image_pixels", "model_name_or_path", "model_base",
    "vision_tower", "data_path", "image_folder", "video_folder", "pretrain_mm_mlp_adapter", "lora_weight_path",
    "preprocessing_num_workers", "on_bad_sample", "max_bad_fraction", "dry_run", "export_format",
    "max_shard_size", "watchdog_start_s", "watchdog_step_s", "watchdog_save_s",
    # Which layers run again in backward changes no result: what runs out of memory goes on with other values.
    "gradient_checkpointing", "gradient_checkpointing_every_n_layers", "activation_memory_gb",
}  # fmt: skip


SETTINGS = ("config.json", "adapter_config.json")  # of a model's folder, which has at least one

# Sections of the DeepSpeed JSON that change what is trained; the others change how fast, or where things lie.
DECIDING_SECTIONS = (
    "optimizer", "scheduler", "bf16", "fp16", "torch_autocast", "data_types", "communication_data_type",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RunIdentity:
    """All that has to be the same for a resumed run to end in the same model."""

    flags: dict[str, object]
    data: str  # fingerprint of the encoded samples
    world_size: int
    zero_stage: int
    deepspeed: dict[str, object]  # what the DeepSpeed JSON says beside the flags, and decides about the result
    optimizer_on_nvme: bool = False

    @classmethod
    def of(cls, args: Arguments, data: str, world_size: int, ds_config: dict) -> "RunIdentity":
        flags = {name: value for name, value in args.as_dict().items() if name not in FREE_FLAGS}
        # What lies behind a path counts, not the path.
        projector = args.model.pretrain_mm_mlp_adapter
        flags["pretrain_mm_mlp_adapter"] = projector and commit.sha256(Path(projector))
        for name in ("model_name_or_path", "model_base", "vision_tower"):
            folder = getattr(args.model, name)
            flags[name] = folder and folder_digest(Path(folder))
        if args.model.lora_weight_path is not None:
            flags["lora_weight_path"] = adapter_digest(Path(args.model.lora_weight_path))
        zero_stage = ds_config["zero_optimization"].get("stage", 0)
        deciding = {key: ds_config.get(key) for key in DECIDING_SECTIONS}
        on_nvme = offload_device(ds_config, "offload_optimizer") == "nvme"
        return cls(flags, data, world_size, zero_stage, deciding, on_nvme)

    def differences(self, saved: dict) -> list[str]:
        """A line for everything that a saved identity (as read from JSON) has differently."""
        lines = [
            f"--{name} is {value}, was {saved['flags'].get(name)}"
            for name, value in self.flags.items()
            if saved["flags"].get(name) != value
        ]
        if saved["data"] != self.data:
            lines.append("the data set (or its encoding) is another one")
        for name in ("world_size", "zero_stage"):
            if saved[name] != getattr(self, name):
                lines.append(f"{name} is {getattr(self, name)}, was {saved[name]}")
        lines += [
            f"{key} in the DeepSpeed JSON is {json.dumps(value)}, was {json.dumps(before)}"
            for key, value in self.deepspeed.items()
            if (before := saved.get("deepspeed", {}).get(key)) != value
        ]
        return lines


def folder_digest(folder: Path) -> str:
    """A hash of a model folder's settings and of its weight files' names and sizes (not of gigabytes of weights)."""
    weights = [path for pattern in ("*.safetensors", "*.bin") for path in folder.glob(pattern)]
    listed = sorted((path.name, path.stat().st_size) for path in weights)
    settings = [file.read_bytes() for name in SETTINGS if (file := folder / name).is_file()]
    return hashlib.sha256(repr((*settings, listed)).encode()).hexdigest()


def adapter_digest(folder: Path) -> str:
    """A hash of an adapter folder: its settings, its weights, and the projector beside them."""
    files = [folder / ADAPTER_CONFIG, adapter_file(folder), folder / NON_LORA]
    listed = [(file.name, commit.sha256(file)) for file in files if file is not None and file.is_file()]
    return hashlib.sha256(repr(listed).encode()).hexdigest()


def save(engine, output_dir: Path, step: int, identity: RunIdentity, limit: int | None, ranks: Ranks) -> Path:
    """Write checkpoint-<step>: engine, random states of every rank, counters. All ranks call it together."""
    scratch = commit.begin(output_dir, step, ranks)
    # DeepSpeed's own "latest" file may name a torn checkpoint: the manifest takes its place. Frozen parameters come
    # from their source again, so they are not written.
    engine.save_checkpoint(str(scratch), tag=ENGINE, save_latest=False, exclude_frozen_parameters=True)
    torch.save(_random_states(ranks.device), scratch / f"random-{ranks.rank}.pt")
    if ranks.is_first:
        trainer = {"step": step, "identity": dataclasses.asdict(identity)}
        (scratch / TRAINER).write_text(json.dumps(trainer, indent=1), encoding="utf-8")
    path = commit.commit(scratch, ranks)
    if ranks.is_first:
        commit.keep_newest(output_dir, limit)
    return path


@dataclasses.dataclass(frozen=True)
class ResumePoint:
    """Where to go on: a checkpoint and its counters; path is None for a fresh start."""

    path: Path | None = None
    step: int = 0


def saved_identity(resume: str, output_dir: Path) -> dict[str, object]:
    """The identity of the run that a resume would go on with, as its newest checkpoint has it; {} for a fresh start.

    Not of what was verified: for values that a run chose for itself and has to keep.
    """
    paths = {"auto": commit.checkpoints(output_dir), "never": []}.get(resume, [Path(resume)])
    for path in paths:
        try:
            return json.loads((path / TRAINER).read_text(encoding="utf-8"))["identity"]
        except (OSError, ValueError, KeyError):
            continue  # a damaged one, which is refused, and said so, where it is looked for
    return {}


def find_resume_point(resume: str, output_dir: Path, identity: RunIdentity) -> tuple[ResumePoint, list[str]]:
    """The checkpoint that --resume asks for, and lines to print. Raises ConfigError when it can't be gone on from."""
    if resume == "never":
        return ResumePoint(), []
    if resume == "auto":
        path, lines = commit.newest_whole(output_dir)
        if path is None:
            return ResumePoint(), lines
    else:
        path, lines = Path(resume), []
        problem = commit.problem_with(path) if path.is_dir() else "there is no such folder"
        if problem is not None:
            raise ConfigError(f"--resume {resume} can't be used: {problem}")
    if identity.optimizer_on_nvme:
        # DeepSpeed 0.19.8 goes on with a rate of 0, and without the states that never left memory.
        raise ConfigError(
            f"{path} can't be gone on from: DeepSpeed does not bring an optimizer back that lies on NVMe. Give "
            '--resume never to start again, or offload_optimizer to "cpu", which a run has to begin with'
        )
    trainer = json.loads((path / TRAINER).read_text(encoding="utf-8"))
    differences = identity.differences(trainer["identity"])
    if differences:
        raise ConfigError(
            f"{path} is a checkpoint of a run with other settings, which would not end in the same model:\n"
            + "\n".join(f"  {line}" for line in differences)
            + "\ngive the same settings, another --output_dir, or --resume never to start again"
        )
    return ResumePoint(path, trainer["step"]), [*lines, f"resuming from {path}"]


def set_aside(output_dir: Path, point: ResumePoint, ranks: Ranks) -> None:
    """Move what lies ahead of the point to a folder of its own: later checkpoints, and the metrics of a fresh start.

    They are another run's, or damaged: left where they are, a later resume or clean-up would take them for this one's.
    """
    if ranks.is_first:
        ahead = [path for path in commit.checkpoints(output_dir) if commit.step_of(path) > point.step]
        if point.path is None:
            ahead += output_dir.glob("metrics.jsonl")
        if ahead:
            target = output_dir / time.strftime("previous-%Y%m%d-%H%M%S")
            target.mkdir()
            for path in ahead:
                path.rename(target / path.name)
            print(f"what an earlier run left is now in {target}: {', '.join(path.name for path in ahead)}", flush=True)
    barrier(ranks)


def restore(engine, point: ResumePoint, ranks: Ranks) -> None:
    """Bring the engine and this rank's random states to where the checkpoint was saved."""
    with safe_load.without_code(point.path):
        loaded, _ = engine.load_checkpoint(str(point.path), tag=ENGINE, load_module_strict=False)
    if loaded is None:
        raise RuntimeError(f"DeepSpeed loaded nothing from {point.path}")
    states = safe_load.load(point.path / f"random-{ranks.rank}.pt")
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if ranks.device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], ranks.device)


def _random_states(device: torch.device) -> dict[str, object]:
    """The generators' states as plain numbers and tensors, which load without running pickled code."""
    name, keys, *rest = np.random.get_state()
    states = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states
