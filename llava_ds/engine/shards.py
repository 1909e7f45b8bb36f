"""Where the fp32 weights and the optimizer's states of a rank lie: which part of which parameter, parameter by name.

Every stage of ZeRO cuts and orders them differently, and so do numbers of ranks. Said once for a live engine and
written beside its checkpoint, the same words find every number again in DeepSpeed's files.
"""

import dataclasses
import json
from collections.abc import Iterable
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
from llava_ds.files.reading import read_json

# Kinds of optimizer, by what wraps the one that the user chose.
PLAIN, UNFUSED, FUSED, ZERO, BF16_ZERO, ZERO_3 = "plain", "unfused", "fused", "zero", "bf16_zero", "zero_3"
MAX_LAYOUT_BYTES = 256 << 20  # of a file, which has a line for every parameter
REPLICATED = (PLAIN, UNFUSED, FUSED)  # every rank has all of it, and rank 0 saves it
_KINDS = {
    FP16_UnfusedOptimizer: UNFUSED,
    FP16_Optimizer: FUSED,
    DeepSpeedZeroOptimizer: ZERO,
    BF16_Optimizer: BF16_ZERO,
    DeepSpeedZeroOptimizer_Stage3: ZERO_3,
}


class Piece(NamedTuple):
    """A run of numbers of a parameter: from start (in the parameter, laid flat) on, length of them; offset: where in
    the slot's tensors they begin."""

    name: str
    start: int
    length: int
    offset: int


@dataclass(frozen=True)
class Layout:
    """kind: one of those above; optimizer: its class; dtypes of the model's and the optimizer's weights; slots: the
    pieces in each tensor that the optimizer updates, in the order in which it numbers their states; fused: whether it
    is torch's in one kernel, whose states lie elsewhere."""

    kind: str
    optimizer: str
    dtype: str
    master_dtype: str
    slots: tuple[tuple[Piece, ...], ...]
    fused: bool = False

    @property
    def names(self) -> set[str]:
        """Of the parameters that have a piece here."""
        return {piece.name for slot in self.slots for piece in slot}


def kind_of(engine) -> str:
    """How an engine keeps its optimizer's weights. Raises ConfigError for ways that are not known here."""
    optimizer = engine.optimizer
    if type(optimizer) in _KINDS:
        return _KINDS[type(optimizer)]
    if isinstance(optimizer, torch.optim.Optimizer):
        return PLAIN
    raise ConfigError(f"where {type(optimizer).__name__} keeps its states is not known: use another ZeRO configuration")


def masters(engine) -> list[torch.Tensor]:
    """The tensors that the optimizer updates and has states of, in the order in which it numbers them."""
    kind, optimizer = kind_of(engine), engine.optimizer
    if kind == PLAIN:
        return [p for group in optimizer.param_groups for p in group["params"]]
    if kind == UNFUSED:
        return [p for group in optimizer.fp32_groups for p in group]
    attributes = {
        FUSED: "fp32_groups_flat",
        ZERO: "single_partition_of_fp32_groups",
        BF16_ZERO: "fp32_groups_flat_partition",
        ZERO_3: "fp32_partitioned_groups_flat",
    }
    return list(getattr(optimizer, attributes[kind]))


def layout_of(engine) -> Layout:
    """Where this rank of an engine keeps what."""
    kind, optimizer, name_of = kind_of(engine), engine.optimizer, engine.param_names
    if kind == PLAIN:
        slots = [_one_after_the_other([p], name_of) for p in masters(engine)]
    elif kind == UNFUSED:
        slots = [_one_after_the_other([p], name_of) for group in optimizer.fp16_groups for p in group]
    elif kind == FUSED:
        slots = [_one_after_the_other(group, name_of) for group in optimizer.fp16_groups]
    elif kind == ZERO_3:
        slots = [_partitions(group, name_of) for group in optimizer.fp16_groups]
    else:
        groups = optimizer.bit16_groups if kind == ZERO else optimizer.bf16_groups
        slots = [_fragments(group, name_of) for group in groups]
    return Layout(
        kind,
        type(engine.basic_optimizer).__name__,
        str(engine.get_data_types()[0]),
        str(masters(engine)[0].dtype),
        tuple(tuple(slot) for slot in slots),
        any(group.get("fused") for group in engine.basic_optimizer.param_groups),
    )


def _one_after_the_other(parameters: Iterable[torch.Tensor], name_of: dict) -> list[Piece]:
    """Whole parameters."""
    pieces, offset = [], 0
    for p in parameters:
        pieces.append(Piece(name_of[p], 0, p.numel(), offset))
        offset += p.numel()
    return pieces


def _fragments(parameters: Iterable[torch.Tensor], name_of: dict) -> list[Piece]:
    """Stages 1 and 2: a rank's part of a group's parameters, laid end to end; DeepSpeed links them."""
    pieces = []
    for p in parameters:
        if p._hp_mapping is not None:
            part, held = p._hp_mapping.lp_fragment_address, p._hp_mapping.hp_fragment_address
            pieces.append(Piece(name_of[p], part.start, part.numel, held.start))
    return pieces


def _partitions(parameters: Iterable[torch.Tensor], name_of: dict) -> list[Piece]:
    """Stage 3: a rank's part of every parameter of a sub-group; the last ranks' may be padding."""
    pieces, offset = [], 0
    for p in parameters:
        share = p.partition_numel()
        start = share * torch.distributed.get_rank(p.ds_process_group)
        if start < p.ds_numel:
            pieces.append(Piece(name_of[p], start, min(share, p.ds_numel - start), offset))
        offset += share
    return pieces


def layout_text(engine) -> str:
    """What a rank writes to layout_file."""
    return json.dumps(dataclasses.asdict(layout_of(engine)))


def read_layout(folder: Path, rank: int) -> Layout:
    """What a rank wrote. Raises DataError where that is missing or can't be read."""
    file = layout_file(folder, rank)
    try:
        found = read_json(file, dict, MAX_LAYOUT_BYTES)
        slots = tuple(tuple(Piece(*piece) for piece in slot) for slot in found.pop("slots"))
        return Layout(**found, slots=slots)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{file} can't be read: {error}") from error


def has_layout(folder: Path) -> bool:
    """Whether a checkpoint says where its numbers lie: those of earlier versions don't."""
    return layout_file(folder, 0).is_file()


def layout_file(folder: Path, rank: int) -> Path:
    """Where a rank says which parameters its part of a checkpoint holds, and where in its files."""
    return folder / f"layout-{rank}.json"


def saved_masters(layout: Layout, states: dict) -> list[torch.Tensor]:
    """As masters(), of what DeepSpeed saved. states: optimizer_states() of the rank, or model_states() at stage 0."""
    if layout.kind == PLAIN:
        return [states["module"][slot[0].name] for slot in layout.slots]
    if layout.kind == UNFUSED:
        return [p for group in states["optimizer"]["fp32_groups"] for p in group]
    if layout.kind == FUSED:
        return states["optimizer"]["fp32_groups_flat"]
    return states["fp32_flat_groups" if layout.kind == ZERO_3 else "single_partition_of_fp32_groups"]


def saved_optimizer(layout: Layout, states: dict) -> dict:
    """The state_dict of the optimizer that the user chose: its "state" is numbered as saved_masters."""
    if layout.kind == PLAIN:
        return states["optimizer"]
    if layout.kind in (UNFUSED, FUSED):
        return states["optimizer"]["optimizer_state_dict"]
    return states["optimizer_state_dict" if layout.kind == ZERO_3 else "base_optimizer_state"]
