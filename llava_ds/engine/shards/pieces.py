"""Pieces of parameters: the position of each parameter's elements in a rank's optimizer and in its files.

ZeRO divides and orders the parameters differently for every stage and number of ranks. A Layout lists, by parameter
name, the pieces that one rank holds. It is made from a live engine and saved in every checkpoint, so each element can
be found in both.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from llava_ds.constants import ConfigError, DataError
from llava_ds.engine.placement import Share, Slice, placement_of
from llava_ds.files.reading import read_json

MAX_LAYOUT_BYTES = 256 << 20  # largest accepted layout file (it lists all pieces)

# Kinds of optimizer: DeepSpeed's wrapper around the user's optimizer.
PLAIN, UNFUSED, FUSED, ZERO, BF16_ZERO, ZERO_3 = "plain", "unfused", "fused", "zero", "bf16_zero", "zero_3"
REPLICATED = (PLAIN, UNFUSED, FUSED)  # every data-parallel rank has the whole state, and the first one saves it


class Wrapper(NamedTuple):
    """Names in DeepSpeed 0.19. masters, weights: attributes with the tensors that the optimizer updates, and with the
    model's parameters by group; saved, saved_optimizer: state_dict keys of the masters and of the user's optimizer."""

    masters: str
    weights: str
    saved: str
    saved_optimizer: str


WRAPPERS = {
    UNFUSED: Wrapper("fp32_groups", "fp16_groups", "fp32_groups", "optimizer_state_dict"),
    FUSED: Wrapper("fp32_groups_flat", "fp16_groups", "fp32_groups_flat", "optimizer_state_dict"),
    ZERO: Wrapper(
        "single_partition_of_fp32_groups", "bit16_groups", "single_partition_of_fp32_groups", "base_optimizer_state"
    ),
    BF16_ZERO: Wrapper(
        "fp32_groups_flat_partition", "bf16_groups", "single_partition_of_fp32_groups", "base_optimizer_state"
    ),
    ZERO_3: Wrapper("fp32_partitioned_groups_flat", "fp16_groups", "fp32_flat_groups", "optimizer_state_dict"),
}
_KINDS = {
    FP16_UnfusedOptimizer: UNFUSED,
    FP16_Optimizer: FUSED,
    DeepSpeedZeroOptimizer: ZERO,
    BF16_Optimizer: BF16_ZERO,
    DeepSpeedZeroOptimizer_Stage3: ZERO_3,
}


class Block(NamedTuple):
    """Elements shared by two pieces: `rows` rows of `width` elements. Row i starts at from_ + i * from_step in the
    first piece's tensor and at to + i * to_step in the second piece's."""

    rows: int
    width: int
    from_: int
    from_step: int
    to: int
    to_step: int


class Piece(NamedTuple):
    """Consecutive elements of a parameter's flattened slice: `length` elements from `start`.

    name: the parameter's name in the model; offset: start of the piece in the slot's tensor.
    """

    name: str
    slice: Slice
    start: int
    length: int
    offset: int

    def overlap(self, other: "Piece") -> int:
        """Return the number of elements in both pieces of one parameter."""
        return sum(block.rows * block.width for block in self.common(other))

    def common(self, other: "Piece") -> list[Block]:
        """Return the elements in both pieces of one parameter, as blocks."""
        if self.slice == other.slice:
            first = max(self.start, other.start)
            width = min(self.start + self.length, other.start + other.length) - first
            from_, to = self.offset + first - self.start, other.offset + first - other.start
            return [Block(1, width, from_, 0, to, 0)] if width > 0 else []
        # Either both slices are cut along the same dimension, or one of them is the whole parameter.
        period = (self.slice or other.slice)[2]
        blocks = []
        for a in self._rectangles(period):
            for b in other._rectangles(period):
                top, left = max(a.top, b.top), max(a.left, b.left)
                bottom, right = min(a.bottom, b.bottom), min(a.right, b.right)
                if top < bottom and left < right:
                    blocks.append(Block(bottom - top, right - left, *a.place(top, left), *b.place(top, left)))
        return blocks

    def _rectangles(self, period: int) -> list["_Rectangle"]:
        """View the parameter as rows of `period` elements. Returns the piece's first, middle and last rows in it."""
        begin, end, _ = self.slice or (0, period, period)
        width = end - begin
        found, done = [], 0
        while done < self.length:
            row, column = divmod(self.start + done, width)
            if column or self.length - done < width:
                rows, columns = 1, min(width - column, self.length - done)
            else:
                rows, columns = (self.length - done) // width, width
            left = begin + column
            found.append(_Rectangle(row, row + rows, left, left + columns, self.offset + done, width))
            done += rows * columns
        return found


class _Rectangle(NamedTuple):
    """Elements of a piece that fill the same columns of consecutive rows. offset: position of the first element in the
    slot's tensor; step: distance between rows in that tensor."""

    top: int
    bottom: int
    left: int
    right: int
    offset: int
    step: int

    def place(self, row: int, column: int) -> tuple[int, int]:
        """Return an element's position in the slot's tensor, and the distance to the element in the next row."""
        return self.offset + (row - self.top) * self.step + column - self.left, self.step


@dataclass(frozen=True)
class Layout:
    """The pieces of parameters that one rank's optimizer holds.

    kind: one of the constants above; optimizer: name of the optimizer's class; dtype, master_dtype: precision of the
    weights in the model and in the optimizer; slots: the pieces in each tensor that the optimizer updates, in the order
    of its states; fused: True for torch's fused kernels, which keep the step count on the device; tp, pp, ep: number of
    ranks that shared the model on each axis (see Placement).
    """

    kind: str
    optimizer: str
    dtype: str
    master_dtype: str
    slots: tuple[tuple[Piece, ...], ...]
    fused: bool = False
    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def names(self) -> set[str]:
        """Names of the parameters of which this rank holds a piece."""
        return {piece.name for slot in self.slots for piece in slot}


def kind_of(engine) -> str:
    """Return the kind of an engine's optimizer. Raises ConfigError for an unknown one."""
    optimizer = engine.optimizer
    if type(optimizer) in _KINDS:
        return _KINDS[type(optimizer)]
    if isinstance(optimizer, torch.optim.Optimizer):
        return PLAIN
    raise ConfigError(f"{type(optimizer).__name__} keeps its states in an unknown form: use another ZeRO configuration")


def masters(engine) -> list[torch.Tensor]:
    """List the tensors that the optimizer updates and keeps states for, in its order."""
    kind, optimizer = kind_of(engine), engine.optimizer
    if kind == PLAIN:
        return [p for group in optimizer.param_groups for p in group["params"]]
    tensors = getattr(optimizer, WRAPPERS[kind].masters)
    return [p for group in tensors for p in group] if kind == UNFUSED else list(tensors)


def layout_of(engine) -> Layout:
    """Describe this rank's part of the engine's states."""
    kind, placement = kind_of(engine), placement_of(engine)
    shares = placement.held(engine.module)
    parameters = masters(engine) if kind == PLAIN else getattr(engine.optimizer, WRAPPERS[kind].weights)
    if kind == UNFUSED:
        parameters = [p for group in parameters for p in group]
    slots = [[p] for p in parameters] if kind in (PLAIN, UNFUSED) else parameters
    pieces = {ZERO: _fragments, BF16_ZERO: _fragments, ZERO_3: _partitions}.get(kind, _whole_parameters)
    return Layout(
        kind,
        type(engine.basic_optimizer).__name__,
        str(engine.get_data_types()[0]),
        str(masters(engine)[0].dtype),
        tuple(tuple(pieces(slot, shares)) for slot in slots),
        any(group.get("fused") for group in engine.basic_optimizer.param_groups),
        **{placement.axis: placement.size},
    )


def _whole_parameters(parameters: list[torch.Tensor], shares: dict[torch.Tensor, Share]) -> list[Piece]:
    """Pieces at stage 0: whole parameters laid end to end."""
    pieces, offset = [], 0
    for p in parameters:
        pieces.append(Piece(shares[p].name, shares[p].slice, 0, p.numel(), offset))
        offset += p.numel()
    return pieces


def _fragments(parameters: list[torch.Tensor], shares: dict[torch.Tensor, Share]) -> list[Piece]:
    """Pieces at stages 1 and 2, read from DeepSpeed's _hp_mapping: a rank holds one range of the flattened group."""
    linked = [(shares[p], p._hp_mapping) for p in parameters if p._hp_mapping is not None]
    addresses = ((share, to.lp_fragment_address, to.hp_fragment_address) for share, to in linked)
    return [Piece(share.name, share.slice, low.start, low.numel, high.start) for share, low, high in addresses]


def _partitions(parameters: list[torch.Tensor], shares: dict[torch.Tensor, Share]) -> list[Piece]:
    """Pieces at stage 3: a rank holds an equal part of every parameter; on the last ranks it may be padding."""
    pieces, offset = [], 0
    for p in parameters:
        length = p.partition_numel()
        start = length * torch.distributed.get_rank(p.ds_process_group)
        if start < p.ds_numel:
            pieces.append(Piece(shares[p].name, shares[p].slice, start, min(length, p.ds_numel - start), offset))
        offset += length
    return pieces


def layout_text(engine) -> str:
    """Return this rank's layout as JSON, the content of its layout_file."""
    return json.dumps(dataclasses.asdict(layout_of(engine)))


def read_layout(checkpoint: Path, rank: int) -> Layout:
    """Read a rank's layout file. Raises DataError if it is missing or can't be read.

    Earlier versions wrote pieces without a slice: these are pieces of whole parameters.
    """
    file = layout_file(checkpoint, rank)
    try:
        found = read_json(file, dict, MAX_LAYOUT_BYTES)
        slots = tuple(tuple(_read_piece(*piece) for piece in slot) for slot in found.pop("slots"))
        return Layout(**found, slots=slots)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{file} can't be read: {error}") from error


def _read_piece(name: str, *numbers) -> Piece:
    part, *numbers = numbers if len(numbers) == 4 else ((), *numbers)
    if len(part) not in (0, 3):
        raise ValueError(f"{name} has the slice {part}")
    return Piece(name, tuple(part), *numbers)


def has_layout(checkpoint: Path) -> bool:
    """True if a checkpoint has layouts; the first versions wrote none."""
    return layout_file(checkpoint, 0).is_file()


def layout_file(checkpoint: Path, rank: int) -> Path:
    """Return the path of a rank's layout file."""
    return checkpoint / f"layout-{rank}.json"
