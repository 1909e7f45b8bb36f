"""Folders of any form, from entries or from a model that is being trained."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers.initialization import no_init_weights

from llava_ds.export.export_plan import ExportPlan
from llava_ds.export.llava_folder import llava_entries, projector_entries, write_llava, write_projector
from llava_ds.export.tensors import Counted, Entry, live_entries, take_part
from llava_ds.export.transformers_folder import hf_entries, write_hf
from llava_ds.model.llava import LlavaModel, assemble
from llava_ds.model.loading import return_freed_memory
from llava_ds.runtime.ranks import Ranks

WRITERS = {"hf": write_hf, "llava": write_llava, "projector": write_projector}
ENTRIES = {"hf": hf_entries, "llava": llava_entries, "projector": projector_entries}


def folder_entries(export: ExportPlan, entries: list[Entry]) -> list[Entry]:
    """List the tensors of a folder by their names there. entries: of the model; form: "hf", "llava" or "projector"."""
    return ENTRIES[export.form](export, entries)


def write_folder(export: ExportPlan, entries: list[Entry], output_dir: Path, *, holes: bool = False) -> None:
    """Write a model's entries as a folder, "hf", "llava" or "projector".

    holes: write files of weights that have the size, and holes in the place of the numbers; not of a projector.
    """
    WRITERS[export.form](export, entries, output_dir, **({"holes": True} if holes else {}))


def write_live_folder(export: ExportPlan, model: LlavaModel, output_dir: Path, ranks: Ranks) -> None:
    """Write a model that is being trained, "hf", "llava" or "projector". Every rank takes part; only rank 0 writes.

    When the disk refuses a file, rank 0 raises after all of the model is gathered, so that no rank waits for it.
    """
    entries = live_entries(model, ranks)
    with return_freed_memory():
        if ranks.is_first:
            counted = Counted()
            try:
                write_folder(export, counted.entries(entries), output_dir)
            except (OSError, SafetensorError):
                take_part(folder_entries(export, entries)[counted.num_read :])
                raise
        else:
            take_part(folder_entries(export, entries))  # in the same order; a tensor with two places comes twice


def planned_entries(export: ExportPlan) -> list[Entry]:
    """Names and shapes of the model that will be trained, before it is built. They can't be read."""
    plan = export.model
    with torch.device("meta"), no_init_weights():
        model = assemble(plan.text_config, plan.tower, export.args, torch.empty(3), torch.empty(3))
    return [Entry(name, tuple(p.shape), p.detach) for name, p in model.named_parameters()]
