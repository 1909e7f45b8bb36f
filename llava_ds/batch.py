"""The tensors of one micro-batch: the only interface between data and model.

T tokens of all samples laid end to end, M image positions among them, S supervised positions, N image tiles of
P patches each, R pooled features made of up to K others.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

Inputs = dict[str, object]


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

    @classmethod
    def of(cls, is_image: torch.Tensor, cu_seqlens: torch.Tensor) -> "ImageBlocks | None":
        """The blocks of image positions in a row, in one sample; None without. is_image (T,) bool; cu_seqlens as
        Batch's.

        Source: transformers' get_block_sequence_ids_for_mask.
        """
        starts_sample = torch.zeros_like(is_image)
        starts_sample[cu_seqlens[:-1]] = True
        follows = torch.cat([torch.tensor([False]), is_image[:-1]]) & ~starts_sample
        starts = (is_image & ~follows).nonzero()[:, 0]  # (blocks,)
        if not len(starts):
            return None
        rows = is_image.nonzero()[:, 0]  # (R,)
        lengths = torch.diff(torch.searchsorted(rows, starts), append=torch.tensor([len(rows)]))
        first = cu_seqlens[torch.searchsorted(cu_seqlens, starts, right=True) - 1]  # of the block's sample
        seen = starts + lengths - first
        keys = torch.cat([torch.arange(int(a), int(a + n)) for a, n in zip(first, seen)])  # (K,)
        cu_rows, cu_keys = (torch.nn.functional.pad(each.cumsum(0), (1, 0)).to(torch.int32) for each in (lengths, seen))
        return cls(rows, keys, cu_rows, cu_keys, int(lengths.max()), int(seen.max()))


class Placing(NamedTuple):
    """Where the features of a batch's N tiles of P patches go.

    positions (M,) int64: positions in T of image features and then of newlines; features (F,) int64: the rows that go
    to the first F of them, of a table with the N * P features and then the R pooled features. Samples that share an
    image use the same rows. pool_index (R, K) int64: the rows of the N * P features that are pooled; pool_weight (R, K)
    float32: their weights, infinity where the largest of them is taken; pools_by_max: True if any row is of that kind.
    """

    positions: torch.Tensor
    features: torch.Tensor
    pool_index: torch.Tensor
    pool_weight: torch.Tensor
    pools_by_max: bool = False


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
    where a tile has T frames of a video, H is T * W, for they are below each other, and images have T times the same;
    placing, where their features go.

    tower: further arguments of a tower that takes whole images in any shape, whose tiles are the cells of an image;
    trunk: further arguments of the language model's layers, as image_blocks; extra: what objectives and axes add, by
    their names. Tensors in them move with the batch, other values stay as they are.
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
    placing: Placing
    target_weights: torch.Tensor | None = None
    lengths: tuple[int, ...] = ()
    tower: Inputs = dataclasses.field(default_factory=dict)
    trunk: Inputs = dataclasses.field(default_factory=dict)
    extra: Inputs = dataclasses.field(default_factory=dict)

    def to(self, device: torch.device) -> "Batch":
        """The same batch on another device; copies from pinned memory don't wait."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        """The same batch in page-locked memory (torch's DataLoader calls this)."""
        return self._each(lambda tensor: tensor.pin_memory())

    def with_extra(self, **values: object) -> "Batch":
        """The same batch with more in `extra`."""
        return dataclasses.replace(self, extra={**self.extra, **values})

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        return type(self)(**{name: _changed(value, change) for name, value in vars(self).items()})


def _changed(value: object, change: Callable[[torch.Tensor], torch.Tensor]) -> object:
    """Change the tensors in a value: itself, or in a dictionary or named tuple."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: _changed(each, change) for name, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_changed(each, change) for each in value))
    return value
