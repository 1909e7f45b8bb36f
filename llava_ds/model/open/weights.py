"""Weights on disk: files of tensors, the sources of each part's tensors, and changes to them.

Tensors are read by name, one at a time, from safetensors and pickles, whole or in shards.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from transformers.modeling_utils import _get_resolved_checkpoint_files
from transformers.utils import SAFE_WEIGHTS_NAME, WEIGHTS_NAME

from llava_ds.constants import ConfigError, DataError
from llava_ds.files.model_files import MAX_BYTES, is_there, own_file, read_json, said_by, shown
from llava_ds.model.open import names as formats

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
WHOLE = (SAFE_WEIGHTS_NAME, WEIGHTS_NAME)  # files with all weights; instead of one there may be an index of shards
MAPPED_BYTES = 32 * 2**20  # number of bytes to read from a mapped file before it is mapped again


class Weights(Protocol):
    """Tensors by name, read one at a time. path: named in messages; shapes: shape of each tensor, before it is read."""

    path: str | Path
    shapes: dict[str, tuple[int, ...]]
    notes: tuple[str, ...]  # lines to print at the start of a run

    def tensors(self) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        """Yield every tensor's name and a function that reads it. Call the function before the next item is yielded."""


class WeightFiles:
    """The tensors of a folder or a single file, by name, read one at a time.

    Understands model.safetensors and pytorch_model.bin, whole or sharded with an index. Pickles are opened with
    weights_only=True. rename: maps a name on disk to a name in the model, or to None to leave it out. Raises DataError
    for files that can't be read as tensors.
    """

    notes = ()

    def __init__(self, path: str | Path, rename: Callable[[str], str | None] = lambda name: name) -> None:
        self.path = Path(path)
        self._places: dict[str, tuple[Path, str]] = {}  # model's name -> file, name on disk
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.unused: list[str] = []  # names on disk
        for file in weight_files(self.path):
            for name, shape in shapes_in(file).items():
                new = rename(name)
                if new is None:
                    self.unused.append(name)
                else:
                    self._places[new] = (file, name)
                    self.shapes[new] = shape

    @property
    def used(self) -> set[str]:
        """Names on disk of the tensors that `rename` does not leave out."""
        return {name for _, name in self._places.values()}

    def tensors(self) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        """Yield every tensor's name and a function that reads it. Each file is closed before the next one is opened.

        Files are mapped, and pages that were read count as memory of this process until the file is closed.
        """
        for file in sorted({file for file, _ in self._places.values()}):
            opened = OpenedFile(file)
            for name, (where, on_disk) in self._places.items():
                if where == file:
                    yield name, partial(opened.read, on_disk)
            opened.close()

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Read the tensors of these names, file by file. Yields (name, tensor)."""
        wanted = sorted(names, key=lambda name: self._places[name])
        for file, some in itertools.groupby(wanted, key=lambda name: self._places[name][0]):
            opened = OpenedFile(file)
            for name in some:
                yield name, opened.read(self._places[name][1])
            opened.close()


class OpenedFile:
    """A mapped file of tensors. Tensors that were read stay valid after it is closed.

    It is reopened after every MAPPED_BYTES, because pages that were read count as memory of this process until then.
    """

    def __init__(self, file: Path) -> None:
        self._file, self._bytes_read = file, 0
        self._open()

    def _open(self) -> None:
        if self._file.suffix == ".safetensors":
            self._tensors = safe_open(self._file, framework="pt")
            return
        from llava_ds.model.open.pickles import load_pickle

        self._tensors = load_pickle(self._file)

    def read(self, name: str) -> torch.Tensor:
        if self._bytes_read > MAPPED_BYTES:
            self._bytes_read = 0
            self._open()
        tensor = self._tensors[name] if isinstance(self._tensors, dict) else self._tensors.get_tensor(name)
        self._bytes_read += tensor.nbytes
        return tensor

    def close(self) -> None:
        self._tensors = {}


def weight_files(path: str | Path) -> list[Path]:
    """List the weight files of a folder, or the file itself if `path` is a file. Raises DataError if there are none.

    If a folder has several sets of weights, chooses the set that transformers would choose, by a private function of
    transformers 5.23. A test compares the choice with from_pretrained.
    """
    path = Path(path)
    if path.is_file():
        return [path]
    indices = [index for name in WHOLE if is_there(index := path / f"{name}.index.json")]
    if large := [index for index in indices if index.exists() and index.stat().st_size > MAX_BYTES]:
        names_in(large[0])  # raises the error for its size
    try:
        files, sharded = _get_resolved_checkpoint_files(
            path,
            variant=None,
            gguf_file=None,
            use_safetensors=None,
            user_agent=None,
            is_remote_code=False,
            transformers_explicit_filename=_named_in_config(path),
            download_kwargs={"local_files_only": True},
        )
    except Exception as error:  # a damaged index can raise any type
        files, sharded = _without_metadata(path, indices, error), None
    if sharded is not None:
        indices += [path / name for name in (_named_in_config(path),) if name is not None]
        index = next(index for index in indices if _weight_map(index) == sharded["weight_map"])
        files = _shards(index)
    return [_own(Path(file)) for file in files]


def _without_metadata(path: Path, indices: list[Path], error: Exception) -> list[Path]:
    """Return the shards of the only index, if transformers failed because the index has no metadata. Raises DataError
    for any other problem with a folder's weights."""
    found = [_shards(index) for index in indices]
    if isinstance(error, KeyError) and len(found) == 1:
        return found[0]
    for file in (path / name for name in WHOLE):
        if is_there(file):
            _own(file)
    if indices:
        raise DataError(f"{path}: its weights can't be read ({said_by(error)}): copy it again") from error
    expected = "expected model.safetensors or pytorch_model.bin, or their index"
    raise DataError(f"{path} holds no weights: {expected}") from error


def _shards(index: Path) -> list[Path]:
    """Return the paths of the shards in an index. Raises DataError if a shard is missing."""
    files = [index.parent / name for name in names_in(index)]
    if missing := [file.name for file in files if not file.is_file()]:
        raise DataError(f"{index.parent}: {index.name} names {', '.join(missing)}, but that is missing: copy it again")
    return files


def names_in(index: Path) -> list[str]:
    """Return the file names in an index. Raises DataError if a file is not in the index's folder."""
    names = sorted({str(name) for name in _weight_map(index).values()})
    if outside := [name for name in names if Path(name).name != name or not name.endswith(SUFFIXES)]:
        raise DataError(
            f"{index} names {shown(outside[0])}: expected a file of weights in the same folder: copy the folder again"
        )
    return names


def _named_in_config(path: Path) -> str | None:
    """Return the name of the weight file in config.json, or None. transformers prefers this file to all others."""
    file = path / "config.json"
    name = read_json(file, str(path)).get("transformers_weights") if is_there(file) else None
    if name is None:
        return None
    if not isinstance(name, str) or Path(name).name != name or not (path / name).is_file():
        raise DataError(f"{file} says transformers_weights {shown(name)}: no such file in its folder: copy it again")
    return name


def _own(file: Path) -> Path:
    """Return the file. Raises DataError if it is a link to a file in another folder."""
    try:
        own_file(file)
    except OSError as error:
        raise DataError(f"{file} can't be read ({error.strerror}): copy it again") from error
    return file


def tensor_names(path: str | Path) -> set[str]:
    """Return the names on disk of all tensors in a folder or file. Raises DataError if files can't be read."""
    return {name for file in weight_files(path) for name in shapes_in(file)}


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = read_json(index, str(index.parent)).get("weight_map")
    except ConfigError as error:
        raise DataError(str(error)) from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise DataError(f"{index} can't be read as an index of weights (its weight_map names none): copy it again")
    return weight_map


def shapes_in(file: Path) -> dict[str, tuple[int, ...]]:
    if file.suffix != ".safetensors":
        from llava_ds.model.open.pickles import load_pickle

        return {name: tuple(tensor.shape) for name, tensor in load_pickle(file).items()}
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}
    except Exception as error:  # safetensors' own, and torch's for unknown dtypes
        raise DataError(f"{file} can't be read as weights ({said_by(error)}): copy it again") from error


class TensorSource:
    """Weights that are already in memory. path: named in messages."""

    notes = ()

    def __init__(self, tensors: dict[str, torch.Tensor], path: str) -> None:
        self.path, self._tensors = path, tensors
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def tensors(self) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        for name, tensor in self._tensors.items():
            yield name, lambda tensor=tensor: tensor


class Over(partial):
    """A change to weights that an adapter makes (see Source.changes)."""


@dataclass(frozen=True)
class Source:
    """Source of a part's weights. flag: the flag that names it; path: a folder or file.

    rename: maps a name on disk to a name in the part, or to None for a tensor of another part; changes: functions from
    Weights to Weights, applied in order (adapters, new rows); beside: source of more of the part's tensors, or None.
    """

    flag: str
    path: str
    rename: Callable[[str], str | None]
    changes: tuple[Callable[[Weights], Weights], ...] = ()
    beside: "Source | None" = None

    def files(self, wanted: Callable[[str], bool] = lambda name: True) -> "WeightFiles | Joined":
        """Open the part's files. wanted: returns True for names in the part of the tensors to include."""

        def rename(on_disk: str) -> str | None:
            name = self.rename(on_disk)
            return name if name is not None and wanted(name) else None

        own = WeightFiles(self.path, rename)
        return own if self.beside is None else Joined(own, self.beside.files(wanted))

    def open(self, wanted: Callable[[str], bool] = lambda name: True) -> Weights:
        """Open the part's tensors, with the changes applied."""
        return self.changed(self.files(wanted))

    def changed(self, weights: Weights) -> Weights:
        """Apply the changes to the result of files()."""
        for change in self.changes:
            weights = change(weights)
        return weights


@dataclass(frozen=True)
class Sources:
    """The source of each part's weights; None for a part that is initialised instead.

    rest_of_tower: the tower's own folder, if the tower's weights are in the model's folder; export reads tensors that
    the model's folder lacks from it. new_rows: a projector file with embedding rows of new tokens. own: sources of
    extensions' modules, by part.
    """

    language_model: Source
    vision_tower: Source
    projector: Source | None = None
    newline: Source | None = None
    rest_of_tower: Source | None = None
    new_rows: Source | None = None
    value_head: Source | None = None
    own: Mapping[str, Source] = field(default_factory=dict)

    def of(self, part: str) -> Source | None:
        """Return the source of a part."""
        return self.own.get(part) if part.startswith(formats.OWN) else getattr(self, part)

    def whole_tower(self) -> Weights:
        """Open all tensors of the tower on disk, including those of layers that never run, so are not built."""
        tower = self.vision_tower.open()
        return tower if self.rest_of_tower is None else Overlaid(self.rest_of_tower.open(), tower)


class Joined:
    """The tensors of one folder, followed by the tensors of another folder."""

    def __init__(self, first: WeightFiles, second: WeightFiles) -> None:
        self._both = first, second
        self.path, self.notes = f"{first.path} and {second.path}", (*first.notes, *second.notes)
        self.shapes, self.unused = {**first.shapes, **second.shapes}, [*first.unused, *second.unused]

    def tensors(self) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        for files in self._both:
            yield from files.tensors()


class Overlaid:
    """Tensors of `below`, replaced by tensors of `above` with the same name. Yields `above` last."""

    def __init__(self, below: Weights, above: Weights) -> None:
        self.path = below.path
        self._below, self._above = below, above
        self.shapes = {**below.shapes, **above.shapes}
        self.notes = (*below.notes, f"{len(above.shapes)} of them from {above.path}")

    def tensors(self) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        for name, read in self._below.tensors():
            if name not in self._above.shapes:
                yield name, read
        yield from self._above.tensors()


def unused_tensors(sources: Sources) -> list[str]:
    """Return a line for each path with unused tensors, with their groups."""
    parts = (sources.language_model, sources.vision_tower, sources.projector, sources.newline, sources.new_rows)
    by_path: dict[str, list[Source]] = {}
    for source in parts:
        if source is not None:
            by_path.setdefault(source.path, []).append(source)
    lines = []
    for path, sharing in by_path.items():
        unused = [name for name in WeightFiles(path).shapes if all(source.rename(name) is None for source in sharing)]
        groups = Counter(map(formats.unused_group, unused))
        if groups:
            listed = ", ".join(f"{group} ({count} tensors)" for group, count in groups.most_common())
            lines.append(f"not used from {path}: {listed}")
    return lines
