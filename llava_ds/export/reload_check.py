# T tokens, V vocabulary, N image tiles, S side of the tower's square
"""Compare the logits of a reloaded folder in transformers with those of the trained model."""

from pathlib import Path

import psutil
import torch
from transformers import AutoConfig

from llava_ds.batch import Batch
from llava_ds.geometry import MediaLayout
from llava_ds.model.families.language import final_logits
from llava_ds.model.hf import HF_CLASSES, TOLERANCE, HFModel, attention_options, embed_batch

# Of the host's free memory that a second copy of the weights may take beside what is running.
MEMORY_PART = 0.8


def room_to_compare(num_bytes: int) -> str | None:
    """Return the reason why a folder with so many bytes of weights is not opened beside a run; None if it fits."""
    free = psutil.virtual_memory().available
    if num_bytes <= MEMORY_PART * free:
        return None
    return (
        f"its {num_bytes / 1e9:.1f} GB don't fit into the {free / 1e9:.1f} GB of free memory beside training: its "
        "names and shapes have been checked, its logits have not"
    )


@torch.no_grad()
def compare_reloaded(
    output_dir: Path,
    batch: Batch,
    layouts: list[MediaLayout],
    mean: torch.Tensor,
    std: torch.Tensor,
    logits: torch.Tensor,
) -> float:
    """Open the exported folder with transformers and compare its logits with the trained model's.

    batch: a single sample, and the layouts of its images; mean, std (1, 3, 1, 1): how the tower scales pixels;
    logits (T, V) of the trained model at every position. Returns and raises as compare_logits does.
    """
    config = AutoConfig.from_pretrained(output_dir, local_files_only=True, trust_remote_code=False)
    model_type = config.model_type
    reloaded = HF_CLASSES[model_type].from_pretrained(
        output_dir, dtype=logits.dtype, local_files_only=True, **attention_options(config)
    )
    reloaded.eval()
    batch = batch.to(torch.device("cpu"))
    pixels = ((batch.pixel_values.float() / 255 - mean.cpu()) / std.cpu()).to(logits.dtype)  # (N, 3, S, S)
    ids = batch.input_ids.clone()
    ids[0, batch.image_positions] = reloaded.config.image_token_id
    if not layouts:
        inputs = {"input_ids": ids}
    elif model_type == "llava" and not any(layout.pooled for layout in layouts):
        inputs = {"input_ids": ids, "pixel_values": pixels}
    elif model_type != "llava" and (images := _tiled_images(reloaded, pixels, layouts)) is not None:
        inputs = {"input_ids": ids, **images}
    else:
        inputs = {"inputs_embeds": embed_batch(reloaded, batch, pixels)}
    # The rows of <image> and <video> are the export's own.
    again = final_logits(reloaded(**inputs).logits[0, :, : logits.shape[1]], reloaded.config.text_config)  # (T, V)
    return compare_logits(output_dir, "transformers", again, logits)


def compare_logits(output_dir: Path, library: str, again: torch.Tensor, logits: torch.Tensor) -> float:
    """Return the largest difference of a library's logits (T, V) relative to the largest magnitude of the model's.

    Raises RuntimeError when it is above TOLERANCE.
    """
    logits = logits.cpu().float()
    difference = ((again.float() - logits).abs().max() / logits.abs().max()).item()
    limit = TOLERANCE[again.dtype]
    if not difference <= limit:
        raise RuntimeError(
            f"{output_dir} was exported, but {library} computes other logits from it (difference {difference:.2e} "
            f"of the largest, allowed {limit:.0e}): keep the checkpoint and report this"
        )
    return difference


def _tiled_images(
    reloaded: HFModel, pixels: torch.Tensor, layouts: list[MediaLayout]
) -> dict[str, torch.Tensor] | None:
    """pixel_values (images, tiles, 3, S, S) and image_sizes; None if transformers gives these images other tokens.

    LlavaNext cuts every image into tiles, where LLaVA and LlavaOnevision leave several in a sample whole. Neither
    knows pooled frames, and for a few sizes both round the padding another way.
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
