"""Where the weights of each part lie, and what is laid over them before they arrive."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from llava_ds.model.open import names as formats
from llava_ds.model.open.weight_files import WeightFiles, Weights


@dataclass(frozen=True)
class Source:
    """The flag that named a part's weights, a folder or file, and what its tensors are called there.

    rename: a name on disk to the part's, None for what is not the part's; changes: what is laid over the files, first
    things first, each from weights to weights.
    """

    flag: str
    path: str
    rename: Callable[[str], str | None]
    changes: tuple[Callable[[Weights], Weights], ...] = ()

    def files(self, wanted: Callable[[str], bool] = lambda name: True) -> WeightFiles:
        """The part's tensors as they lie on disk, but for those whose names are not wanted."""

        def rename(on_disk: str) -> str | None:
            name = self.rename(on_disk)
            return name if name is not None and wanted(name) else None

        return WeightFiles(self.path, rename)

    def open(self, wanted: Callable[[str], bool] = lambda name: True) -> Weights:
        """The part's tensors, changed as is asked for."""
        return self.changed(self.files(wanted))

    def changed(self, weights: Weights) -> Weights:
        """What files() gave, with the changes laid over it."""
        for change in self.changes:
            weights = change(weights)
        return weights


@dataclass(frozen=True)
class Sources:
    """Where the weights of each part lie; None for a part that starts fresh.

    rest_of_tower: the folder of a tower whose weights come with the model, which holds what the model leaves out, for
    export. new_rows: a projector's file that brings rows for new tokens.
    """

    language_model: Source
    vision_tower: Source
    projector: Source | None = None
    newline: Source | None = None
    rest_of_tower: Source | None = None
    new_rows: Source | None = None

    def whole_tower(self) -> Weights:
        """All of the tower that is on disk, also what never runs and is not built."""
        tower = self.vision_tower.open()
        return tower if self.rest_of_tower is None else Overlaid(self.rest_of_tower.open(), tower)


class Overlaid:
    """Tensors, in whose place come others of the same name; the others' own tensors come last."""

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


def left_out(sources: Sources) -> list[str]:
    """Lines that say what lies in the files and is in no part of the model, grouped."""
    parts = (sources.language_model, sources.vision_tower, sources.projector, sources.newline, sources.new_rows)
    by_path: dict[str, list[Source]] = {}
    for source in parts:
        if source is not None:
            by_path.setdefault(source.path, []).append(source)
    lines = []
    for path, those in by_path.items():
        unused = [name for name in WeightFiles(path).shapes if all(source.rename(name) is None for source in those)]
        groups = Counter(map(formats.left_out, unused))
        if groups:
            said = ", ".join(f"{group} ({count} tensors)" for group, count in groups.most_common())
            lines.append(f"not used of {path}: {said}")
    return lines
