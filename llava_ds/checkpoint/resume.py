"""Find the checkpoint to resume from, compare its settings with the run's, and refuse it if they don't match."""

import dataclasses
import functools
import time
from collections.abc import Callable, Collection
from pathlib import Path

import torch

from llava_ds.checkpoint import commit
from llava_ds.checkpoint.base_weights import Hashes
from llava_ds.checkpoint.run_identity import RunIdentity, saved_identity
from llava_ds.config.arguments import Arguments
from llava_ds.constants import ConfigError
from llava_ds.extensions.table import EXTENSIONS
from llava_ds.files.writing import RUN_FOLDER, Entry
from llava_ds.runtime.ranks import Ranks, barrier, broadcast_from_first

ONE_RANK = Ranks(0, 0, 1, torch.device("cpu"))

# Files of a run that another run in the same folder would mistake for its own.
RUN_FILES = (
    "metrics.jsonl", "metrics.csv", "evals.jsonl", "skipped.jsonl", "skipped_steps.jsonl", "report.html", "loss.png",
    *(name for trigger in EXTENSIONS.values() for name in trigger.leaves.split()),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ResumePoint:
    """A checkpoint to resume from; path is None for a fresh start.

    world_size: number of ranks that wrote it; changed: True if the user allowed settings that change the result, and
    some have changed.
    """

    path: Path | None = None
    step: int = 0
    world_size: int = 1
    changed: bool = False


@dataclasses.dataclass(frozen=True)
class ResumePlan:
    """The checkpoint to resume from, if any, and the identity of the run.

    weights: hashes of the initial model's weight files.
    """

    point: ResumePoint
    identity: RunIdentity
    weights: Hashes


def saved_batch_size(args: Arguments, dp: int) -> int | None:
    """Return the checkpoint's number of samples per step if the resumed run has to be set to it, or None.

    This is the case if the flags don't determine the number, and `dp`, the number of data-parallel ranks, has changed.
    Raises ConfigError if dp does not divide the number.
    """
    training = args.training
    saved = saved_identity(training.resume, Path(training.output_dir))
    total = saved.get("flags", {}).get("train_batch_size")
    both = {"per_device_train_batch_size", "gradient_accumulation_steps"} <= args.given
    if total is None or both or "train_batch_size" in args.given:
        return None
    from llava_ds.checkpoint.comparison import data_ranks, refuse_uneven

    if data_ranks(saved) == dp:
        return None
    refuse_uneven(total, dp)
    return total


def find_resume_point(
    resume: str,
    output_dir: Path,
    identity: RunIdentity,
    allowed: str | None = None,
    about_data: Callable[[Path], str] = lambda run_dir: "",
    ranks: Ranks = ONE_RANK,
) -> tuple[ResumePoint, list[str]]:
    """Find the checkpoint for --resume. Returns it and lines to print. Collective.

    Rank 0 compares settings before any file is hashed; then every rank hashes its share. allowed: value of
    --allow_changed_flags; about_data: maps a run's folder to a clause on how its data differ. Raises ConfigError.
    """
    may_change = set()
    if allowed is not None:
        from llava_ds.checkpoint.comparison import permitted_changes

        may_change = permitted_changes(allowed, identity)
    if resume == "never":
        return ResumePoint(), []
    compare = functools.cache(functools.partial(_compare, identity, may_change, about_data))
    damaged: dict[Path, str] = {}
    while True:
        found = broadcast_from_first(ranks, lambda: _candidate(resume, output_dir, compare, damaged))
        if found.path is None:
            return ResumePoint(), found.lines
        from llava_ds.checkpoint.verification import shared_damage

        problem = shared_damage(found.path, found.files, ranks)
        if problem is not None:
            damaged[found.path] = problem
        elif found.compared.refusal is not None:
            raise ConfigError(found.compared.refusal)
        else:
            return found.compared.point, [*found.lines, *found.compared.lines]


@dataclasses.dataclass(frozen=True)
class _Compared:
    """Result of comparing a checkpoint with the run. refusal: the reason why the run can't resume from it, or None."""

    point: ResumePoint
    lines: list[str]
    refusal: str | None = None


@dataclasses.dataclass(frozen=True)
class _Candidate:
    """The newest checkpoint without known damage. lines: why newer ones are not used; files: its manifest's entries."""

    path: Path | None
    lines: list[str]
    files: dict[str, Entry] = dataclasses.field(default_factory=dict)
    compared: _Compared | None = None


def _candidate(
    resume: str, output_dir: Path, compare: Callable[[Path], _Compared], damaged: dict[Path, str]
) -> _Candidate:
    """Find the newest checkpoint whose files have the right sizes and that is not in `damaged`.

    Raises ConfigError if its settings differ from the run's, unless an older checkpoint matches (the newer one may be
    damaged). Also raises it if all contain only the model, because a fresh start would move them aside.
    """
    if resume == "auto":
        commit.recover(output_dir)
    newest, lines = None, []
    paths = commit.checkpoints(output_dir) if resume == "auto" else [Path(resume)]
    if not paths:
        return _Candidate(None, lines)
    from llava_ds.checkpoint.trainer_file import MODEL_ONLY, resume_problem
    from llava_ds.checkpoint.verification import read_manifest

    for path in paths:
        gone = None if path.is_dir() else "no such folder"
        problem = gone or damaged.get(path) or resume_problem(path, hashed=False)
        if problem is not None and resume != "auto":
            raise ConfigError(f"--resume {resume} can't be used: {problem}")
        if problem is not None:
            lines += [f"{path.name} is not used: {problem}"] * (newest is None)
            continue
        compared = compare(path)
        newest = newest or _Candidate(path, lines, read_manifest(path), compared)
        if compared.refusal is None:
            return newest
    if newest is not None:
        raise ConfigError(newest.compared.refusal)
    if any(line.endswith(MODEL_ONLY) for line in lines):
        raise ConfigError(
            "\n".join([f"{output_dir} has no checkpoint that a run can be resumed from:", *lines])
            + "\nstart a new run from such a model, in another --output_dir (--model_name_or_path, or for a "
            "projector --pretrain_mm_mlp_adapter), or give --resume never to start again"
        )
    return _Candidate(None, lines)


def _compare(
    identity: RunIdentity, may_change: Collection[str], about_data: Callable[[Path], str], path: Path
) -> _Compared:
    """Compare a checkpoint's settings with the run's."""
    if identity.optimizer_on_nvme:
        why = (
            f"{path} can't be resumed: DeepSpeed can't restore an optimizer that is offloaded to NVMe. Give "
            '--resume never to start again; offload_optimizer to "cpu" makes a run resumable from its start'
        )
        return _Compared(ResumePoint(), [], why)
    from llava_ds.checkpoint.comparison import Comparison, batch_size_hint, data_ranks
    from llava_ds.checkpoint.trainer_file import read_trainer

    trainer = read_trainer(path)
    saved = trainer["identity"]
    comparison = Comparison(identity, saved)
    differences = comparison.differences()
    if "data" in differences and (how := about_data(path.resolve().parent)):
        differences["data"] += f": {how}"
    refused = {name: line for name, line in differences.items() if name not in may_change}
    if refused:
        about, before = "", saved["flags"].get("train_batch_size")
        if "train_batch_size" in refused and before is not None:
            about = "\n" + batch_size_hint(before, data_ranks(vars(identity)))
        why = (
            f"{path} is from a run with other settings; resuming would not give the same model:\n"
            + "\n".join(f"  {line}" for line in refused.values())
            + "\ngive the same settings, another --output_dir, --resume never to start again, or resume with "
            f"the new ones: --allow_changed_flags {','.join(refused)}{about}"
        )
        return _Compared(ResumePoint(), [], why)
    if (why := comparison.unfit_states(path)) is not None:
        return _Compared(ResumePoint(), [], why)
    lines = [f"allowed to change: {line}" for line in differences.values()]
    lines += [f"only rounding changes: {line}" for line in comparison.reshaped()]
    point = ResumePoint(path, trainer["step"], saved["world_size"], bool(differences))
    return _Compared(point, [*lines, f"resuming from {path}"])


def set_aside(output_dir: Path, point: ResumePoint, ranks: Ranks) -> None:
    """Move checkpoints later than `point`, and at a fresh start all logs, to a separate folder.

    They are damaged or belong to another run, and a later resume or clean-up would mistake them for this run's files.
    """
    if ranks.is_first:
        ahead = [path for path in commit.checkpoints(output_dir) if commit.step_of(path) > point.step]
        if point.path is None:
            folders = (output_dir, output_dir / RUN_FOLDER)
            ahead += [path for folder in folders for name in RUN_FILES for path in folder.glob(name)]
        if ahead:
            target = output_dir / time.strftime("previous-%Y%m%d-%H%M%S")
            for path in ahead:
                moved = target / path.relative_to(output_dir)
                moved.parent.mkdir(parents=True, exist_ok=True)
                path.rename(moved)
            print(f"files of an earlier run are now in {target}: {', '.join(path.name for path in ahead)}", flush=True)
    barrier(ranks)
