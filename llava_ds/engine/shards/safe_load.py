"""Load DeepSpeed's and torch's files without running code that may be pickled in them."""

import contextlib
import os
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from llava_ds.constants import DataError
from llava_ds.model.open.pickles import refused_name

# The only classes allowed in a checkpoint, in addition to tensors and plain values (DeepSpeed 0.19).
CLASSES = [ZeroStageEnum, LossScaler, DynamicLossScaler, fragment_address]
_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # torch's variable that overrides the arguments of torch.load


def load(path: str | Path, mmap: bool = False) -> object:
    """Load a file written by torch.save to the CPU: tensors, plain values and CLASSES.

    mmap: map the file into memory if its format allows that. Raises DataError if the file is damaged or contains any
    other objects; their code does not run.
    """
    try:
        with _refusing(path), torch.serialization.safe_globals(CLASSES):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap and zipfile.is_zipfile(path))
    except DataError:
        raise
    except Exception as error:  # torch raises several types for damaged files
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        raise DataError(f"{path} can't be read: {first}") from error


@contextlib.contextmanager
def without_code(path: str | Path) -> Iterator[None]:
    """Make every torch.load in this context as safe as load(), including those of DeepSpeed and of child processes.

    Raises DataError that names `path` for a file with other objects than load() accepts. Child processes that are
    not forked refuse CLASSES as well.
    """
    before = os.environ.get(_FORCE)
    os.environ[_FORCE] = "1"
    try:
        with _refusing(path), torch.serialization.safe_globals(CLASSES):
            yield
    finally:
        if before is None:
            del os.environ[_FORCE]
        else:
            os.environ[_FORCE] = before


@contextlib.contextmanager
def _refusing(path: str | Path) -> Iterator[None]:
    """Raise DataError for a pickle that torch refuses."""
    try:
        yield
    except pickle.UnpicklingError as error:
        named = refused_name(error)
        if named is None:
            raise DataError(f"{path} can't be read: it is not a complete torch file") from error
        raise DataError(
            f"{path} is refused: it holds {named} in addition to tensors, and code in checkpoints is not run. "
            "run/train.py writes no code: copy the checkpoint again from where it was written"
        ) from error
