"""Read DeepSpeed's files in a checkpoint without running pickled code.

The files are mapped into memory, so tensors are read from the disk only when they are accessed.
"""

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from llava_ds.constants import DataError
from llava_ds.engine.placement import Slice, cut_dim
from llava_ds.engine.shards import safe_load
from llava_ds.engine.shards.checkpoint_writer import ENGINE
from llava_ds.engine.shards.pieces import PLAIN, REPLICATED, UNFUSED, WRAPPERS, Layout, Piece, has_layout, read_layout

COUNT_IN_LAST = ("FusedAdam", "FusedLion")


class SavedPiece(NamedTuple):
    """A piece of a saved tensor, and the optimizer's states of that tensor."""

    piece: Piece
    master: torch.Tensor
    states: dict[str, object]


class SavedWeight(NamedTuple):
    """A trained parameter in a checkpoint."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]


def read_states(file: Path) -> dict:
    """Read a file written by torch.save. Raises DataError if it can't be read or contains code."""
    return safe_load.load(file, mmap=True)


def model_states(engine_dir: Path, mp_rank: int = 0) -> dict:
    """Read the states that all ranks with the same part of the model share.

    These are counters, the schedule and, at ZeRO stages 0 to 2, the trained weights. mp_rank: DeepSpeed's index of the
    part, equal to Mesh.tp_rank under tensor parallelism and to pp_rank under pipeline parallelism.
    Raises DataError if the file is missing or can't be read.
    """
    names = (f"mp_rank_{mp_rank:02}_model_states.pt", f"zero_pp_rank_0_mp_rank_{mp_rank:02}_model_states.pt")
    for name in names:
        if (engine_dir / name).is_file():
            return read_states(engine_dir / name)
    raise DataError(f"{engine_dir} has no {' or '.join(names)}: is it a checkpoint of run/train.py?")


def optimizer_states(engine_dir: Path, dp_rank: int, mp_rank: int = 0) -> dict:
    """Read the ZeRO optimizer state of rank dp_rank among the ranks with part mp_rank of the model.

    Raises DataError if the file is missing or can't be read.
    """
    pattern = f"*zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02}_optim_states.pt"
    found = sorted(engine_dir.glob(pattern))
    if len(found) != 1:
        raise DataError(f"{engine_dir} has {len(found)} files named {pattern}, expected 1")
    return read_states(found[0])["optimizer_state_dict"]


def rank_states(layout: Layout, engine_dir: Path, rank: int, world_size: int) -> dict:
    """Read the file with a rank's master weights: the rank's own file, or the shared one if they are replicated.

    Parameters in separate files (see _own_files) are added.
    """
    dp_rank, mp_rank = _place(layout, rank, world_size)
    if layout.kind not in REPLICATED:
        return optimizer_states(engine_dir, dp_rank, mp_rank)
    states = model_states(engine_dir, mp_rank)
    own = engine_dir / f"expp_rank_{rank % layout.ep}_mp_rank_00_optim_states.pt"
    if own.is_file():
        states = {**states, "module": {**states["module"], **_own_files(engine_dir)}, **read_states(own)}
    return states


def _place(layout: Layout, rank: int, world_size: int) -> tuple[int, int]:
    """Return a rank's index among the ranks with the same part of the model, and the index of this part."""
    if layout.pp > 1:
        mp_rank, dp_rank = divmod(rank, world_size // layout.pp)
        return dp_rank, mp_rank
    return divmod(rank, layout.tp)


def saved_masters(layout: Layout, states: dict) -> list[torch.Tensor]:
    """List the saved master weights in the order of pieces.masters. states: rank_states() of the rank."""
    if layout.kind == PLAIN:
        return [states["module"][slot[0].name] for slot in layout.slots]
    held = (states["optimizer"] if layout.kind in REPLICATED else states)[WRAPPERS[layout.kind].saved]
    return [p for group in held for p in group] if layout.kind == UNFUSED else held


def saved_optimizer(layout: Layout, states: dict) -> dict:
    """Return the state_dict of the user's optimizer. The keys of its "state" are indices into saved_masters."""
    held = states["optimizer"] if layout.kind in REPLICATED else states
    return held if layout.kind == PLAIN else held[WRAPPERS[layout.kind].saved_optimizer]


def saved_layouts(checkpoint: Path, world_size: int) -> Iterator[tuple[int, Layout]]:
    """Yield (rank, layout) for each rank whose files contain data that no earlier rank has."""
    first = read_layout(checkpoint, 0)
    for rank in range(world_size):
        if first.kind not in REPLICATED or _place(first, rank, world_size)[0] < first.ep:
            yield rank, read_layout(checkpoint, rank)


def saved_pieces(checkpoint: Path, world_size: int, live: Layout) -> Iterator[SavedPiece]:
    """Yield every saved piece that overlaps a piece of this rank. live: this rank's layout.

    A piece that several ranks saved is yielded once, from the first rank's file.
    Raises DataError for files that can't be read, or that don't match their layout.
    """
    own: dict[str, list[Piece]] = {}
    for slot in live.slots:
        for piece in slot:
            own.setdefault(piece.name, []).append(piece)
    before: set[str] = set()  # saved in full by earlier ranks
    for rank, layout in saved_layouts(checkpoint, world_size):
        is_first = rank % layout.tp == 0  # the tp ranks' slices differ; all else is equal on them
        wanted = [
            [
                p
                for p in slot
                if (p.slice or (is_first and p.name not in before)) and any(map(p.overlap, own.get(p.name, [])))
            ]
            for slot in layout.slots
        ]
        if layout.kind in REPLICATED:
            before |= layout.names
        if not any(wanted):
            continue  # don't open the rank's file
        states = rank_states(layout, checkpoint / ENGINE, rank, world_size)
        held, moments = saved_masters(layout, states), states_by_tensor(layout, saved_optimizer(layout, states))
        if len(held) != len(layout.slots):
            raise DataError(f"{checkpoint}: rank {rank} saved {len(held)} tensors, its layout has {len(layout.slots)}")
        for index, (pieces, master) in enumerate(zip(wanted, held)):
            for piece in pieces:
                yield SavedPiece(piece, master, moments.get(index, {}))


def states_by_tensor(layout: Layout, optimizer: dict) -> dict[int, dict[str, object]]:
    """Return each tensor's optimizer states, including its step count, by index of the tensor.

    DeepSpeed 0.19.8's fused optimizers store the step count only with the last tensor of a group.
    """
    state = optimizer["state"]
    if layout.optimizer not in COUNT_IN_LAST:
        return state
    counted = {}
    for group in optimizer["param_groups"]:
        held = [index for index in group["params"] if index in state]
        steps = max((state[index]["step"] for index in held), default=0)
        counted.update({index: {**state[index], "step": steps} for index in held})
    return counted


def trained_weights(engine_dir: Path) -> tuple[list[SavedWeight], torch.dtype]:
    """Return the trained parameters in a checkpoint of any ZeRO stage, and the training precision.

    A tied parameter is listed once. Raises DataError if files are missing or can't be read.
    """
    checkpoint = engine_dir.parent
    tp = pp = 1
    if has_layout(checkpoint):
        layout = read_layout(checkpoint, 0)
        tp, pp = layout.tp, layout.pp
    found = [_trained_by(engine_dir, mp_rank) for mp_rank in range(tp * pp)]
    if tp == 1:
        return [weight for weights, _ in found for weight in weights], found[0][1]
    world_size = len(list(checkpoint.glob("layout-*.json")))
    layouts = (read_layout(checkpoint, rank) for rank in range(0, world_size, tp))
    slices = {piece.name: piece.slice for layout in layouts for slot in layout.slots for piece in slot}
    joined = [_joined(parts, slices.get(parts[0].name, ())) for parts in zip(*(weights for weights, _ in found))]
    return joined, found[0][1]


def _joined(parts: tuple[SavedWeight, ...], part: Slice) -> SavedWeight:
    """Join a weight from the ranks' slices. part: the first rank's slice, () if the weight was replicated."""
    first = parts[0]
    if not part:
        return first
    dim, shape = cut_dim(first.shape, part), list(first.shape)
    shape[dim] *= len(parts)
    return SavedWeight(first.name, tuple(shape), lambda: torch.cat([each.read() for each in parts], dim))


def _trained_by(engine_dir: Path, mp_rank: int) -> tuple[list[SavedWeight], torch.dtype]:
    """Return the trained parameters of the ranks with part mp_rank of the model."""
    found = engine_dir.glob(f"*mp_rank_{mp_rank:02}_model_states.pt")
    files = sorted((file for file in found if not file.name.startswith("layer_")), key=_rank)
    if not files:
        raise DataError(f"{engine_dir} has no DeepSpeed model states: is it a checkpoint of run/train.py?")
    try:
        first = read_states(files[0])
        module = {**first["module"], **_own_files(engine_dir)}
        shared = first["shared_params"] or {}  # None at stage 0
        dtype = next(iter(module.values())).dtype
        if files[0].name.startswith("zero_pp_rank_"):
            return _partitioned_weights(engine_dir, first, dtype, mp_rank), dtype
        whole = [(name, tensor) for name, tensor in module.items() if name not in shared]
        return [SavedWeight(name, tuple(tensor.shape), lambda t=tensor: t) for name, tensor in whole], dtype
    except (AttributeError, IndexError, KeyError, RuntimeError, StopIteration, TypeError) as error:
        text = f"{type(error).__name__}: {error}"[:200]
        raise DataError(f"{engine_dir} is not in DeepSpeed's format ({text}): use another checkpoint") from error


def _own_files(engine_dir: Path) -> dict[str, torch.Tensor]:
    """Return the parameters that are stored in separate files, by name in the complete model.

    DeepSpeed writes separate files for layers whose parameters differ between ranks, including frozen parameters.
    """
    files = sorted(engine_dir.glob("layer_*_model_states.pt"))
    return {name: tensor for file in files for name, tensor in read_states(file).items()}


def _partitioned_weights(engine_dir: Path, common: dict, dtype: torch.dtype, mp_rank: int) -> list[SavedWeight]:
    """Return the trained weights of a checkpoint of stage 3, with or without layouts.

    Each rank's flat fp32 groups hold an equal part of every parameter, in the order of param_shapes.
    """
    num_ranks = common["dp_world_size"]
    files = sorted(engine_dir.glob(f"*_mp_rank_{mp_rank:02}_optim_states.pt"), key=_rank)
    if len(files) != num_ranks:
        raise DataError(f"{engine_dir} was written by {num_ranks} ranks, but has optimizer states of {len(files)}")
    parts = [read_states(file)["optimizer_state_dict"]["fp32_flat_groups"] for file in files]
    weights, offset = [], 0
    for name, shape in ((name, tuple(shape)) for group in common["param_shapes"] for name, shape in group.items()):
        numel = math.prod(shape)
        length = -(-numel // num_ranks)

        def read(offset=offset, length=length, numel=numel, shape=shape) -> torch.Tensor:
            whole = torch.cat([part for groups in parts for part in _spans(groups, offset, length)])
            return whole[:numel].view(shape).to(dtype)

        weights.append(SavedWeight(name, shape, read))
        offset += length
    held = sum(group.numel() for group in parts[0])
    if offset != held:
        raise DataError(f"{engine_dir}: a rank's parameters have {offset} elements, its optimizer states have {held}")
    return weights


def _spans(groups: list[torch.Tensor], offset: int, length: int) -> Iterator[torch.Tensor]:
    """Yield views that together are `length` elements from `offset` of the concatenated flat groups."""
    for group in groups:
        part = group[offset : offset + length]
        yield part
        length -= part.numel()
        offset = max(0, offset - group.numel())


def _rank(file: Path) -> int:
    found = re.search(r"zero_pp_rank_(\d+)_", file.name)
    return 0 if found is None else int(found[1])
