"""The tensors of one micro-batch: the only interface between data and model.

T tokens of all samples laid end to end, M image positions among them, S supervised positions, N image tiles of
P patches each, R pooled features made of up to K others.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

TowerInputs = dict[str, torch.Tensor | int | tuple[tuple[int, int], ...]]  # of a tower that takes whole images
Inputs = dict[str, object]  # tensors move with the batch, other values stay as they are


class ImageBlocks(NamedTuple):
    """Image positions whose tokens see each other: those of one image, or of one of its tiles, are a block.

    A block's tokens see their sample from its start to the block's end. rows (R,) int64: the positions in T, ascending;
    keys (K,) int64: the positions that each block sees, block after block; cu_rows and cu_keys (blocks + 1,) int32,
    where blocks start among them, and the ends; max_rows, max_keys: of the largest block; need_windows: True if only
    layers with a window let them see each other.
    """

    rows: torch.Tensor
    keys: torch.Tensor
    cu_rows: torch.Tensor
    cu_keys: torch.Tensor
    max_rows: int
    max_keys: int
    need_windows: bool = False


@dataclass(frozen=True)
class Batch:
    """One micro-batch without padding.

    input_ids (1, T) int64, 0 at image positions; position_ids (1, T) int64, from 0 in every sample, or (3, 1, T) for
    language models whose positions have three axes;
    cu_seqlens (samples + 1,) int32, where samples start, and T; max_seqlen, length of the longest sample; lengths, of
    each, on the host;
    sources (samples,) int64, the number of each sample's data source;
    target_positions (S,) int64, positions whose output is supervised; targets (S,) int64, the ids expected there;
    target_samples (S,) int64, the sample of the micro-batch that each belongs to;
    target_weights (S,) float32, of the loss of each, None where all are 1;
    pixel_values (N, 3, H, W) uint8, at least one tile (a blank tile, placed nowhere, if the samples have no images);
    with a ready model's videos, H is T * W, for the T frames of a moment are below each other, and images have T times
    the same;
    pool_index (R, K) int64, the rows of the N * P features that are pooled; pool_weight (R, K) float32, their weights,
    infinity where the largest of them is taken; pools_by_max: True if any row is of that kind;
    image_positions (M,) int64, positions in T of image features and then of newlines; feature_index (F,) int64, the
    rows that go to the first F of them, of a table with the N * P features and then the R pooled features. Samples
    that share an image use the same rows.

    tower_inputs: further arguments of a tower that takes whole images in any shape (data/native_resolution.py), whose
    tiles are the cells of an image; empty for others.
    image_blocks: image positions whose tokens see each other; None for models that have no such rule, and where there
    is no image.

    trunk: further arguments of the language model's layers. extra: what objectives and axes add, by "<name>.<field>".

    Of preferences the samples come in pairs, first the chosen answer, then the rejected one, over the same images.
    reference (samples,) float64: the log-probability of each one's targets under the reference model, or None; margins
    (samples,) float64: by which the chosen answer shall be ahead, at its place, or None where all are zero.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    sources: torch.Tensor
    target_positions: torch.Tensor
    targets: torch.Tensor
    target_samples: torch.Tensor
    pixel_values: torch.Tensor
    pool_index: torch.Tensor
    pool_weight: torch.Tensor
    image_positions: torch.Tensor
    feature_index: torch.Tensor
    pools_by_max: bool = False
    reference: torch.Tensor | None = None
    margins: torch.Tensor | None = None
    target_weights: torch.Tensor | None = None
    lengths: tuple[int, ...] = ()
    tower_inputs: TowerInputs = dataclasses.field(default_factory=dict)
    image_blocks: ImageBlocks | None = None
    trunk: Inputs = dataclasses.field(default_factory=dict)
    extra: Inputs = dataclasses.field(default_factory=dict)

    def to(self, device: torch.device) -> "Batch":
        """The same batch on another device; copies from pinned memory don't wait."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        """The same batch in page-locked memory (torch's DataLoader calls this)."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change) -> "Batch":
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values |= {name: _changed(values[name], change) for name in ("tower_inputs", "trunk", "extra")}
        if self.image_blocks is not None:
            values["image_blocks"] = ImageBlocks(**_changed(self.image_blocks._asdict(), change))
        return type(self)(**_changed(values, change))


def _changed(values: dict[str, object], change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, object]:
    return {name: change(value) if isinstance(value, torch.Tensor) else value for name, value in values.items()}
