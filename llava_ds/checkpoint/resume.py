"""What a checkpoint holds beside the engine's part, and how a run goes on from it."""

import copy
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

from llava_ds.checkpoint import commit
from llava_ds.checkpoint.base_weights import Hashes
from llava_ds.checkpoint.random_states import random_states, seed_random_states, set_random_states
from llava_ds.checkpoint.refusals import about_batch_size, permitted, refuse_uncuttable, refuse_uneven
from llava_ds.checkpoint.reshape import load_reshaped, renew_rates
from llava_ds.checkpoint.run_identity import ENGINE, RunIdentity, saved_identity
from llava_ds.checkpoint.trainer_file import MODEL_ONLY, read_trainer, resume_problem
from llava_ds.config.arguments import Arguments, flags_free_on_resume
from llava_ds.constants import ConfigError, DataError
from llava_ds.engine import safe_load
from llava_ds.engine.shards import has_layout, layout_of, read_layout
from llava_ds.runtime.ranks import Ranks, barrier, gather

# What a run writes of itself, which another one in the same folder would take for its own.
OF_A_RUN = (
    "metrics.jsonl", "metrics.csv", "evals.jsonl", "samples.jsonl", "loss_spikes.jsonl", "skipped.jsonl",
    "skipped_steps.jsonl", "evaluation*.json", "evaluation*.jsonl", "report.html", "loss.png",
)  # fmt: skip
GROUP_STATES = {"params", "step"}  # of a parameter group, what is no rate; DeepSpeed's Adam and Lion count there


@dataclasses.dataclass(frozen=True)
class ResumePoint:
    """Where to go on: a checkpoint and its counters; path is None for a fresh start.

    world_size: ranks that wrote it; changed: whether settings that decide are allowed to be others than it has.
    """

    path: Path | None = None
    step: int = 0
    world_size: int = 1
    changed: bool = False


@dataclasses.dataclass(frozen=True)
class ResumePlan:
    """The checkpoint to resume from, if any, and the identity of the run. weights: hashes of the files of the folders
    that the model starts from."""

    point: ResumePoint
    identity: RunIdentity
    weights: Hashes


def kept_batch_size(args: Arguments, world_size: int) -> int | None:
    """Samples per step of the run to go on with, where the flags leave them open and the number of ranks is another.

    Raises ConfigError where that many ranks can't share them.
    """
    training = args.training
    saved = saved_identity(training.resume, Path(training.output_dir))
    total = saved.get("flags", {}).get("train_batch_size")
    both = {"per_device_train_batch_size", "gradient_accumulation_steps"} <= args.given
    if total is None or saved["world_size"] == world_size or both or "train_batch_size" in args.given:
        return None
    refuse_uneven(total, world_size)
    return total


def find_resume_point(
    resume: str,
    output_dir: Path,
    identity: RunIdentity,
    allowed: str | None = None,
    about_data: Callable[[Path], str] = lambda run_dir: "",
) -> tuple[ResumePoint, list[str]]:
    """The checkpoint that --resume asks for, and lines to print. Raises ConfigError when it can't be gone on from.

    allowed: --allow_changed_flags; about_data: how the data set differs from that of a run in a folder, in a clause.
    """
    known = [*identity.flags, *(key for key in identity.deepspeed if key not in identity.flags), "data", "world_size"]
    may_change = permitted(allowed, known, flags_free_on_resume())
    # DeepSpeed 0.19.8 goes on with a rate of 0, and without the states that never left memory.
    if identity.optimizer_on_nvme and identity.flags["on_loss_spike"] == "rewind":
        raise ConfigError(
            "--on_loss_spike rewind can't go back: DeepSpeed does not bring an optimizer back that lies on NVMe. Give "
            'continue, or offload_optimizer to "cpu"'
        )
    if resume == "never":
        return ResumePoint(), []
    path, lines = _newest(output_dir) if resume == "auto" else (_named(resume), [])
    if path is None:
        return ResumePoint(), lines
    if identity.optimizer_on_nvme:
        raise ConfigError(
            f"{path} can't be gone on from: DeepSpeed does not bring an optimizer back that lies on NVMe. Give "
            '--resume never to start again, or offload_optimizer to "cpu", which a run has to begin with'
        )
    trainer = read_trainer(path)
    saved = trainer["identity"]
    differences = identity.differences(saved)
    if "data" in differences and (how := about_data(path.resolve().parent)):
        differences["data"] += f": {how}"
    refused = {name: line for name, line in differences.items() if name not in may_change}
    if refused:
        about, before = "", saved["flags"].get("train_batch_size")
        if "train_batch_size" in refused and before is not None:
            about = "\n" + about_batch_size(before, identity.world_size)
        raise ConfigError(
            f"{path} is a checkpoint of a run with other settings, which would not end in the same model:\n"
            + "\n".join(f"  {line}" for line in refused.values())
            + "\ngive the same settings, another --output_dir, --resume never to start again, or go on with the new "
            f"ones: --allow_changed_flags {','.join(refused)}{about}"
        )
    reshaped = identity.reshaped(saved)
    if (saved["world_size"], saved["zero_stage"]) != (identity.world_size, identity.zero_stage):
        refuse_uncuttable(path, saved, reshaped, identity.deepspeed.get("optimizer"))
    lines += [f"allowed to change: {line}" for line in differences.values()]
    lines += [f"the same but for rounding: {line}" for line in reshaped]
    point = ResumePoint(path, trainer["step"], saved["world_size"], bool(differences))
    return point, [*lines, f"resuming from {path}"]


def _newest(output_dir: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that can be resumed from, and a line for every newer one. Raises ConfigError where there
    are only such that hold the model alone: a start from nothing would move them aside."""
    path, lines = commit.newest_whole(output_dir, resume_problem)
    if path is None and any(line.endswith(MODEL_ONLY) for line in lines):
        raise ConfigError(
            "\n".join([f"{output_dir} has no checkpoint that a run can be resumed from:", *lines])
            + "\ntrain on from such a model as a new run, in another --output_dir (--model_name_or_path, or "
            "--pretrain_mm_mlp_adapter of a projector), or give --resume never to start again"
        )
    return path, lines


def _named(resume: str) -> Path:
    """The checkpoint that --resume names. Raises ConfigError where it can't be resumed from."""
    path = Path(resume)
    problem = resume_problem(path) if path.is_dir() else "there is no such folder"
    if problem is not None:
        raise ConfigError(f"--resume {resume} can't be used: {problem}")
    return path


def set_aside(output_dir: Path, point: ResumePoint, ranks: Ranks) -> None:
    """Move what lies ahead of the point to a folder of its own: later checkpoints, and all logs at a fresh start.

    They are another run's, or damaged: left where they are, a later resume or clean-up would take them for this one's.
    """
    if ranks.is_first:
        ahead = [path for path in commit.checkpoints(output_dir) if commit.step_of(path) > point.step]
        if point.path is None:
            ahead += [path for name in OF_A_RUN for path in output_dir.glob(name)]
        if ahead:
            target = output_dir / time.strftime("previous-%Y%m%d-%H%M%S")
            target.mkdir()
            for path in ahead:
                path.rename(target / path.name)
            print(f"what an earlier run left is now in {target}: {', '.join(path.name for path in ahead)}", flush=True)
    barrier(ranks)


def restore(engine, point: ResumePoint, ranks: Ranks, seed: int) -> str:
    """Bring the engine and this rank's random states to where the checkpoint was saved. Returns how, in a line.

    seed: for the random states of ranks that the checkpoint has none of. All ranks call it together.
    """
    line = _load(engine, point, ranks)
    if ranks.rank < point.world_size:
        file = point.path / f"random-{ranks.rank}.pt"
        try:
            set_random_states(safe_load.load(file), ranks.device)
        except DataError as error:
            raise DataError(f"{file} can't be used: {error}") from error
    else:
        seed_random_states(seed, point.step, ranks.rank)
    return line


def rewind(engine, path: Path, ranks: Ranks) -> None:
    """Bring weights and optimizer states back to a checkpoint's, as if the steps since then had changed nothing.

    They stay counted: schedule, rates, counters and random states go on from where they are. All ranks call it
    together.
    """
    trainer = read_trainer(path)
    counters = {name: getattr(engine, name) for name in ("global_steps", "global_samples", "skipped_steps")}
    schedule, random = copy.deepcopy(engine.lr_scheduler.state_dict()), random_states(ranks.device)
    rates = [{key: group[key] for key in group.keys() - GROUP_STATES} for group in engine.basic_optimizer.param_groups]
    _load(engine, ResumePoint(path, trainer["step"], trainer["identity"]["world_size"]), ranks)
    engine.lr_scheduler.load_state_dict(schedule)
    for group, before in zip(engine.basic_optimizer.param_groups, rates):
        group.update(before)
    for name, value in counters.items():
        setattr(engine, name, value)
    set_random_states(random, ranks.device)


def _load(engine, point: ResumePoint, ranks: Ranks) -> str:
    """Weights, optimizer states, schedule and counters of a checkpoint, into the engine. Returns how, in a line."""
    groups = [{**group, "params": None} for group in engine.basic_optimizer.param_groups]
    same = point.world_size == ranks.world_size and (
        not has_layout(point.path) or read_layout(point.path, ranks.rank) == layout_of(engine)
    )
    if all(gather(same, ranks)):
        with safe_load.without_code(point.path):
            loaded, _ = engine.load_checkpoint(
                str(point.path), tag=ENGINE, load_module_strict=False, load_lr_scheduler_states=not point.changed
            )
        if loaded is None:
            raise RuntimeError(f"DeepSpeed loaded nothing from {point.path}")
        line = f"went on at step {point.step}, bit for bit where it stopped"
    else:
        load_reshaped(engine, point.path, point.path / ENGINE, point.world_size, schedule=not point.changed)
        line = f"went on at step {point.step}: weights and states of {point.world_size} ranks, cut anew"
        if ranks.world_size > point.world_size:
            line += "; ranks that are new draw random numbers of their own"
    if point.changed:
        renew_rates(engine, groups, point.path / ENGINE)
    return line
