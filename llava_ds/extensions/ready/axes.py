# L tokens of a sample, P patches of all images, W windows of the tower
"""Compute positions on three axes and tower inputs for images at their own resolution.

Data-loader workers compute them: lengths computed on a device could only be read after a sync.
"""

from collections.abc import Sequence

import torch
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from llava_ds.batch import Inputs
from llava_ds.constants import IMAGE_TOKEN_INDEX
from llava_ds.extensions.ready.ready_tilings import BudgetTiling, CellTiling
from llava_ds.tilings import Grid


def axis_positions(input_ids: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
    """Return the positions of a sample's tokens on the axes time, height and width: (3, L) int64.

    input_ids (L,), with IMAGE_TOKEN_INDEX at the grids' features in reading order; the last grid may be truncated.
    Tokens after a grid continue from its longer side, even if a video has more moments than that. Source: transformers'
    Qwen2VLModel.get_rope_index.
    """
    at_images = (input_ids == IMAGE_TOKEN_INDEX).nonzero()[:, 0].tolist()
    parts, position, done, used = [], 0, 0, 0
    for across, down, moments, interval in grids:
        if used == len(at_images):
            break
        first, count = at_images[used], min(moments * across * down, len(at_images) - used)
        parts.append(torch.arange(position, position + first - done).expand(3, -1))
        position += first - done
        cells = torch.arange(count)
        times = (cells // (across * down) * torch.tensor(interval, dtype=torch.float32)).long()
        parts.append(position + torch.stack([times, cells // across % down, cells % across]))
        position, done, used = position + max(across, down), first + count, used + count
    parts.append(torch.arange(position, position + len(input_ids) - done).expand(3, -1))
    return torch.cat(parts, 1)


def tower_inputs(grids: Sequence[Grid], tiling: CellTiling | BudgetTiling) -> Inputs:
    """Return the arguments, except the patches, of transformers' tower for all images and video moments.

    Patches are ordered cell by cell. position_ids (P, 2): row and column. cu_seqlens (images + 1,) int32 and
    max_seqlen: starts of images and the longest length; each moment of a video counts as an image. With windows:
    window_index (cells,), cu_window_seqlens (W + 1,) int32 and max_window_seqlen. With a learned position table:
    interp_indices and interp_weights (P, 4).
    """
    merge = tiling.merge
    grid = torch.tensor([(one.moments, one.down * merge, one.across * merge) for one in grids])  # time, rows, columns
    cu_seqlens = get_vision_cu_seqlens(grid)
    inputs = {
        "position_ids": get_vision_position_ids(grid, merge),
        "cu_seqlens": cu_seqlens,
        "max_seqlen": int(cu_seqlens.diff().max()),
    }
    if tiling.window is not None:
        window, patch = tiling.window * tiling.side, tiling.side // merge
        index, cu_windows = get_vision_window_index(grid, merge, window, patch)
        inputs |= {
            "window_index": index,
            "cu_window_seqlens": cu_windows,
            "max_window_seqlen": int(cu_windows.diff().max()),
        }
    if tiling.table is not None:
        indices, weights = get_vision_interpolation_indices_and_weights(
            grid, tiling.table, align_corners=True, spatial_merge_size=merge
        )
        inputs |= {"interp_indices": indices, "interp_weights": weights}
    return inputs
