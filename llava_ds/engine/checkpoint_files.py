"""The files that DeepSpeed leaves, read without running anything that they hold."""

from pathlib import Path

from llava_ds.constants import DataError
from llava_ds.engine import safe_load


def read_states(file: Path) -> dict:
    """What torch.save wrote to a file. Tensors are mapped, and read from the disk where they are looked at.

    Raises DataError for a file that can't be read, or that holds code.
    """
    return safe_load.load(file, mmap=True)


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
