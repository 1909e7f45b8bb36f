"""The tensors of one micro-batch: all that data and model know of each other.

T tokens of all samples laid end to end, M image positions among them, S supervised positions, N image tiles of
P patches each, R pooled features made of up to K others.
"""

import dataclasses
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Batch:
    """One micro-batch without padding.

    input_ids (1, T) int64, 0 at image positions; position_ids (1, T) int64, from 0 in every sample;
    cu_seqlens (samples + 1,) int32, where samples start, and T; max_seqlen, the longest sample;
    target_positions (S,) int64, positions whose output is supervised; targets (S,) int64, the ids expected there;
    target_sources (S,) int64, the data source of each, by number;
    pixel_values (N, 3, H, W) uint8, at least one tile (a blank one placed nowhere if the samples have none);
    pool_index (R, K) int64, which of the N * P features are pooled; pool_weight (R, K) float32, their weights,
    infinity where the largest of them is taken, which pools_by_max says of some row;
    image_positions (M,) int64, where in T something of a picture goes, newlines last; feature_index (F,) int64, what
    goes to the first F of them: a row of the N * P features and, behind them, the R pooled ones.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    target_positions: torch.Tensor
    targets: torch.Tensor
    target_sources: torch.Tensor
    pixel_values: torch.Tensor
    pool_index: torch.Tensor
    pool_weight: torch.Tensor
    image_positions: torch.Tensor
    feature_index: torch.Tensor
    pools_by_max: bool = False

    def to(self, device: torch.device) -> "Batch":
        """The same batch on another device; copies from pinned memory don't wait."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        """The same batch in page-locked memory (torch's DataLoader calls this)."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change) -> "Batch":
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return Batch(**{k: change(v) if isinstance(v, torch.Tensor) else v for k, v in values.items()})
