"""Vision towers as training builds them, from their folders, and images to show them."""

import numpy as np
import torch
from PIL import Image

from llava_ds.config.arguments import ModelArguments
from llava_ds.model.open import names as formats
from llava_ds.model.open.tower import read_tower
from llava_ds.model.open.weights import Source
from llava_ds.model.vision import VisionTower


def noise(width: int, height: int, seed: int) -> Image.Image:
    """An image of random pixels."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def built(folder, **flags: object) -> VisionTower:
    """The tower in a folder with its weights, in eval mode."""
    plan = read_tower(folder, ModelArguments(vision_tower=str(folder), **flags))
    tower = VisionTower(plan, torch.tensor(plan.images.mean), torch.tensor(plan.images.std)).eval()
    files = Source("--vision_tower", str(folder), formats.tower_from_disk).open(
        lambda name: formats.runs_in_tower(name, plan.num_layers)
    )
    tower.load_state_dict({name: read() for name, read in files.tensors()})
    return tower
