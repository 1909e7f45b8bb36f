# T tokens, V vocabulary
"""Check exports in LLaVA's own format by reopening them with this package: complete models, or only the projector."""

from pathlib import Path

import torch

from llava_ds.batch import Batch
from llava_ds.engine.construct import construction
from llava_ds.export.bit_check import Written, check_written
from llava_ds.export.export_plan import ExportPlan
from llava_ds.export.layer_by_layer import Deadline, layer_by_layer
from llava_ds.export.output_folder import planned_entries
from llava_ds.export.reload_check import check_room, compare_logits
from llava_ds.export.safetensors_shards import num_bytes
from llava_ds.model.heads import Logits
from llava_ds.model.llava import assemble
from llava_ds.model.open import names as formats
from llava_ds.model.open.loading import check_fit, load_weights
from llava_ds.model.open.model_plan import part_weights
from llava_ds.model.open.weights import Source
from llava_ds.model.projector import Newline
from llava_ds.runtime.ranks import Ranks
from llava_ds.second_models.frozen import plan_alone


@torch.no_grad()
def compare_reloaded_llava(output_dir: Path, export: ExportPlan, batch: Batch, logits: torch.Tensor) -> float:
    """Open a folder in LLaVA's format as an initial model, and compare its logits with the trained model's.

    Also supports projectors and towers that no class in transformers has. batch: a single sample; logits (T, V): of the
    trained model, as in compare_reloaded. Returns and raises like compare_logits. Raises NotCompared if time or memory
    run out.
    """
    deadline = Deadline()
    check_room(num_bytes(planned_entries(export), logits.dtype))
    given = {} if export.args.vision_tower is None else {"vision_tower": export.args.vision_tower}
    plan = plan_alone("--output_dir", str(output_dir), export.max_length, export.model.has_value_head, **given)
    mean, std = (torch.tensor(values) for values in (plan.model.images.mean, plan.model.images.std))
    alone = Ranks(0, 0, 1, torch.device("cpu"))
    with construction({}, logits.dtype, alone.device, zero3=False):
        reloaded = assemble(plan.model.text_config, plan.model.tower, plan.args, mean, std, plan.model.has_value_head)
    for name, part in reloaded.named_children():
        # Weights in the files' own dtype are memory-mapped, so memory holds only one copy.
        load_weights(part, part_weights(name, plan.model, plan.args, 0), alone, "--output_dir", copies=False)
    with layer_by_layer(reloaded.eval(), logits, deadline) as device:
        again = reloaded(batch.to(device), Logits(torch.arange(len(logits), device=device)))
    return compare_logits(output_dir, "llava_ds", again, logits)


def check_projector(export: ExportPlan, written: Written) -> None:
    """Read both files of an exported projector back, as stage 2 does, and check names, shapes and bits.

    Raises DataError if names or shapes don't match the projector, RuntimeError if a bit differs.
    """
    with torch.device("meta"):
        projector = export.model.tower.build_projector(export.args, export.model.hidden_size)
        parts = [(projector, formats.projector_from_llava)]
        if export.image_options.has_newline:
            parts.append((Newline(export.model.hidden_size), formats.newline_from_llava))
    for file in written:
        for part, rename in parts:
            check_fit(part, Source("--output_dir", str(file), rename).open(), f"--output_dir {file}")
    check_written(written)
