"""Whatever ranks and stages cut weights and states into, they come together again as other ranks and stages need them,
bit for bit."""

import itertools

import pytest
import torch

from llava_ds.checkpoint import reshard
from llava_ds.checkpoint.checkpoint_files import SavedPiece, states_by_tensor
from llava_ds.constants import ConfigError, DataError
from llava_ds.engine.shards.pieces import Layout, Piece

SHAPES = {"a.weight": (5, 3), "a.bias": (3,), "b.weight": (7, 2), "scale": (1,), "c.weight": (2, 2, 2)}
GROUPS = (("a.weight", "b.weight", "c.weight"), ("a.bias", "scale"))
STEPS = 9


def whole(name: str, what: int) -> torch.Tensor:
    """A parameter (what 0) or one of its moments, with numbers that are nowhere else."""
    generator = torch.Generator().manual_seed(list(SHAPES).index(name) + 100 * what)
    return torch.randn(SHAPES[name], generator=generator)


def cut(kind: str, world_size: int, rank: int) -> tuple[tuple[Piece, ...], ...]:
    """What a rank has of the parameters, in stages' ways. zero: groups laid end to end and cut evenly; zero_3: every
    parameter cut evenly, two to a sub-group."""
    numel = {name: torch.Size(shape).numel() for name, shape in SHAPES.items()}
    if kind == "plain":
        return tuple((Piece(name, (), 0, numel[name], 0),) for group in GROUPS for name in group)
    if kind == "zero_3":
        slots = []
        for group in GROUPS:
            for names in filter(None, (group[:2], group[2:])):
                pieces, offset = [], 0
                for name in names:
                    share = -(-numel[name] // world_size)
                    start = rank * share
                    if start < numel[name]:
                        pieces.append(Piece(name, (), start, min(share, numel[name] - start), offset))
                    offset += share
                slots.append(tuple(pieces))
        return tuple(slots)
    slots = []
    for group in GROUPS:
        share = -(-sum(numel[name] for name in group) // world_size) + 1  # padding at the end
        begin, pieces = 0, []
        for name in group:
            first, last = max(begin, rank * share), min(begin + numel[name], (rank + 1) * share)
            if first < last:
                pieces.append(Piece(name, (), first - begin, last - first, first - rank * share))
            begin += numel[name]
        slots.append(tuple(pieces))
    return tuple(slots)


def sizes(kind: str, slots: tuple[tuple[Piece, ...], ...]) -> list[int]:
    """Numbers in each tensor, with padding."""
    return [max((piece.offset + piece.length for piece in slot), default=0) + 2 * (kind != "plain") for slot in slots]


def saved(kind: str, world_size: int):
    """As saved_pieces yields them, of a run on that many ranks."""
    for rank in range(1 if kind == "plain" else world_size):
        slots = cut(kind, world_size, rank)
        for slot, size in zip(slots, sizes(kind, slots)):
            tensors = [torch.full((size,), torch.nan) for _ in range(3)]
            for piece in slot:
                for what, tensor in enumerate(tensors):
                    part = whole(piece.name, what).flatten()[piece.start :][: piece.length]
                    tensor[piece.offset :][: piece.length] = part
            if kind == "plain":
                tensors = [tensor.view(SHAPES[slot[0].name]) for tensor in tensors]
            states = {"exp_avg": tensors[1], "exp_avg_sq": tensors[2], "step": torch.tensor(float(STEPS))}
            for piece in slot:
                yield SavedPiece(piece, tensors[0], states)


def filled(kind: str, world_size: int, rank: int, pieces, optimizer=torch.optim.AdamW):
    """A rank's tensors and states after fill()."""
    slots = cut(kind, world_size, rank)
    layout = Layout(kind, "AdamW", "torch.float32", "torch.float32", slots)
    tensors = [torch.zeros(size) for size in sizes(kind, slots)]
    if kind == "plain":
        tensors = [torch.zeros(SHAPES[slot[0].name]) for slot in slots]
    tensors = [tensor.requires_grad_() for tensor in tensors]
    made = optimizer(tensors, lr=1.0)
    reshard.fill(made, tensors, layout, pieces)
    return slots, tensors, made.state


WAYS = [("plain", 1), *itertools.product(("zero", "zero_3"), (1, 2, 3, 4))]


@pytest.mark.parametrize("before", WAYS, ids=str)
@pytest.mark.parametrize("after", WAYS, ids=str)
def test_every_number_arrives_from_every_cut_in_every_other(before, after):
    kind, world_size = after
    seen = {name: 0 for name in SHAPES}
    for rank in range(world_size):
        slots, tensors, state = filled(kind, world_size, rank, saved(*before))
        for slot, tensor in zip(slots, tensors):
            for piece in slot:
                seen[piece.name] += piece.length
                held = (tensor, state[tensor]["exp_avg"], state[tensor]["exp_avg_sq"])
                for what, values in enumerate(held):
                    part = values.detach().flatten()[piece.offset :][: piece.length]
                    assert torch.equal(part, whole(piece.name, what).flatten()[piece.start :][: piece.length])
                    assert values.isfinite().all()  # the padding of old files stays behind
                assert state[tensor]["step"] == STEPS
    assert seen == {name: whole(name, 0).numel() for name in SHAPES}


def test_pieces_of_a_part_are_not_taken_for_the_whole_parameter():
    pieces = []
    for piece, *rest in saved("plain", 1):
        half = (0, piece.length // 2, piece.length)
        pieces.append(SavedPiece(piece._replace(slice=half, length=piece.length // 2), *rest))
    with pytest.raises(DataError, match=r"of this rank's weights are missing from the checkpoint's files"):
        filled("plain", 1, 0, pieces)


def test_a_missing_part_and_counts_that_differ_are_refused():
    with pytest.raises(DataError, match=r"of this rank's weights are missing from the checkpoint's files"):
        filled("plain", 1, 0, list(saved("zero", 2))[:-1])
    pieces = [SavedPiece(piece, tensor, dict(states)) for piece, tensor, states in saved("plain", 1)]
    pieces[0].states["step"] = torch.tensor(3.0)
    with pytest.raises(DataError, match=r"has step 9.0, but others in its group have 3.0"):
        filled("zero", 1, 0, pieces)


def test_states_that_are_not_one_number_per_weight_are_refused():
    pieces = [SavedPiece(piece, tensor, {"row": torch.zeros(5)}) for piece, tensor, _ in saved("plain", 1)]
    with pytest.raises(ConfigError, match=r"state row has shape \(5,\) for 15 weights and can't be re-sharded"):
        filled("zero", 2, 0, pieces)


def test_a_fused_kernels_count_of_the_groups_last_tensor_counts_for_all():
    layout = Layout("plain", "FusedAdam", "torch.float32", "torch.float32", ())
    state = {0: {"step": 0}, 1: {"step": 7}, 2: {"step": 7}}
    groups = [{"params": [0, 1]}, {"params": [2, 3]}]
    counted = states_by_tensor(layout, {"state": state, "param_groups": groups})
    assert counted == {0: {"step": 7}, 1: {"step": 7}, 2: {"step": 7}}


class NotTorchs(torch.optim.SGD):
    """Like DeepSpeed's own, of another package than torch."""


def test_a_count_of_steps_becomes_a_tensor_for_torchs_optimizers_and_a_number_for_deepspeeds():
    for kept in (torch.tensor(9.0), 9):
        pieces = [SavedPiece(piece, tensor, {**states, "step": kept}) for piece, tensor, states in saved("zero", 2)]
        (_, tensors, state), (_, others, numbers) = (
            filled("plain", 1, 0, pieces, of) for of in (torch.optim.AdamW, NotTorchs)
        )
        assert all(torch.equal(state[tensor]["step"], torch.tensor(9.0)) for tensor in tensors)
        assert all(numbers[tensor]["step"] == 9 and type(numbers[tensor]["step"]) is int for tensor in others)
