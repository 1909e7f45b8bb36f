"""Restore a model from a checkpoint in a single process, without the ranks that trained it."""

import dataclasses
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from llava_ds.checkpoint import commit
from llava_ds.checkpoint.base_weights import weight_hashes
from llava_ds.checkpoint.checkpoint_files import SavedWeight, trained_weights
from llava_ds.checkpoint.run_identity import SETTINGS, folder_digest
from llava_ds.checkpoint.trainer_file import checkpoint_problem, read_trainer
from llava_ds.config.arguments import Arguments, adapted_parts, declared_by, trained_parts
from llava_ds.config.model_flags import tower_folders
from llava_ds.constants import ConfigError, DataError
from llava_ds.engine.shards.checkpoint_writer import ENGINE
from llava_ds.export.export_plan import ExportPlan, export_format
from llava_ds.export.tensors import Entry, completed, read_entries
from llava_ds.extensions.active import active
from llava_ds.files.writing import sha256
from llava_ds.model.open import names as formats
from llava_ds.model.open.model_plan import part_weights, plan_model
from llava_ds.tracking.run_record import read_run_record


@dataclass(frozen=True)
class Restored:
    """A checkpoint's model.

    export: export plan in the run's own format. entries: tensors of the complete model, LoRA merged. trained: tensors
    in the checkpoint. base: tensors of the run's initial model. run, record: flags in run.json, and its content.
    """

    export: ExportPlan
    entries: list[Entry]
    trained: list[Entry]
    base: list[Entry]
    run: Arguments
    run_dir: Path
    record: dict


def restore(checkpoint: Path, moved: dict[str, str], dtype: torch.dtype | None, average: int = 1) -> Restored:
    """Restore the model of a checkpoint: trained tensors from the checkpoint, frozen ones from their original folders.

    moved: new paths by flag (--model_name_or_path, ...), for those in run.json. dtype: None for training's dtype.
    average: number of checkpoints, this one the last, whose weights are averaged. The run's initial projector is needed
    only if the checkpoint has no trained one.
    Raises ConfigError or DataError if a checkpoint is damaged, or a base model is missing or has changed.
    """
    several = _last(checkpoint, average)
    for each in several:
        problem = checkpoint_problem(each) if each.is_dir() else "no such folder"
        if problem is not None:
            raise DataError(f"{each} can't be used: {problem}")
    run_dir = checkpoint.resolve().parent
    run, record = read_run_record(run_dir)
    run = located(run, record, run_dir).replaced(**moved)
    weights, trained_in = trained_weights(checkpoint / ENGINE)
    if average > 1 and adapted_parts(run.model):
        raise ConfigError(
            "--average: averaging an adapter's matrices does not average their products: export the checkpoints with "
            "--format adapter, and merge them with --adapters"
        )
    if average > 1:
        weights = _averaged([trained_weights(each / ENGINE)[0] for each in several], several)
    trained = [Entry(*weight) for weight in weights if not formats.is_of_child(weight.name)]
    if _holds_projector(trained, run):
        run = run.replaced(pretrain_mm_mlp_adapter=None)
    _check_bases(run, read_trainer(checkpoint)["identity"]["flags"])
    weight_hashes(run.replaced(dry_run=True, **dict.fromkeys(run.own_models)), run_dir, checkpoint)
    plan = plan_model(run.model, run.data.model_max_length, run.traits.scores)
    image_options = plan.tower.image_options(run)
    # Ignore that the run asked for "hf": if it is impossible, "llava" is used, and --format can override it.
    form, _ = export_format(dataclasses.replace(run, given=run.given - {"export_format"}), plan, image_options)
    export = ExportPlan(plan, run.model, image_options, dtype or trained_in, run.data.model_max_length, form)

    parts = ["vision_tower", "projector", "language_model"] + ["newline"] * image_options.has_newline
    parts += ["value_head"] * plan.has_value_head
    parts += [formats.OWN + name for name in active(run.model.own).modules]
    frozen = [
        entry
        for part in parts
        for entry in read_entries(part, part_weights(part, plan, run.model, run.training.seed), trained_in)
    ]
    if export.adapter is None:
        whole = completed(trained, frozen)
    else:
        whole = export.adapter.merged(trained, frozen, export, checkpoint)
    return Restored(export, whole, trained, frozen, run, run_dir, record)


def _last(checkpoint: Path, number: int) -> list[Path]:
    """Return `number` checkpoints, newest first: the given one and the ones before it in the same folder.

    Raises ConfigError if there are not enough.
    """
    if number == 1:
        return [checkpoint]
    found = commit.checkpoints(checkpoint.resolve().parent)
    if checkpoint.resolve() not in found:
        raise ConfigError(
            f"--average {number}: {checkpoint} is not named checkpoint-STEP, so the checkpoints before it are "
            "unknown: rename it"
        )
    step = commit.step_of(checkpoint.resolve())
    earlier = [path for path in found if commit.step_of(path) < step]
    if len(earlier) < number - 1:
        raise ConfigError(
            f"--average {number}: only {len(earlier) + 1} checkpoints exist up to {checkpoint}: give at most that "
            "many, or keep more (--save_total_limit)"
        )
    return [checkpoint, *earlier[: number - 1]]


def _averaged(several: list[list[SavedWeight]], checkpoints: list[Path]) -> list[SavedWeight]:
    """Return the mean weights of several checkpoints. A mean is computed in fp32 when its weight is read."""
    by_name = [{weight.name: weight for weight in weights} for weights in several]
    shapes = [{name: weight.shape for name, weight in weights.items()} for weights in by_name]
    for path, each in zip(checkpoints, shapes):
        if each != shapes[0]:
            raise DataError(f"{path} and {checkpoints[0]} differ in parameters: other parts were trained")

    def read(name: str) -> torch.Tensor:
        parts = [weights[name].read() for weights in by_name]
        mean = sum(part.float() for part in parts) / len(parts)
        return mean.to(parts[0].dtype)

    return [SavedWeight(weight.name, weight.shape, partial(read, weight.name)) for weight in several[0]]


def _holds_projector(trained: list[Entry], run: Arguments) -> bool:
    """Return True if the checkpoint has everything that stage 1's projector file has, so that file is not needed.

    The file also has embedding rows if the run added image tokens; then the file is needed.
    """
    adds_tokens = run.model.mm_use_im_start_end or run.model.mm_use_im_patch_token
    own = (entry.name for entry in trained if entry.name.startswith("projector."))
    return not adds_tokens and any(own) and "projector" in trained_parts(run.model)


def _check_bases(run: Arguments, saved: dict[str, object]) -> None:
    """Raise ConfigError if base models or the projector's file differ from training's. saved: digests by flag."""
    problems = []
    for name in ("model_name_or_path", "model_base", "vision_tower"):
        given = getattr(run.model, name)
        if saved.get(name) is None:  # the run did not use this flag, as for a model with its own tower
            if given is not None:
                problems.append(f"--{name} {given}: the run was trained without this flag, leave it out")
            continue
        folders = [Path(each) for each in (tower_folders(given) if name == "vision_tower" else (given,))]
        if not all(any((folder / file).is_file() for file in SETTINGS) for folder in folders):
            problems.append(f"--{name} {given} not found: give its new path")
        elif ",".join(map(folder_digest, folders)) != saved[name]:
            problems.append(f"--{name} {given} is not the model that training started from: give that one")
    projector = run.model.pretrain_mm_mlp_adapter
    if projector is not None and not Path(projector).is_file():
        problems.append(f"--pretrain_mm_mlp_adapter {projector} not found: give its new path")
    elif projector is not None and sha256(Path(projector)) != saved.get("pretrain_mm_mlp_adapter"):
        problems.append(
            f"--pretrain_mm_mlp_adapter {projector} is not the projector that training started from: give that one"
        )
    if problems:
        raise ConfigError("\n".join(problems))


def located(args: Arguments, record: dict, run_dir: Path) -> Arguments:
    """Return the flags with the current path of each base model and projector, if it is found.

    Relative paths start at the run's working folder. Paths that were moved together with --output_dir are found
    relative to run_dir, the current folder of run.json.
    """
    started = Path(record.get("folder") or ".")
    then, now = Path(os.path.normpath(started / (args.training.output_dir or "."))), run_dir.resolve()
    sections = [args.model, *args.model.own.values()]
    names = [name for section in sections for name, flag in declared_by(section).items() if flag.path]
    values = {name: args.as_dict()[name] for name in names}
    found = {name: str(_current_path(value, started, then, now)) for name, value in values.items() if value is not None}
    if len(towers := (values["vision_tower"] or "").split(",")) > 1 and not Path(found["vision_tower"]).is_dir():
        found["vision_tower"] = ",".join(str(_current_path(each, started, then, now)) for each in towers)
    return args.replaced(**found)


def _current_path(value: str, started: Path, then: Path, now: Path) -> Path:
    """Find the current path of a run's file. started: the run's working folder; then, now: its old and new folder."""
    path = Path(os.path.normpath(started / value))
    candidates = [path]
    for old, new in zip((then, *then.parents), (now, *now.parents)):
        if path.is_relative_to(old) and len(old.parts) > 1:
            candidates.append(new / path.relative_to(old))
        if old.name != new.name and old != then:
            break  # parent folders further up were not moved
    candidates.append(Path(value))
    return next((each for each in candidates if each.exists()), path)
