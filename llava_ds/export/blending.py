"""Merge several adapters of the same base model into one model, as a weighted sum."""

import dataclasses
from functools import partial
from pathlib import Path

import torch

from llava_ds.constants import ConfigError
from llava_ds.export.export_plan import ExportPlan
from llava_ds.export.from_folder import open_folder
from llava_ds.export.tensors import Entry, read_entries
from llava_ds.files.model_files import is_adapter
from llava_ds.model.open.model_folder import without_adapter


def open_adapters(
    folders: list[Path], weights: list[float], given: dict[str, object], dtype: torch.dtype | None, form: str
) -> tuple[ExportPlan, list[Entry], list[str]]:
    """Open adapters of one base model W as the model W + sum of weight * ((W merged with the adapter) - W).

    A tensor that the base lacks, like a projector trained with each adapter, becomes the weighted mean over the
    adapters. Parameters and result as in open_folder. Raises ConfigError if folders or weights don't match.
    """
    if len(weights) != len(folders):
        raise ConfigError(
            f"--adapter_weights gives {len(weights)} weights for {len(folders)} adapters (SOURCE's is the first): "
            "give one weight per adapter"
        )
    if strange := [folder for folder in folders if not is_adapter(folder)]:
        raise ConfigError(
            f"{strange[0]} is not an adapter's folder, and only adapters can be merged by weight: leave it out"
        )
    if not sum(weights):
        raise ConfigError(
            f"--adapter_weights {' '.join(map(str, weights))} add up to 0: the weighted mean is undefined"
        )
    opened = [open_folder(folder, given, dtype, form) for folder in folders]
    export, first, lines = opened[0]
    others = [{entry.name: entry for entry in entries} for _, entries, _ in opened]
    for folder, (plan, _, _), entries in zip(folders[1:], opened[1:], others[1:]):
        if entries.keys() != others[0].keys() or any(entries[e.name].shape != e.shape for e in first):
            raise ConfigError(f"{folder} and {folders[0]} are adapters for different models: leave one out")
        if _bases(plan) != _bases(export):
            raise ConfigError(
                f"{folder} has a different base model from {folders[0]}: name the common one with --model_base, or "
                "leave it out"
            )
    base = {entry.name: entry for entry in _base_entries(export)}
    blended = [
        dataclasses.replace(
            entry, read=partial(_blended, [each[entry.name] for each in others], base.get(entry.name), weights)
        )
        for entry in first
    ]
    named = ", ".join(f"{weight:g} of {folder}" for weight, folder in zip(weights, folders))
    return export, blended, [*lines, f"adapters merged by weight: {named}"]


def _bases(export: ExportPlan) -> list[str | None]:
    """Return the resolved paths of an adapter's base language model and tower; None for a part without an adapter."""
    sources = (export.model.sources.language_model, export.model.sources.vision_tower)
    return [None if (base := without_adapter(source)) is None else str(Path(base.path).resolve()) for source in sources]


def _base_entries(export: ExportPlan) -> list[Entry]:
    """Return the tensors of the base model's parts, without the adapter."""
    found: list[Entry] = []
    for part in ("vision_tower", "projector", "newline", "language_model"):
        source = without_adapter(getattr(export.model.sources, part))
        if source is not None:
            found += read_entries(part, source.open())
    return found


def _blended(entries: list[Entry], base: Entry | None, weights: list[float]) -> torch.Tensor:
    """Return a tensor of the merged model, summed in float32 and rounded once. base: None if the base lacks it."""
    tensors = [entry.read() for entry in entries]
    if base is None:
        weights, whole = [weight / sum(weights) for weight in weights], 0
    else:
        whole = (1 - sum(weights)) * base.read().float()
    for weight, tensor in zip(weights, tensors):
        whole = whole + weight * tensor.float()
    return whole.to(tensors[0].dtype)
