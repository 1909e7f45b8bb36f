"""Compare checkpoints number by number, and interrupt a run at a checkpoint."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from llava_ds.checkpoint.checkpoint_files import model_states, read_states, saved_pieces
from llava_ds.engine.shards.checkpoint_writer import ENGINE
from llava_ds.engine.shards.pieces import PLAIN, Layout, Piece


def leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Everything in nested dicts and lists, by its place."""
    if isinstance(value, dict):
        for key in value:
            yield from leaves(value[key], f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}/{index}")
    elif hasattr(value, "__dict__") and not torch.is_tensor(value) and not isinstance(value, int):
        yield path, str(vars(value))  # a loss scaler, or a fragment's position
    else:
        yield path, value


def contents(checkpoint: Path) -> dict[str, object]:
    """Every tensor and number in a checkpoint's files, by file and place."""
    found = {}
    for file in sorted(checkpoint.rglob("*.pt")):
        states = torch.load(file, weights_only=True) if file.name.startswith("random-") else read_states(file)
        found |= dict(leaves(states, str(file.relative_to(checkpoint))))
    return found


def differences(one: Path, other: Path) -> list[str]:
    """Places at which two checkpoints are not bit for bit the same."""
    first, second = contents(one), contents(other)
    assert first and first.keys() == second.keys(), first.keys() ^ second.keys()
    return [
        place
        for place, value in first.items()
        if not (
            torch.equal(value, second[place])
            if torch.is_tensor(value)
            else value == second[place] and type(value) is type(second[place])
        )
    ]


def break_off(whole: Path, broken: Path, step: int) -> Path:
    """A folder as a run leaves it that was killed after saving a step. Returns it."""
    (broken / "run").mkdir(parents=True)
    shutil.copytree(whole / f"checkpoint-{step}", broken / f"checkpoint-{step}")
    shutil.copy(whole / "run" / "metrics.jsonl", broken / "run")  # holds later steps too; they are repeated
    return broken


def assembled(checkpoint: Path, world_size: int, shapes: dict[str, torch.Size]) -> dict[str, dict[str, torch.Tensor]]:
    """Whole fp32 weights ("weight") and Adam's moments in a checkpoint of any size and stage, by parameter."""
    live = Layout(
        PLAIN, "AdamW", "", "", tuple((Piece(name, (), 0, shape.numel(), 0),) for name, shape in shapes.items())
    )
    found = {
        key: {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
        for key in ("weight", "exp_avg", "exp_avg_sq")
    }
    for piece, weight, states in saved_pieces(checkpoint, world_size, live):
        for key, tensor in {"weight": weight, **{key: states[key] for key in ("exp_avg", "exp_avg_sq")}}.items():
            part = tensor.reshape(-1)[piece.offset :][: piece.length]
            found[key][piece.name].view(-1)[piece.start :][: piece.length] = part
    return found


def trained_shapes(checkpoint: Path) -> dict[str, torch.Size]:
    """Read a checkpoint's parameters. ZeRO 1 to 3 only."""
    return {name: shape for group in model_states(checkpoint / ENGINE)["param_shapes"] for name, shape in group.items()}
