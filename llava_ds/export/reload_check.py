# T tokens, V vocabulary, N image tiles, S side of the tower's square
"""Compare the trained model's logits with those of a folder reloaded with transformers."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from transformers import AutoConfig

from llava_ds.batch import Batch
from llava_ds.export.layer_by_layer import Deadline, NotCompared, TooSlow, layer_by_layer
from llava_ds.extensions.active import architecture_of
from llava_ds.layouts import MediaLayout
from llava_ds.model.families.language import final_logits
from llava_ds.model.open.hf import TOLERANCE, HFModel, attention_options, embed_batch, hf_class

# Maximum fraction of the host's free memory that a second copy of the weights may use during a run.
MEMORY_PART = 0.8
SAMPLE_POSITIONS = 64  # number of positions for --check_export sample


def check_room(num_bytes: int) -> None:
    """Raise NotCompared if num_bytes of weights don't fit into the host's free memory."""
    free = psutil.virtual_memory().available
    if num_bytes > MEMORY_PART * free:
        raise NotCompared(f"{num_bytes / 1e9:.1f} GB don't fit into the {free / 1e9:.1f} GB of free memory")


def compared_positions(check: str, length: int, device: torch.device) -> torch.Tensor:
    """Return the positions whose logits are compared: all for --check_export full, the first ones for sample."""
    return torch.arange(length if check == "full" else min(length, SAMPLE_POSITIONS), device=device)


def describe_comparison(check: str, length: int, library: str, compare: Callable[[], float]) -> str:
    """Call `compare`, and describe its result. check: --check_export; length: positions of the sample."""
    if check == "off":
        return "not reloaded: --check_export off"
    num_positions = len(compared_positions(check, length, torch.device("cpu")))
    which = "logits" if num_positions == length else f"logits at the first {num_positions} of {length} positions"
    try:
        return f"reloaded with {library}, {which} differ by {compare():.1e} of the largest"
    except NotCompared as reason:
        fewer = isinstance(reason, TooSlow) and num_positions > SAMPLE_POSITIONS
        hint = f"; --check_export sample computes {SAMPLE_POSITIONS} positions, not {num_positions}" if fewer else ""
        return f"its names and shapes were checked, but not its logits: {reason}{hint}"


def describe_bits(check: str, compare: Callable[[], None]) -> str:
    """Check files with `compare`, without a forward, and describe its result. check: --check_export."""
    if check == "off":
        return "not read again: --check_export off"
    try:
        compare()
    except NotCompared as reason:
        return f"not compared: {reason}"
    return "read again: every name, shape and bit equals the model's"


class Base(NamedTuple):
    """The base model of an adapter. hold: function that sets its weights to those that the adapter was trained on."""

    folder: Path
    hold: Callable[[torch.nn.Module, Deadline], None]


@torch.no_grad()
def compare_reloaded(
    output_dir: Path,
    batch: Batch,
    layouts: list[MediaLayout],
    mean: torch.Tensor,
    std: torch.Tensor,
    logits: torch.Tensor,
    base: Base | None = None,
) -> float:
    """Open the exported folder with transformers and compare its logits with the trained model's.

    batch: a single sample. layouts: layouts of its images. mean, std (1, 3, 1, 1): the tower's pixel normalization.
    logits (T, V): the trained model's logits at all or the first positions; their device is used if it has memory.
    base: the base model of an exported adapter that peft merges. Returns and raises like compare_logits. Raises
    NotCompared if time or memory run out.
    """
    deadline = Deadline()
    folder = output_dir if base is None else base.folder
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    # transformers memory-maps files that are read in their own dtype, so memory holds only one copy of the weights.
    reloaded = hf_class(config).from_pretrained(
        folder, dtype=logits.dtype, local_files_only=True, **attention_options(config)
    )
    if base is not None:
        from peft import PeftModel

        base.hold(reloaded, deadline)
        with warnings.catch_warnings():  # as in lora/adapter_export.py
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            reloaded = PeftModel.from_pretrained(reloaded, output_dir).merge_and_unload()
    with layer_by_layer(reloaded.eval(), logits, deadline) as device:
        batch = batch.to(device)
        pixels = (batch.pixel_values.float() / 255 - mean.to(device)) / std.to(device)  # (N, 3, S, S)
        architecture = architecture_of(config)
        if architecture is None or architecture.casts_pixels:
            pixels = pixels.to(logits.dtype)
        inputs = (architecture.first_inputs if architecture else _inputs)(reloaded, batch, layouts, pixels, len(logits))
        # Drop the logits of <image> and <video>, whose rows the export added.
        again = reloaded(**inputs).logits[0, : len(logits), : logits.shape[1]]
    if architecture is None:  # LLaVA classes omit steps after the output layer
        again = final_logits(again, reloaded.config.text_config)  # (T, V)
    return compare_logits(output_dir, "transformers", again, logits)


def _inputs(
    reloaded: HFModel, batch: Batch, layouts: list[MediaLayout], pixels: torch.Tensor, num_positions: int
) -> dict[str, torch.Tensor]:
    """Return arguments for transformers' class, for a sample's first positions. The class merges images if it can."""
    model_type = reloaded.config.model_type
    ids = batch.input_ids.clone()
    ids[0, batch.placing.positions] = reloaded.config.image_token_id
    if not layouts:
        return {"input_ids": ids[:, :num_positions]}
    if num_positions < ids.shape[1] or len(batch.placing.positions) < sum(layout.num_tokens for layout in layouts):
        # The last image may be truncated.
        return {"inputs_embeds": embed_batch(reloaded, batch, pixels)[:, :num_positions]}
    if model_type == "llava" and not any(layout.pooled for layout in layouts):
        return {"input_ids": ids, "pixel_values": pixels}
    if model_type != "llava" and (images := _tiled_images(reloaded, pixels, layouts)) is not None:
        return {"input_ids": ids, **images}
    return {"inputs_embeds": embed_batch(reloaded, batch, pixels)}


def compare_logits(output_dir: Path, library: str, again: torch.Tensor, logits: torch.Tensor) -> float:
    """Return the largest difference between two models' logits (T, V), relative to the largest magnitude in `logits`.

    again: logits that the library computed from the export. Raises RuntimeError if it is above TOLERANCE.
    """
    again, logits = again.cpu(), logits.cpu().float()
    difference = ((again.float() - logits).abs().max() / logits.abs().max()).item()
    limit = TOLERANCE[again.dtype]
    if not difference <= limit:
        raise RuntimeError(
            f"{output_dir} was exported, but {library} computes different logits from it (they differ by "
            f"{difference:.2e} of the largest, allowed {limit:.0e}): keep the checkpoint and report this"
        )
    return difference


def _tiled_images(
    reloaded: HFModel, pixels: torch.Tensor, layouts: list[MediaLayout]
) -> dict[str, torch.Tensor] | None:
    """Return pixel_values (images, tiles, 3, S, S) and image_sizes; None if transformers encodes images differently.

    LlavaNext cuts every image into tiles; LLaVA and LlavaOnevision leave images whole if a sample has several.
    transformers' classes don't support pooled frames, and round the padding differently for a few sizes.
    """
    several = reloaded.config.model_type == "llava_onevision" and len(layouts) > 1
    if any((layout.grid is None) != several or (layout.num_tiles != 1 and several) for layout in layouts):
        return None
    parts = pixels.split([layout.num_tiles for layout in layouts])
    inputs = {
        "pixel_values": torch.nn.utils.rnn.pad_sequence(parts, batch_first=True),
        "image_sizes": torch.tensor([layout.sizes[0][::-1] for layout in layouts]),
    }
    if several:
        inputs["batch_num_images"] = torch.tensor([len(layouts)])
    theirs = reloaded.model.get_image_features(**inputs).pooler_output
    same = [len(features) for features in theirs] == [layout.num_tokens for layout in layouts]
    return inputs if same else None
