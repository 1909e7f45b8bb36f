"""The trained weights in the files that DeepSpeed leaves, of any ZeRO stage and number of ranks, without the ranks."""

import re
from collections.abc import Iterable
from pathlib import Path

import torch

from llava_ds.constants import DataError
from llava_ds.engine.checkpoint_files import read_states
from llava_ds.export.tensors import Entry


def engine_entries(folder: Path) -> tuple[list[Entry], torch.dtype]:
    """The trained parameters in an engine's folder, by their names in the model, and the precision of training.

    The files are mapped into memory, so that reading an entry takes no more than the entry. A tied parameter comes
    once. Raises DataError for files that are missing or can't be read.
    """
    states = sorted(folder.glob("*mp_rank_00_model_states.pt"), key=_rank)
    if not states:
        raise DataError(f"{folder} holds no model states of DeepSpeed: is it a checkpoint of run/train.py?")
    try:
        return _entries(folder, states[0])
    except (AttributeError, IndexError, KeyError, RuntimeError, StopIteration, TypeError) as error:
        said = f"{type(error).__name__}: {error}"[:200]
        raise DataError(f"{folder} does not hold what DeepSpeed saves ({said}): take another checkpoint") from error


def _entries(folder: Path, file: Path) -> tuple[list[Entry], torch.dtype]:
    first = read_states(file)
    module, shared = first["module"], first["shared_params"] or {}  # None at stage 0
    dtype = next(iter(module.values())).dtype
    if not file.name.startswith("zero_pp_rank_"):  # the whole of what trained
        whole = [(name, tensor) for name, tensor in module.items() if name not in shared]
        return [Entry(name, tuple(tensor.shape), lambda t=tensor: t) for name, tensor in whole], dtype
    shapes = {name: tuple(shape) for group in first["param_shapes"] for name, shape in group.items()}
    return _partitioned(folder, shapes, first["dp_world_size"], dtype), dtype


def _partitioned(folder: Path, shapes: dict[str, tuple[int, ...]], num_ranks: int, dtype: torch.dtype) -> list[Entry]:
    """ZeRO-3: every rank has an equal piece of every parameter, in its fp32 groups, one behind the other."""
    files = sorted(folder.glob("*_optim_states.pt"), key=_rank)
    if len(files) != num_ranks:
        raise DataError(f"{folder} was written by {num_ranks} ranks, but holds the optimizer's states of {len(files)}")
    pieces = [read_states(file)["optimizer_state_dict"]["fp32_flat_groups"] for file in files]
    entries, offset = [], 0
    for name, shape in shapes.items():
        numel = torch.Size(shape).numel()
        length = -(-numel // num_ranks)

        def read(offset=offset, length=length, numel=numel, shape=shape) -> torch.Tensor:
            whole = torch.cat([part for groups in pieces for part in _spans(groups, offset, length)])
            return whole[:numel].view(shape).to(dtype)

        entries.append(Entry(name, shape, read))
        offset += length
    held = sum(group.numel() for group in pieces[0])
    if offset != held:
        raise DataError(f"{folder}: a rank's parameters have {offset} numbers, its optimizer's states {held}")
    return entries


def _spans(groups: Iterable[torch.Tensor], offset: int, length: int) -> list[torch.Tensor]:
    """The pieces of consecutive flat groups from an offset on."""
    found = []
    for group in groups:
        if length and offset < group.numel():
            piece = group[offset : offset + length]
            found.append(piece)
            length -= piece.numel()
            offset = 0
        else:
            offset -= group.numel() if length else 0
    return found


def _rank(file: Path) -> int:
    found = re.search(r"zero_pp_rank_(\d+)_", file.name)
    return 0 if found is None else int(found[1])
