# V rows of an embedding, D language-model width
"""A model's tensors as entries: they have a name and a shape and are read one at a time."""

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
from llava_ds.model.open.weights import Weights
from llava_ds.runtime.ranks import Ranks


@dataclass(frozen=True)
class Entry:
    """A readable tensor: its name, its shape, and a function that reads it to the CPU."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def live_entries(model: LlavaModel, ranks: Ranks) -> list[Entry]:
    """List the parameters of a model that is sharded over ranks, tied ones once, without those of child models.

    Reading an entry is collective: all ranks read the same entries in the same order, and only rank 0 gets the tensor.
    One parameter is gathered at a time.
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
        """Return copies of the entries whose reads are counted."""
        return [dataclasses.replace(entry, read=partial(self._read, entry)) for entry in entries]

    def _read(self, entry: Entry) -> torch.Tensor | None:
        self.num_read += 1
        return entry.read()


def take_part(entries: Iterable[Entry]) -> None:
    """Read all entries and drop the results, to take part in collective reads."""
    for entry in entries:
        entry.read()


def read_entries(part: str, weights: Weights, dtype: torch.dtype | None = None) -> list[Entry]:
    """Return the tensors of a model part, under their names in the complete model.

    dtype: dtype to which they are rounded, None to keep theirs. Reading them in order opens one file at a time.
    """
    cursor = _Cursor(weights)

    def read(name: str) -> torch.Tensor:
        tensor = cursor.read(name)
        return tensor if dtype is None else tensor.to(dtype)

    return [Entry(f"{part}.{name}", weights.shapes[name], partial(read, name)) for name, _ in weights.tensors()]


class _Cursor:
    """Reads weights by name from the iterator Weights.tensors() that allows reading only its current tensor."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._rest: Iterator[tuple[str, Callable[[], torch.Tensor]]] = iter(())
        self._here: str | None = None

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor by name. The iterator is restarted only if it has passed the name already."""
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
    """Add the entries of `others` whose names `entries` lacks, like tower layers that training did not build."""
    entries = list(entries)
    seen = {entry.name for entry in entries}
    return entries + [entry for entry in others if entry.name not in seen]


@dataclass(frozen=True)
class Names:
    """Names and ties of a family's language-model parameters.

    embedding: name of the input embeddings. by_token: names of parameters with a row per token. aliases: second names
    of tied parameters. in_hf: names in a llava-hf folder, by parameter. tied_in_hf: True if embedding and output layer
    are tied in a llava-hf folder. config: the language model's configuration.
    """

    embedding: str
    by_token: frozenset[str]
    aliases: frozenset[str]
    in_hf: dict[str, tuple[str, ...]]
    tied_in_hf: bool
    config: PreTrainedConfig

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "Names":
        """Read the names from a model built on the meta device."""
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
        """Return the entries without aliases, and with `rows` rows in embeddings and output layer.

        Added rows are the mean of the existing rows; surplus rows are dropped.
        """
        return [
            _with_rows(entry, rows) if entry.name in self.by_token and entry.shape[0] != rows else entry
            for entry in entries
            if entry.name not in self.aliases
        ]

    def divided(self, entries: Iterable[Entry]) -> list[Entry]:
        """Return the entries as stored on disk: some families divide the language model's tensors differently there."""
        return text_part(self.config).on_disk(list(entries), self.config)

    def to_hf(self, entries: Iterable[Entry], to_hf: Callable[[str], str] = formats.to_hf) -> list[Entry]:
        """Rename the entries as in a llava-hf folder. An entry that is stored in two places appears twice.

        to_hf: function that renames tensors outside the language model.
        """
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


def without_own_files(entries: Iterable[Entry]) -> tuple[list[Entry], list[Entry]]:
    """Split the entries into the model's, and those in separate files (value head, modules of extensions)."""
    rest, beside = [], []
    for entry in entries:
        (beside if entry.name.startswith((formats.VALUE_HEAD, formats.OWN)) else rest).append(entry)
    return rest, beside


def write_own_files(beside: dict[str, torch.Tensor], output_dir: Path) -> Written:
    """Write the tensors of a value head and of extensions' modules to separate files that other programs ignore.

    beside: these tensors, by their names in the model. Returns checksums of their bits.
    """
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in beside.items():
        part, _, rest = name.partition(".")
        parts.setdefault(part, {})[rest] = tensor
    for part, tensors in parts.items():
        write_tensors(output_dir / f"{part}.safetensors", tensors)
    return {output_dir / f"{part}.safetensors": sums_of(tensors.items()) for part, tensors in parts.items()}


def renamed(entries: Iterable[Entry], rename: Callable[[str], str]) -> list[Entry]:
    """Return the entries under other names."""
    return [dataclasses.replace(entry, name=rename(entry.name)) for entry in entries]


def turned(entry: Entry) -> Entry:
    """Return an entry that transposes a stack of matrices (E, O, I) to (E, I, O) when read."""

    def read() -> torch.Tensor | None:
        tensor = entry.read()
        return tensor if tensor is None else tensor.transpose(1, 2).contiguous()

    return Entry(entry.name, (entry.shape[0], entry.shape[2], entry.shape[1]), read)
