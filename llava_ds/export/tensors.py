# V rows of an embedding, D language-model width
"""A model's tensors one after the other: named and measured before any of them is read."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.initialization import no_init_weights

from llava_ds.engine.placement import placement_of
from llava_ds.export.bit_check import Written, sums_of
from llava_ds.extensions.active import text_part
from llava_ds.files.writing import write_tensors
from llava_ds.model.families.language import embedding_name, is_tied_in_hf, names_in_hf
from llava_ds.model.llava import LlavaModel
from llava_ds.model.open import names as formats
from llava_ds.model.open.names import VALUE_HEAD_FILE
from llava_ds.model.open.weights import Weights
from llava_ds.runtime.ranks import Ranks


@dataclass(frozen=True)
class Entry:
    """A tensor that can be read: its name, its shape, and how it comes to the CPU."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]

    @property
    def numel(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)


def live_entries(model: LlavaModel, ranks: Ranks) -> list[Entry]:
    """List the parameters of the whole model, whichever ranks have them; a tied one once, those of a child not.

    Reading is done by all ranks together and in the same order, and gives the tensor on rank 0 only. One parameter is
    whole at a time.
    """
    placement = placement_of(model)
    return [
        Entry(share.name, share.shape, partial(placement.read, share, parameter, ranks))
        for share, parameter in placement.shares(model)
        if not formats.is_of_child(share.name)
    ]


class Counted:
    """Counts how many entries were read."""

    def __init__(self) -> None:
        self.num_read = 0

    def entries(self, entries: Iterable[Entry]) -> list[Entry]:
        """The same entries, whose reading is counted."""
        return [dataclasses.replace(entry, read=partial(self._read, entry)) for entry in entries]

    def _read(self, entry: Entry) -> torch.Tensor | None:
        self.num_read += 1
        return entry.read()


def take_part(entries: Iterable[Entry]) -> None:
    """Do what the ranks beside the first have to while rank 0 reads the live entries."""
    for entry in entries:
        entry.read()


def read_entries(part: str, weights: Weights, dtype: torch.dtype | None = None) -> list[Entry]:
    """The tensors of a part's weights, by their names in the whole model; dtype: a precision that they go through.

    Reading them in this order opens one file at a time.
    """
    cursor = _Cursor(weights)

    def read(name: str) -> torch.Tensor:
        tensor = cursor.read(name)
        return tensor if dtype is None else tensor.to(dtype)

    return [Entry(f"{part}.{name}", weights.shapes[name], partial(read, name)) for name, _ in weights.tensors()]


class _Cursor:
    """Weights read by name, though what they give to read a tensor holds until the next one only."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._rest: Iterator[tuple[str, Callable[[], torch.Tensor]]] = iter(())
        self._here: str | None = None

    def read(self, name: str) -> torch.Tensor:
        """The tensor; one behind the last that was read needs no new beginning."""
        if self._here != name and not self._advance(name):
            self._rest = self._weights.tensors()
            assert self._advance(name), f"{self._weights.path} has no {name}"
        return self._read()

    def _advance(self, name: str) -> bool:
        for here, read in self._rest:
            if here == name:
                self._here, self._read = here, read
                return True
        return False


def completed(entries: Iterable[Entry], others: Iterable[Entry]) -> list[Entry]:
    """The entries, and those of the others that they lack: layers of the tower that training never built."""
    entries = list(entries)
    seen = {entry.name for entry in entries}
    return entries + [entry for entry in others if entry.name not in seen]


@dataclass(frozen=True)
class Names:
    """Names and ties of a language model's parameters, which differ between families.

    embedding: name of the input embeddings; by_token: of parameters with a row for every token; aliases: of those that
    are another one; in_hf: where each goes in a llava-hf folder; tied_in_hf: whether both ends are one there, too;
    config: the language model's.
    """

    embedding: str
    by_token: frozenset[str]
    aliases: frozenset[str]
    in_hf: dict[str, tuple[str, ...]]
    tied_in_hf: bool
    config: PreTrainedConfig

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "Names":
        """Ask the model, built on no device."""
        with torch.device("meta"), no_init_weights():
            model = AutoModelForCausalLM.from_config(config)
        model.tie_weights()
        ends = {
            id(p) for end in (model.get_input_embeddings(), model.get_output_embeddings()) for p in end.parameters()
        }
        once = {name for name, _ in model.named_parameters()}
        named = list(model.named_parameters(remove_duplicate=False))
        return cls(
            formats.LANGUAGE_MODEL + embedding_name(model),
            frozenset(formats.LANGUAGE_MODEL + name for name, p in named if id(p) in ends),
            frozenset(formats.LANGUAGE_MODEL + name for name, _ in named if name not in once),
            {formats.LANGUAGE_MODEL + name: places for name, places in names_in_hf(model).items()},
            is_tied_in_hf(model),
            config,
        )

    def resized(self, entries: Iterable[Entry], rows: int) -> list[Entry]:
        """The entries with so many rows for tokens, and without aliases.

        New rows are the mean of all; rows behind the last are left out.
        """
        return [
            _with_rows(entry, rows) if entry.name in self.by_token and entry.shape[0] != rows else entry
            for entry in entries
            if entry.name not in self.aliases
        ]

    def divided(self, entries: Iterable[Entry]) -> list[Entry]:
        """The entries as they are on disk, where that is another division of the language model's tensors."""
        return text_part(self.config).on_disk(list(entries), self.config)

    def to_hf(self, entries: Iterable[Entry], to_hf: Callable[[str], str] = formats.to_hf) -> list[Entry]:
        """The entries by their names in a llava-hf folder; one that has two places there comes twice. to_hf: of names
        outside of the language model."""
        return [
            dataclasses.replace(entry, name=place)
            for entry in entries
            for place in self.in_hf.get(entry.name) or (to_hf(entry.name),)
        ]


def _with_rows(entry: Entry, rows: int) -> Entry:
    def read() -> torch.Tensor:
        tensor = entry.read()
        if tensor is None or len(tensor) >= rows:
            return tensor if tensor is None else tensor[:rows]
        mean = tensor.float().mean(0, keepdim=True).to(tensor.dtype)
        return torch.cat([tensor, mean.expand(rows - len(tensor), *tensor.shape[1:])])  # (V, D)

    return Entry(entry.name, (rows, *entry.shape[1:]), read)


def without_value_head(entries: Iterable[Entry]) -> tuple[list[Entry], list[Entry]]:
    """The entries but the value head's, and the value head's: one, or none."""
    rest, head = [], []
    for entry in entries:
        (head if entry.name.startswith(formats.VALUE_HEAD) else rest).append(entry)
    return rest, head


def write_value_head(head: dict[str, torch.Tensor], output_dir: Path) -> Written:
    """Write the value head's file, if there is one: other programs open the folder as if it were not there.

    head: its tensors by their names in the model. Returns the sums of their bits.
    """
    if not head:
        return {}
    tensors = {name.removeprefix(formats.VALUE_HEAD): tensor for name, tensor in head.items()}
    write_tensors(output_dir / VALUE_HEAD_FILE, tensors)
    return {output_dir / VALUE_HEAD_FILE: sums_of(tensors.items())}


def renamed(entries: Iterable[Entry], rename: Callable[[str], str]) -> list[Entry]:
    """The entries by other names."""
    return [dataclasses.replace(entry, name=rename(entry.name)) for entry in entries]


def turned(entry: Entry) -> Entry:
    """A stack of matrices (E, O, I) as (E, I, O)."""

    def read() -> torch.Tensor | None:
        tensor = entry.read()
        return tensor if tensor is None else tensor.transpose(1, 2).contiguous()

    return Entry(entry.name, (entry.shape[0], entry.shape[2], entry.shape[1]), read)
