"""A finished model as the folder that was asked for."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers.initialization import no_init_weights

from llava_ds.export.llava_folder import llava_entries, projector_entries, write_llava, write_projector
from llava_ds.export.plan import Finished
from llava_ds.export.tensors import Counted, Entry, live_entries, take_part
from llava_ds.export.transformers_folder import hf_entries, write_hf
from llava_ds.model.llava import LlavaModel, assemble
from llava_ds.model.loading import return_freed_memory
from llava_ds.runtime.ranks import Ranks

WRITERS = {"hf": write_hf, "llava": write_llava}
ENTRIES = {"hf": hf_entries, "llava": llava_entries}


def export_live(
    finished: Finished, model: LlavaModel, form: str, output_dir: Path, max_bytes: int, ranks: Ranks
) -> None:
    """Write a model that is trained right now, "hf" or "llava". Every rank takes part; only rank 0 writes.

    What a disk refuses is raised on rank 0, once all of the model was gathered: the others do not wait for it.
    """
    entries = live_entries(model, ranks)
    with return_freed_memory():
        if ranks.is_first:
            counted = Counted()
            try:
                WRITERS[form](finished, counted.entries(entries), output_dir, max_bytes)
            except (OSError, SafetensorError):
                take_part(ENTRIES[form](finished, entries)[counted.num_read :])
                raise
        else:
            take_part(ENTRIES[form](finished, entries))  # in the same order, what has two places twice


def export_live_projector(finished: Finished, model: LlavaModel, output_dir: Path, ranks: Ranks) -> list[Path]:
    """Write the projector and the newline of a model that is trained right now; paths on rank 0."""
    entries = projector_entries(finished, live_entries(model, ranks))
    if ranks.is_first:
        return write_projector(finished, entries, output_dir)
    take_part(entries)
    return []


def planned_entries(finished: Finished) -> list[Entry]:
    """Names and shapes of the model that will be trained, before it is built. They can't be read."""
    plan = finished.plan
    with torch.device("meta"), no_init_weights():
        model = assemble(plan.text_config, plan.tower, finished.args, torch.empty(3), torch.empty(3))
    return [Entry(name, tuple(p.shape), p.detach) for name, p in model.named_parameters()]
