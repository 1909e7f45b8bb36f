# T tokens of all samples laid end to end, M image positions, S supervised positions, N pictures, P patches each
"""Samples laid end to end: encoded ids and uint8 pictures to a Batch."""

from dataclasses import dataclass

import torch

from llava_ds.batch import Batch
from llava_ds.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX


@dataclass(frozen=True)
class LoadedSample:
    """input_ids and labels (length,) int64, IMAGE_TOKEN_INDEX at image positions; pixels, a (3, H, W) uint8 each."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    pixels: list[torch.Tensor]


def collate(samples: list[LoadedSample], image_size: int, num_image_tokens: int) -> Batch:
    """One micro-batch of any samples, or of none.

    A rank with nothing to do takes part with one token that is not supervised, and a batch without pictures with one
    blank picture that is placed nowhere: both count for nothing, and the ranks' collectives match.
    """
    if not samples:
        token = torch.zeros(1, dtype=torch.int64)
        samples = [LoadedSample(token, torch.full_like(token, IGNORE_INDEX), [])]

    lengths = torch.tensor([len(sample.input_ids) for sample in samples])
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.cat([sample.input_ids for sample in samples])  # (T,)
    labels = torch.cat([sample.labels for sample in samples])  # (T,)
    labels[cu_seqlens[:-1]] = IGNORE_INDEX  # what comes before a sample's first token is another sample
    supervised = (labels != IGNORE_INDEX).nonzero()[:, 0]  # (S,)

    is_image = ids == IMAGE_TOKEN_INDEX
    pixels = [picture for sample in samples for picture in sample.pixels]
    if not pixels:
        pixels = [torch.zeros(3, image_size, image_size, dtype=torch.uint8)]
    return Batch(
        input_ids=ids.masked_fill(is_image, 0)[None],
        position_ids=torch.cat([torch.arange(length) for length in lengths.tolist()])[None],
        cu_seqlens=cu_seqlens.to(torch.int32),
        max_seqlen=int(lengths.max()),
        target_positions=supervised - 1,
        targets=labels[supervised],
        pixel_values=torch.stack(pixels),
        image_positions=is_image.nonzero()[:, 0],
        feature_index=_feature_index(samples, num_image_tokens),
    )


def _feature_index(samples: list[LoadedSample], num_image_tokens: int) -> torch.Tensor:
    """(M,) rows of the (N * P) features, in reading order. A sample cut inside a picture uses its first rows only."""
    rows, first = [], 0
    for sample in samples:
        wanted = int((sample.input_ids == IMAGE_TOKEN_INDEX).sum())
        rows.append(torch.arange(first, first + wanted))
        first += len(sample.pixels) * num_image_tokens
    return torch.cat(rows)
