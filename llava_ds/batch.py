"""The tensors of one micro-batch: the only interface between data and model.

T: tokens of all samples laid end to end; M: image positions among them; S: supervised positions; N: image tiles; P:
patches of a tile; R: pooled features; K: maximum number of patch features in a pooled feature.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

Inputs = dict[str, object]


class ImageBlocks(NamedTuple):
    """Blocks of image positions with bidirectional attention: one block per image, or per tile.

    A block's tokens attend to their sample from its start to the block's end. rows (R,) int64: ascending positions in
    T; keys (K,) int64: the positions that each block attends to, block after block; cu_rows and cu_keys (blocks + 1,)
    int32: the blocks' start offsets in rows and keys, and the total; max_rows, max_keys: size of the largest block;
    need_windows: True if this attention applies only to layers with a window.
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
        """Find the blocks of consecutive image positions within samples; None without image positions. is_image
        (T,) bool; cu_seqlens as in Batch.

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
        first = cu_seqlens[torch.searchsorted(cu_seqlens, starts, right=True) - 1]  # start of the block's sample
        seen = starts + lengths - first
        keys = torch.cat([torch.arange(int(a), int(a + n)) for a, n in zip(first, seen)])  # (K,)
        cu_rows, cu_keys = (torch.nn.functional.pad(each.cumsum(0), (1, 0)).to(torch.int32) for each in (lengths, seen))
        return cls(rows, keys, cu_rows, cu_keys, int(lengths.max()), int(seen.max()))


class Placing(NamedTuple):
    """Placement of the features of N tiles with P patches each.

    positions (M,) int64: positions in T of image features and then of newlines; features (F,) int64: rows for the first
    F positions, in a table of the N * P patch features followed by the R pooled features. Samples that share an image
    use the same rows. pool_index (R, K) int64: the patch features that are pooled; pool_weight (R, K) float32: their
    weights, infinity for max pooling; pools_by_max: True if any row is max-pooled.
    """

    positions: torch.Tensor
    features: torch.Tensor
    pool_index: torch.Tensor
    pool_weight: torch.Tensor
    pools_by_max: bool = False


class SharedPrompts(NamedTuple):
    """Placement of samples whose first tokens a pack has only once, in the closest earlier sample with these tokens.

    keys (K,) int64: positions in T of each sample's tokens, shared ones included, sample after sample. cu_keys
    (samples + 1,) int32: start offsets of the samples in keys, and K. max_keys: tokens of the longest sample. row_of
    (S,) int64: each target's index in Batch.target_positions. tokens (S,) int64: position of each target's token.
    lengths, own: tokens of each sample with and without the shared ones, on the host.
    """

    keys: torch.Tensor
    cu_keys: torch.Tensor
    max_keys: int
    row_of: torch.Tensor
    tokens: torch.Tensor
    lengths: tuple[int, ...] | None = None
    own: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Batch:
    """One micro-batch without padding.

    input_ids (1, T) int64, 0 at image positions; position_ids (1, T) int64, from 0 in every sample, or (3, 1, T) for
    language models whose positions have three axes;
    cu_seqlens (samples + 1,) int32, start offsets of the samples, and T; max_seqlen, length of the longest sample;
    lengths, of all samples, on the host;
    sources (samples,) int64, index of each sample's data source;
    target_positions (S,) int64, positions whose output is supervised; targets (S,) int64, the ids expected there;
    target_samples (S,) int64, each target's sample in the micro-batch;
    target_weights (S,) float32, each target's loss weight, None if all are 1;
    pixel_values (N, 3, H, W) uint8, at least one tile (a blank tile, placed nowhere, if the samples have no images);
    for tiles with T video frames, H is T * W (frames stacked vertically, images repeated T times);
    placing, placement of the tiles' features;
    shared, None if all tokens of the samples are in the pack. With it, cu_seqlens, max_seqlen and lengths count own
    tokens, and target_positions (n,) has each position once, though targets of several samples may be predicted there.

    tower: additional arguments of a tower that takes whole images in any shape (tiles are then cells of an image);
    trunk: additional arguments of the language model's layers, such as image_blocks; extra: values added by objectives
    and axes, by name. Tensors in them move with the batch, other values stay unchanged.
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
    shared: SharedPrompts | None = None
    tower: Inputs = dataclasses.field(default_factory=dict)
    trunk: Inputs = dataclasses.field(default_factory=dict)
    extra: Inputs = dataclasses.field(default_factory=dict)

    @property
    def target_tokens(self) -> torch.Tensor:
        """Position of each target's token in T, (S,)."""
        return self.target_positions + 1 if self.shared is None else self.shared.tokens

    def by_target(self, values: torch.Tensor) -> torch.Tensor:
        """Return one row per target, (S, ...). values: rows at target_positions."""
        return values if self.shared is None else values.index_select(0, self.shared.row_of)

    def to(self, device: torch.device) -> "Batch":
        """Copy the batch to another device; copies from pinned memory don't block."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        """Copy the batch to page-locked memory (called by torch's DataLoader)."""
        return self._each(lambda tensor: tensor.pin_memory())

    def with_extra(self, **values: object) -> "Batch":
        """Copy the batch with more values in `extra`."""
        return dataclasses.replace(self, extra={**self.extra, **values})

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        return type(self)(**{name: _changed(value, change) for name, value in vars(self).items()})


def _changed(value: object, change: Callable[[torch.Tensor], torch.Tensor]) -> object:
    """Apply `change` to the tensors in a value: a tensor, list, dictionary or named tuple."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list):
        return [_changed(each, change) for each in value]
    if isinstance(value, dict):
        return {name: _changed(each, change) for name, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_changed(each, change) for each in value))
    return value
