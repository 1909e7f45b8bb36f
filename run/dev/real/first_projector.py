# N images, P patches, S squares per image, C tower width, D language-model width
"""Fit an initial projector for stage 1: ridge regression from images to the embeddings of the words in their names.

The projector is the recipes' mlp1x_gelu_avg4: a linear layer on the mean of each 4 x 4 patches of their layer.

Without it, stage 1 needs far more images than these until a frozen language model names their objects.
"""

import math
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from real.onnx_tower import PROCESSOR
from transformers import AutoModelForCausalLM, AutoTokenizer, Dinov2Model

SQUARE = 4  # patches along a side
LAYER = -2
RIDGE = 300.0  # for features with standard deviation 1, per square
BATCH = 32


def write_projector(tower: Path, language_model: Path, named: list[tuple[Path, str]], file: Path) -> None:
    """Fit the projector to images and their names, and write it as LLaVA's mm_projector.bin."""
    squares = _features(tower, [image for image, _ in named])  # (N, S, C)
    words = _embeddings(language_model, [name for _, name in named])  # (N, D)
    inputs, targets = squares.flatten(0, 1), words.repeat_interleave(squares.shape[1], 0)
    mean, deviation, middle = inputs.mean(0), inputs.std(0), targets.mean(0)
    inputs, targets = (inputs - mean) / deviation, targets - middle
    penalty = RIDGE * squares.shape[1] * torch.eye(inputs.shape[1])
    weight = torch.linalg.solve(inputs.T @ inputs + penalty, inputs.T @ targets)  # (C, D)
    # Ridge shrinks its predictions: scale them to the variance of the embeddings.
    weight *= targets.std(0).mean() / (inputs @ weight).std(0).mean()
    weight = (weight / deviation[:, None]).T.contiguous()
    bias = middle - weight @ mean
    torch.save({"model.mm_projector.0.weight": weight, "model.mm_projector.0.bias": bias}, file)


@torch.inference_mode()
def _features(folder: Path, images: list[Path]) -> torch.Tensor:
    """Return the mean of each square of patches, (N, S, C)."""
    tower = Dinov2Model.from_pretrained(folder).eval()
    mean, deviation = (torch.tensor(PROCESSOR[key]) for key in ("image_mean", "image_std"))
    found = []
    for first in range(0, len(images), BATCH):
        pixels = torch.stack([torch.from_numpy(np.array(Image.open(file))) for file in images[first : first + BATCH]])
        pixels = ((pixels / 255 - mean) / deviation).permute(0, 3, 1, 2)
        patches = tower(pixels, output_hidden_states=True).hidden_states[LAYER][:, 1:]  # (N, P, C)
        side = math.isqrt(patches.shape[1]) // SQUARE
        grid = patches.unflatten(1, (side, SQUARE, side, SQUARE))
        found.append(grid.mean((2, 4)).flatten(1, 2))
    return torch.cat(found)


@torch.inference_mode()
def _embeddings(folder: Path, names: list[str]) -> torch.Tensor:
    """Return the mean embedding of a name's tokens, (N, D)."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    table = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).get_input_embeddings().weight
    tokens = [tokenizer(f" {name}", add_special_tokens=False)["input_ids"] for name in names]
    return torch.stack([table[each].mean(0) for each in tokens])
