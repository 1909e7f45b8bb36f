"""Exact checksums of tensors' bits: 64-bit words, summed with wrap-around in rows of ROW words."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

ROW = 1024  # words: the precision with which a changed bit is located
SMALL = 2**16  # bytes: smaller tensors are copied together, for one sum instead of many


class Entry(NamedTuple):
    """A tensor to watch. sizes: names and elements of the parameters laid end to end in it; owner: the rank whose
    optimizer writes this part of every rank's copy, None if each rank writes its own."""

    tensor: torch.Tensor
    sizes: Sequence[tuple[str, int]]
    owner: int | None = None


class Snapshot(NamedTuple):
    """Row sums at one moment. groups: entries summed together; sums: (rows,) int64 of each group."""

    groups: list[list[Entry]]
    sums: list[torch.Tensor]

    @property
    def values(self) -> torch.Tensor:
        """The sums of all groups, (rows,)."""
        return torch.cat(self.sums) if self.sums else torch.zeros(0, dtype=torch.int64)

    def changed(self) -> torch.Tensor:
        """Sum the same tensors again; return which rows differ, (rows,) bool."""
        return torch.cat([_sums(group) for group in self.groups]) != self.values

    def total(self, owner: int | None = None, of_all: bool = False) -> torch.Tensor:
        """Sum the groups of an owner, or of all owners. Returns an int64 scalar."""
        return sum(
            (each.sum() for (first, *_), each in zip(self.groups, self.sums) if of_all or first.owner == owner),
            self.values.new_zeros(()),
        )

    def names(self, changed: torch.Tensor) -> list[str]:
        """List the parameters in the changed rows."""
        found: dict[str, None] = {}
        for group, rows in zip(self.groups, changed.split([len(each) for each in self.sums])):
            begin, bytes_each = 0, group[0].tensor.element_size()
            for name, size in (pair for entry in group for pair in entry.sizes):
                end = begin + size * bytes_each
                first, last = (min(at // (8 * ROW), len(rows) - 1) for at in (begin, end - 1))
                if rows[first : last + 1].any():
                    found[name] = None
                begin = end
        return list(found)


def snapshot(entries: Iterable[Entry]) -> Snapshot:
    """Sum the entries' rows. Small tensors of one dtype are summed together, parts with an owner separately."""
    groups: list[list[Entry]] = []
    together: dict[tuple[torch.dtype, torch.device], list[Entry]] = {}
    for entry in entries:
        tensor = entry.tensor
        if entry.owner is not None or tensor.numel() * tensor.element_size() >= SMALL:
            groups.append([entry])
        elif (key := (tensor.dtype, tensor.device)) in together:
            together[key].append(entry)
        else:
            groups.append(together.setdefault(key, [entry]))
    return Snapshot(groups, [_sums(group) for group in groups])


def row_sums(tensor: torch.Tensor) -> torch.Tensor:
    """Sum a tensor's bits in rows of ROW words, (rows,) int64; the last row has the rest."""
    flat = tensor.detach().reshape(-1)
    size = flat.element_size()
    if flat.storage_offset() * size % 8:
        flat = flat.clone()  # a view as words has to begin at a word
    whole = flat.numel() * size // 8 * 8 // size
    words = flat[:whole].view(torch.int64)
    full = words.numel() // ROW * ROW
    rest = words[full:].sum() + flat[whole:].view(torch.uint8).sum()
    return torch.cat([words[:full].view(-1, ROW).sum(1), rest[None]])


def _sums(group: list[Entry]) -> torch.Tensor:
    tensors = [entry.tensor.detach().reshape(-1) for entry in group]
    return row_sums(tensors[0] if len(tensors) == 1 else torch.cat(tensors))
