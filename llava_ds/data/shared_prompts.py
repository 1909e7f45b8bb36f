# T tokens of all samples laid end to end, copies of prompts included; M image positions among them
"""Build packs that contain the shared prompt of several answers only once."""

import dataclasses

import torch
import torch.nn.functional as F

from llava_ds.batch import Batch, SharedPrompts
from llava_ds.geometry import ImageOptions


def share_prompts(batch: Batch, shared: list[int], options: ImageOptions) -> Batch:
    """Drop tokens that samples share with an earlier sample. Their other tokens attend to that sample's copy.

    batch: has all T tokens; shared: LoadedSample.shared of each sample. The loss does not change: a prompt's last token
    predicts the first token of every answer, and position ids stay the same.
    """
    starts, lengths = batch.cu_seqlens[:-1].tolist(), batch.lengths
    is_kept = torch.ones(batch.input_ids.shape[1], dtype=torch.bool)
    for start, count in zip(starts, shared):
        is_kept[start : start + count] = False
    places = is_kept.cumsum(0) - 1  # (T,): index of every token in the pack
    owner = 0
    for start, count in zip(starts, shared):
        owner = start if count == 0 else owner
        places[start : start + count] = places[owner : owner + count].clone()
    own = tuple(length - count for length, count in zip(lengths, shared))
    cu_seqlens = F.pad(torch.tensor(own).cumsum(0), (1, 0))
    rows, row_of = places[batch.target_positions].unique(return_inverse=True)
    placing = batch.placing
    num_features = len(placing.features)
    is_placed = is_kept[placing.positions]  # (M,)
    positions = places[placing.positions[is_placed]]
    is_image = torch.zeros(int(cu_seqlens[-1]), dtype=torch.bool).index_fill(0, positions, True)
    return dataclasses.replace(
        batch,
        input_ids=batch.input_ids[:, is_kept],
        position_ids=batch.position_ids[..., is_kept],
        cu_seqlens=cu_seqlens.to(torch.int32),
        max_seqlen=max(own),
        lengths=own,
        target_positions=rows,
        placing=placing._replace(positions=positions, features=placing.features[is_placed[:num_features]]),
        shared=SharedPrompts(
            places, batch.cu_seqlens, max(lengths), row_of, places[batch.target_positions + 1], lengths, own
        ),
        trunk=options.trunk_inputs(is_image, cu_seqlens),
    )
