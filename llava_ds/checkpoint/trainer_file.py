"""Read and validate trainer.json: a checkpoint's step and the identity of its run."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from typing_extensions import NotRequired, TypedDict

from llava_ds.checkpoint import commit
from llava_ds.checkpoint.verification import problem_with
from llava_ds.config.arguments import declared_in
from llava_ds.constants import DataError
from llava_ds.files.reading import read_json

MODEL_ONLY = "it holds only the model (--save_only_model), without optimizer states"

_Count = Annotated[int, Field(ge=1)]


class _Optimizer(TypedDict):
    type: str
    params: NotRequired[dict[str, Any]]


class _Flags(TypedDict):
    """Flags whose values are used, so their types are validated; all other flags are only compared."""

    train_batch_size: NotRequired[_Count | None]
    per_device_train_batch_size: NotRequired[_Count | None]
    gradient_accumulation_steps: NotRequired[_Count | None]
    tokens_per_micro_batch: NotRequired[_Count | str | None]
    model_name_or_path: NotRequired[str | None]
    model_base: NotRequired[str | None]
    vision_tower: NotRequired[str | None]
    pretrain_mm_mlp_adapter: NotRequired[str | None]


def _with_sizes(flags: object) -> object:
    """Raise ValueError unless flags for numbers of ranks that share samples are positive integers."""
    declared = declared_in(flags) if isinstance(flags, dict) else {}
    for name in (name for name, flag in declared.items() if flag.shares_samples):
        if type(size := flags.get(name, 1)) is not int or size < 1:
            raise ValueError(f"{name} is {size}: expected a number of ranks")
    return flags


class _Sections(TypedDict):
    optimizer: NotRequired[_Optimizer | None]


class Identity(TypedDict):
    """Schema of a RunIdentity in JSON. Keys that earlier versions did not write are optional."""

    flags: Annotated[_Flags, BeforeValidator(_with_sizes)]
    data: str
    world_size: _Count
    zero_stage: Annotated[int, Field(ge=0, le=3)]
    deepspeed: NotRequired[_Sections]
    optimizer_on_nvme: NotRequired[bool]


class Trainer(TypedDict):
    """Schema of trainer.json.

    step: the checkpoint's step; weights: for each flag, the SHA-256 of the initial model's files by name; model_only:
    the export format of a checkpoint with only the model.
    """

    step: Annotated[int, Field(ge=0)]
    identity: Identity
    weights: NotRequired[dict[str, dict[str, str]]]
    model_only: NotRequired[str]


def read_trainer(checkpoint: Path) -> dict:
    """Read trainer.json. Raises DataError if it is missing or invalid."""
    try:
        return read_json(checkpoint / commit.TRAINER, Trainer)
    except FileNotFoundError as error:
        raise DataError(
            f"{checkpoint / commit.TRAINER} is missing: name a complete checkpoint (run/verify.py)"
        ) from error
    except DataError as error:
        raise DataError(f"{checkpoint / commit.TRAINER} can't be read: {error}: name a complete checkpoint") from error


def is_training_checkpoint(folder: Path) -> bool:
    """Return True if a folder is a checkpoint of run/train.py with training state, not only the model."""
    if not ((folder / commit.TRAINER).is_file() or (folder / commit.MANIFEST).is_file()):
        return False
    try:
        return "model_only" not in read_trainer(folder)
    except DataError:
        return True  # the reader refuses a damaged checkpoint


def resume_problem(checkpoint: Path, hashed: bool = True) -> str | None:
    """Return the reason why no run can be resumed from a folder, or None. hashed: True to hash every file."""
    problem = checkpoint_problem(checkpoint, hashed)
    return MODEL_ONLY if problem is None and not is_training_checkpoint(checkpoint) else problem


def checkpoint_problem(checkpoint: Path, hashed: bool = True) -> str | None:
    """Return the reason why a folder is not a complete checkpoint, or None. hashed: True to hash every file."""
    problem = problem_with(checkpoint, hashed)
    if problem is not None:
        return problem
    try:
        trainer = read_json(checkpoint / commit.TRAINER, Trainer)
    except FileNotFoundError:
        return f"{commit.TRAINER} is missing"
    except DataError as error:
        return f"{commit.TRAINER} can't be read ({error})"
    named = commit.step_in_name(checkpoint)
    if named is not None and trainer["step"] != named:
        return f"{commit.TRAINER} belongs to step {trainer['step']}"
    return None
