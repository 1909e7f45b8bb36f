"""The files that DeepSpeed leaves, read without running anything that they hold."""

import zipfile
from pathlib import Path

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from llava_ds.constants import DataError

# What the files hold beside tensors and plain values (DeepSpeed 0.19): nothing else in them is run.
CLASSES = [ZeroStageEnum, LossScaler, DynamicLossScaler, fragment_address]


def read_states(file: Path) -> dict:
    """What torch.save wrote to a file. Tensors are mapped, and read from the disk where they are looked at.

    Raises DataError for a file that can't be read, or that holds more than tensors, plain values and CLASSES.
    """
    try:
        with torch.serialization.safe_globals(CLASSES):
            # torch's old format, which DeepSpeed's checkpoint section can ask for, can't be mapped.
            return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:  # torch raises several types for damaged or hostile pickles
        raise DataError(f"{file} can't be read: {error}") from error


def model_states(engine_dir: Path) -> dict:
    """What all ranks have in common: counters, the schedule, and at stages 0 to 2 the trained weights.

    Raises DataError where the file is missing or can't be read.
    """
    names = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
    for name in names:
        if (engine_dir / name).is_file():
            return read_states(engine_dir / name)
    raise DataError(f"{engine_dir} holds neither {' nor '.join(names)}: is it a checkpoint of run/train.py?")


def optimizer_states(engine_dir: Path, rank: int) -> dict:
    """What one rank's ZeRO optimizer saved. Raises DataError where the file is missing or can't be read."""
    pattern = f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    found = sorted(engine_dir.glob(pattern))
    if len(found) != 1:
        raise DataError(f"{engine_dir} holds {len(found)} files named {pattern}, not 1")
    return read_states(found[0])["optimizer_state_dict"]


def refuse_code(engine_dir: Path, rank: int) -> None:
    """Raise DataError where a file that DeepSpeed will read for a rank holds anything that would run: DeepSpeed 0.19
    unpickles whatever there is, and a checkpoint may come from elsewhere."""
    for file in sorted(engine_dir.glob("*.pt")):
        if file.name.startswith("mp_rank_") or f"zero_pp_rank_{rank}_" in file.name:
            read_states(file)
