# N cells over all images, M x M patches per cell, S side of a cell, C tower width, P patches over all images
"""SigLIP 2 on images of any shape, laid end to end without padding. Images don't attend to each other."""

import torch
import torch.nn.functional as F
from transformers import Siglip2VisionModel

from llava_ds.batch import Inputs


def patches_of(pixels: torch.Tensor, patch_size: int) -> torch.Tensor:
    """Cut (N, 3, S, S) into patches (N, patches, 3 * patch_size**2), row by row. Source: Siglip2ImageProcessor."""
    n, channels, height, width = pixels.shape
    down, across = height // patch_size, width // patch_size
    cut = pixels.reshape(n, channels, down, patch_size, across, patch_size).permute(0, 2, 4, 3, 5, 1)
    return cut.reshape(n, down * across, -1)


def flex_features(tower: Siglip2VisionModel, cells: torch.Tensor, tower_inputs: Inputs) -> torch.Tensor:
    """Compute features (N, M * M, C) of normalised cells (N, 3, S, S).

    tower: built with the attention of register_for_flex(); tower_inputs: Batch.tower. Source: transformers'
    Siglip2VisionModel, without its padding.
    """
    patches = patches_of(cells, tower.config.patch_size)
    hidden = tower.embeddings.patch_embedding(patches)  # (N, M * M, C)
    side = cells.shape[-1] // tower.config.patch_size  # M
    positions = _positions(tower, tower_inputs["shapes"], side).to(hidden.dtype)  # (P, C)
    packed = (hidden.flatten(0, 1) + positions)[None]  # (1, P, C)
    bounds = tower_inputs["cu_seqlens"], tower_inputs["max_seqlen"]
    for layer in tower.encoder.layers:
        packed = layer(packed, bounds)
    return packed.view(hidden.shape)


def _positions(tower: Siglip2VisionModel, shapes: tuple[tuple[int, int], ...], side: int) -> torch.Tensor:
    """Scale the position embeddings to the shape of each image. Returns (P, C) float32, cell by cell."""
    embedding = tower.embeddings.position_embedding
    # Call forward instead of reading the weight, because ZeRO-3 gathers weights in forward.
    table = embedding(torch.arange(embedding.num_embeddings, device=embedding.weight.device)).float()
    grid = table.T.unflatten(1, (tower.embeddings.position_embedding_size, -1))[None]  # (1, C, rows, columns)
    scaled = {
        shape: F.interpolate(grid, shape, mode="bilinear", align_corners=False, antialias=True)[0]
        for shape in dict.fromkeys(shapes)
    }
    return torch.cat([_by_cells(scaled[shape], side) for shape in shapes])


def _by_cells(grid: torch.Tensor, side: int) -> torch.Tensor:
    """Reorder (C, rows, columns) to (rows * columns, C), cell by cell with M x M patches each."""
    cells = grid.unflatten(1, (-1, side)).unflatten(3, (-1, side))  # (C, cells down, M, cells across, M)
    return cells.permute(1, 3, 2, 4, 0).flatten(0, 3)
