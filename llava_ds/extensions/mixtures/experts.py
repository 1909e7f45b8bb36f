# E experts per layer, I width of an expert, D width of the language model
"""Convert experts between one stacked tensor per layer in memory and one tensor per expert on disk.

transformers 5 computes with "mlp.experts.gate_up_proj" (E, 2 I, D), in which each expert's gate comes before its up,
and "mlp.experts.down_proj" (E, D, I). Source: its conversion_mapping.py.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator
from functools import partial

import torch
from transformers import PreTrainedConfig

from llava_ds.constants import DataError
from llava_ds.export.tensors import Entry
from llava_ds.extensions.mixtures.kinds import ExpertNames
from llava_ds.model.open import names as formats
from llava_ds.model.open.weights import WeightFiles, Weights

_STACKED = re.compile(r"^(.*\.mlp)\.experts\.(gate_up_proj|down_proj)$")


def from_disk(name: str, names: ExpertNames) -> str:
    """Replace the parts of a name on disk that have other names in memory."""
    for on_disk, in_memory in names.renamed:
        name = name.replace(on_disk, in_memory)
    return name


def to_disk(name: str, names: ExpertNames) -> str:
    """Reverse from_disk, for tensors without experts or with all experts stacked on disk."""
    for on_disk, in_memory in names.renamed:
        name = name.replace(in_memory, on_disk)
    return name


def divided(name: str, shape: tuple[int, ...], names: ExpertNames) -> list[tuple[str, tuple[int, ...], tuple]]:
    """List the tensors on disk that a stacked tensor holds: name, shape, index into it. Empty for other tensors."""
    found = _STACKED.match(name)
    if names.matrices is None or found is None or len(shape) != 3:
        return []
    block, kind, (gate, up, down) = to_disk(f"{found[1]}.", names), found[2], names.matrices
    experts, rows, columns = shape
    if kind == "down_proj":
        return [(f"{block}experts.{i}.{down}.weight", (rows, columns), (i,)) for i in range(experts)]
    halves = ((gate, slice(rows // 2)), (up, slice(rows // 2, rows)))
    return [
        (f"{block}experts.{i}.{part}.weight", (rows // 2, columns), (i, half))
        for i in range(experts)
        for part, half in halves
    ]


def part_of(name: str, names: ExpertNames) -> tuple[str, int, str] | None:
    """Split the name of an expert's matrix, after from_disk, into stacked tensor, expert number and matrix word.

    Returns None for other tensors.
    """
    if names.matrices is None:
        return None
    found = re.match(rf"^(.*\.experts)\.(\d+)\.({'|'.join(names.matrices)})\.weight$", name)
    if found is None:
        return None
    return f"{found[1]}.{'down_proj' if found[3] == names.matrices[2] else 'gate_up_proj'}", int(found[2]), found[3]


def divided_entries(entries: list[Entry], names: ExpertNames) -> list[Entry]:
    """Rewrite export entries to the on-disk form: one entry per expert, blocks under the family's name."""
    found: list[Entry] = []
    for entry in entries:
        if not entry.name.startswith(formats.LANGUAGE_MODEL):  # the tower may have tensors of the same name
            found.append(entry)
            continue
        parts = divided(entry.name, entry.shape, names)
        whole = _SharedRead(entry.read, len(parts))
        found += [Entry(name, shape, partial(whole.part, index)) for name, shape, index in parts]
        if not parts:
            found.append(dataclasses.replace(entry, name=to_disk(entry.name, names)))
    return found


class _SharedRead:
    """A tensor that is read once for all of its parts and freed after the last. Each part is read once."""

    def __init__(self, read: Callable[[], torch.Tensor], num_parts: int) -> None:
        self._read, self._num_parts, self._left = read, num_parts, 0
        self._whole: torch.Tensor | None = None

    def part(self, index: tuple) -> torch.Tensor | None:
        if not self._left:
            self._whole, self._left = self._read(), self._num_parts
        found = None if self._whole is None else self._whole[index].clone()
        self._left -= 1
        if not self._left:
            self._whole = None
        return found


class Stacked:
    """Weights whose experts are stacked while they are read, one layer's tensor at a time.

    weights: with names mapped by from_disk. Raises DataError if experts are missing or differ in shape.
    """

    def __init__(self, weights: WeightFiles, names: ExpertNames) -> None:
        self.path, self.notes, self._weights = weights.path, weights.notes, weights
        parts: dict[str, dict[tuple[int, str], str]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in weights.shapes.items():
            if found := part_of(name, names):
                stack, *place = found
                parts.setdefault(stack, {})[tuple(place)] = name
            else:
                self.shapes[name] = shape
        self._stacks = {name: self._stack(name, of_name, names) for name, of_name in parts.items()}
        for name, stack in self._stacks.items():
            rows, columns = weights.shapes[stack[0][0]]
            self.shapes[name] = (len(stack), rows * len(stack[0]), columns)

    def _stack(self, name: str, parts: dict[tuple[int, str], str], names: ExpertNames) -> list[list[str]]:
        """Return the matrix names of each expert, one or two per expert."""
        kinds = names.matrices[2:] if name.endswith("down_proj") else names.matrices[:2]
        number = 1 + max(i for i, _ in parts)
        missing = [(i, kind) for i in range(number) for kind in kinds if (i, kind) not in parts]
        if missing:
            i, kind = missing[0]
            raise DataError(
                f"{self.path} lacks {kind} of expert {i} in {name.rpartition('.')[0]}: copy the folder again"
            )
        if len({self._weights.shapes[part] for part in parts.values()}) > 1:
            raise DataError(f"{self.path}: the experts of {name} differ in shape: copy the folder again")
        return [[parts[i, kind] for kind in kinds] for i in range(number)]

    def tensors(self) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        """Yield every tensor's name and a function that reads it, valid until the next one is yielded."""
        inside = {part for stack in self._stacks.values() for expert in stack for part in expert}
        for name, read in self._weights.tensors():
            if name not in inside:
                yield name, read
        for name in self._stacks:
            yield name, partial(self._read, name)

    def _read(self, name: str) -> torch.Tensor:
        stack = self._stacks[name]
        places = {part: (i, j) for i, expert in enumerate(stack) for j, part in enumerate(expert)}
        whole = None
        for part, tensor in self._weights.read(places):
            if whole is None:
                whole = torch.empty(self.shapes[name], dtype=tensor.dtype)
            i, j = places[part]
            whole[i, j * len(tensor) : (j + 1) * len(tensor)] = tensor
        return whole


class TransposedExperts:
    """Weights whose stacked expert tensors are transposed to (E, O, I) if the folder has (E, I, O).

    config: of the language model. A shape that already fits is kept: transformers can't detect transposed squares.
    """

    def __init__(self, weights: Weights, config: PreTrainedConfig) -> None:
        self.path, self.notes, self._weights = weights.path, weights.notes, weights
        width, inner = config.hidden_size, config.moe_intermediate_size
        expected = {"gate_up_proj": (2 * inner, width), "down_proj": (width, inner)}
        self._transposed = {
            name
            for name, shape in weights.shapes.items()
            if (found := _STACKED.match(name)) and len(shape) == 3 and shape[1:] != expected[found[2]]
        }
        self.shapes = {
            name: (shape[0], shape[2], shape[1]) if name in self._transposed else shape
            for name, shape in weights.shapes.items()
        }

    def tensors(self) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        """Yield every tensor's name and a function that reads it, valid until the next one is yielded."""
        for name, read in self._weights.tensors():
            yield name, partial(_transposed, read) if name in self._transposed else read


def _transposed(read: Callable[[], torch.Tensor]) -> torch.Tensor:
    return read().transpose(1, 2).contiguous()
