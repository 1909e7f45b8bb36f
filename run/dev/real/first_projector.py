# N images, S squares per image, C tower width, D language-model width
"""Fit an initial projector: ridge regression from images to the embeddings of the words in their names.

A random projector would need far more images before its outputs differ between objects.
"""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from real.onnx_tower import PROCESSOR
from real.whole_model import set_projector, squares
from torch import nn
from transformers import AutoTokenizer, InternVLForConditionalGeneration

RIDGE = 1000.0  # for features with standard deviation 1, per square
BATCH = 32


def write_projector(folder: Path, named: list[tuple[Path, str]]) -> None:
    """Fit the projector of a model to images and their names, and write the model again."""
    model = InternVLForConditionalGeneration.from_pretrained(folder).eval()
    features = torch.cat(
        [squares(model, _pixels(named[i : i + BATCH])) for i in range(0, len(named), BATCH)]
    )  # (N, S, C)
    words = _embeddings(model, AutoTokenizer.from_pretrained(folder), [name for _, name in named])  # (N, D)
    inputs, targets = features.flatten(0, 1), words.repeat_interleave(features.shape[1], 0)
    set_projector(model, *_ridge(inputs, targets, RIDGE * features.shape[1]))
    model.save_pretrained(folder)


def _ridge(inputs: torch.Tensor, targets: torch.Tensor, penalty: float) -> tuple[nn.Linear, nn.Linear]:
    """Return ridge regression as two layers. Between them are D / 2 components, each scaled to deviation 1."""
    mean, deviation, middle = inputs.mean(0), inputs.std(0), targets.mean(0)
    inputs, targets = (inputs - mean) / deviation, targets - middle
    penalties = penalty * torch.eye(inputs.shape[1])
    weight = torch.linalg.solve(inputs.T @ inputs + penalties, inputs.T @ targets)  # (C, D)
    # Ridge shrinks its predictions: scale them to the variance of the embeddings.
    weight *= targets.std(0).mean() / (inputs @ weight).std(0).mean()
    components = torch.linalg.svd(inputs @ weight, full_matrices=False)[2][: weight.shape[1] // 2]  # (D / 2, D)
    scale = (inputs @ weight @ components.T).std(0)
    inner, outer = nn.Linear(*weight.shape), nn.Linear(*weight.T.shape)
    inner.weight = nn.Parameter((weight @ components.T / scale / deviation[:, None]).T)
    inner.bias = nn.Parameter(-inner.weight.detach() @ mean)
    outer.weight, outer.bias = nn.Parameter(components.T * scale), nn.Parameter(middle)
    return inner, outer


def _pixels(named: list[tuple[Path, str]]) -> torch.Tensor:
    mean, deviation = (torch.tensor(PROCESSOR[key]) for key in ("image_mean", "image_std"))
    pixels = torch.stack([torch.from_numpy(np.array(Image.open(file))) for file, _ in named])
    return ((pixels / 255 - mean) / deviation).permute(0, 3, 1, 2)


@torch.inference_mode()
def _embeddings(model: InternVLForConditionalGeneration, tokenizer, names: list[str]) -> torch.Tensor:
    """Return the mean embedding of a name's tokens, (N, D)."""
    table = model.get_input_embeddings().weight
    tokens = [tokenizer(f" {name}", add_special_tokens=False)["input_ids"] for name in names]
    return torch.stack([table[each].mean(0) for each in tokens])
