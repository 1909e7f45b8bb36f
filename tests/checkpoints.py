"""What is in checkpoints, number by number, and a run broken off at one of them."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from llava_ds.checkpoint.engine_files import read_states


def leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Everything in nested dicts and lists, by its place."""
    if isinstance(value, dict):
        for key in value:
            yield from leaves(value[key], f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}/{index}")
    else:
        yield (
            path,
            value
            if torch.is_tensor(value) or isinstance(value, (int, float, str))
            else str(vars(value))
            if (hasattr(value, "__dict__"))
            else value,
        )


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
    broken.mkdir(parents=True)
    shutil.copytree(whole / f"checkpoint-{step}", broken / f"checkpoint-{step}")
    shutil.copy(whole / "metrics.jsonl", broken)  # holds later steps too, which will come again
    return broken
