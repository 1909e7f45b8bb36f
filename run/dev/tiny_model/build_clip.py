"""Train the tiny CLIP tower contrastively on images of scenes and captions. The text encoder is discarded."""

# B images, C captions, W words of a caption, D embedding width

import dataclasses
import functools
import itertools
import json
import math
import operator

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from tiny_model.muon import Optimizers
from tiny_model.weights_half import save_half
from torch import nn
from tqdm import tqdm
from transformers import CLIPVisionConfig, CLIPVisionModel

from llava_ds.tiny.scenes import COLOURS, PLACES, SHAPES, draw_scene, sample_scene

IMAGE_MEAN = (0.48145466, 0.4578275, 0.40821073)  # CLIP's
IMAGE_STD = (0.26862954, 0.26130258, 0.27577711)
IMAGE_SIZE_PX = 96
WORDS = ("", *COLOURS, *SHAPES, "top", "bottom", "left", "right", "centre")  # "" fills short captions


@dataclasses.dataclass(frozen=True)
class ClipRecipe:
    """Size of the tower, and length and speed of its training."""

    num_steps: int = 1000
    num_pictures: int = 16000
    batch_size: int = 128
    learning_rate: float = 2e-3  # embeddings, norms and the text encoder, AdamW
    muon_learning_rate: float = 2e-2
    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 5
    num_heads: int = 4
    num_eval_scenes: int = 512


class TextEncoder(nn.Module):
    """Embeds a short caption. captions (C, W) int64 word ids, 0 for none. Returns (C, D)."""

    def __init__(self, width):
        super().__init__()
        self.words = nn.EmbeddingBag(len(WORDS), width, mode="sum", padding_idx=0)
        self.mix = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, captions):
        return self.mix(self.words(captions))


class ContrastiveModel(nn.Module):
    """The tower and the text encoder, compared by sigmoid of a scaled cosine (SigLIP, arXiv 2303.15343).

    A caption is compared with the whole image (CLS) and with its best patch (FILIP, arXiv 2111.07783): LLaVA reads
    patches, and the comparison by patch is learned much faster than the comparison by image.
    """

    def __init__(self, tower, width):
        super().__init__()
        self.tower = tower
        self.project = nn.Linear(tower.config.hidden_size, width, bias=False)
        self.text = TextEncoder(width)
        self.log_scale = nn.Parameter(torch.tensor(math.log(10.0)))
        self.bias = nn.Parameter(torch.tensor(-5.0))

    def forward(self, pixel_values, captions):
        """Return two logits (B, C), by image and by best patch: does the caption match the image?"""
        states = self.tower(pixel_values).last_hidden_state  # (B, 1 + patches, D)
        tokens = F.normalize(self.project(self.tower.post_layernorm(states)), dim=-1)
        texts = F.normalize(self.text(captions), dim=-1)
        scores = tokens @ texts.T * self.log_scale.exp() + self.bias  # (B, 1 + patches, C)
        return scores[:, 0], scores[:, 1:].amax(1)


def build_clip(folder, seed, recipe=ClipRecipe()):
    """Train from a seed, write the folder that transformers opens, and return retrieval accuracies."""
    torch.manual_seed(seed)
    rng = np.random.default_rng([seed, 10])
    config = CLIPVisionConfig(
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        projection_dim=recipe.hidden_size,
        image_size=IMAGE_SIZE_PX,
        patch_size=16,  # makes each place of the 3 x 3 grid 2 x 2 patches
    )
    model = ContrastiveModel(CLIPVisionModel(config), recipe.hidden_size)
    captions, names = all_captions()
    scenes = [sample_scene(rng) for _ in range(recipe.num_pictures)]
    _train(model, scenes, captions, names, rng, recipe)
    save_clip(model.tower, folder)
    return retrieval_accuracy(model.eval(), captions, names, np.random.default_rng([seed, 11]), recipe.num_eval_scenes)


def all_captions():
    """Return every caption of one thing: word ids (C, W), and names [(colour, shape, place)], None for omitted
    attributes.

    Includes captions without one attribute; captions that differ in a single attribute are each other's hard negatives.
    """
    colours, shapes, places = (*COLOURS, None), (*SHAPES, None), (*range(len(PLACES)), None)
    names = [n for n in itertools.product(colours, shapes, places) if n.count(None) <= 1]
    longest = 4  # red circle top left
    rows = []
    for colour, shape, place in names:
        words = [w for w in (colour, shape) if w] + ([] if place is None else PLACES[place].split())
        rows.append([WORDS.index(w) for w in words] + [0] * (longest - len(words)))
    return torch.tensor(rows), names


def truth_table(scenes, names):
    """Return float (B, C): 1 where a thing in the scene matches the caption."""
    column = {name: c for c, name in enumerate(names)}
    table = torch.zeros(len(scenes), len(names))
    for b, scene in enumerate(scenes):
        for t in scene.things:
            full = (t.colour, t.shape, t.place)
            fitting = [full] + [full[:i] + (None,) + full[i + 1 :] for i in range(3)]
            table[b, [column[name] for name in fitting]] = 1.0
    return table


def pictures_of(scenes):
    """Return uint8 (B, 3, H, W), resized like CLIPImageProcessor."""
    size = (IMAGE_SIZE_PX, IMAGE_SIZE_PX)
    arrays = [np.asarray(draw_scene(scene).resize(size, Image.Resampling.BICUBIC)) for scene in scenes]
    return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2)


def normalise(pictures):
    """Return float32 pixel values from uint8 (B, 3, H, W)."""
    mean, std = torch.tensor(IMAGE_MEAN).view(3, 1, 1), torch.tensor(IMAGE_STD).view(3, 1, 1)
    return (pictures.float() / 255 - mean) / std


def _train(model, scenes, captions, names, rng, recipe):
    layers = [p for name, p in model.tower.named_parameters() if p.ndim == 2 and ".layers." in name]
    optimizers = Optimizers(model, layers, recipe)
    drawn = functools.cache(lambda i: pictures_of([scenes[i]])[0])  # images are drawn when first needed, and kept
    bar = tqdm(range(recipe.num_steps), desc="clip")
    order = np.array([], dtype=np.int64)
    for _ in bar:
        if len(order) < recipe.batch_size:
            order = rng.permutation(len(scenes))
        indices, order = order[: recipe.batch_size].tolist(), order[recipe.batch_size :]
        truth = truth_table([scenes[i] for i in indices], names)
        pixel_values = normalise(torch.stack([drawn(i) for i in indices]))
        by_picture, by_patch = (
            F.binary_cross_entropy_with_logits(logits, truth, reduction="sum") / len(indices)
            for logits in model(pixel_values, captions)
        )
        optimizers.step(by_picture + by_patch)
        bar.set_postfix(by_picture=f"{by_picture.item():.2f}", by_patch=f"{by_patch.item():.2f}")


@torch.no_grad()
def retrieval_accuracy(model, captions, names, rng, num_scenes, num_rivals=64):
    """Return accuracies on held-out scenes.

    thing: share where a true caption scores highest among captions that differ in at most one attribute;
    caption: share where an image's own caption scores highest among `num_rivals` scenes' (mean over its things).
    """
    scenes = [sample_scene(rng, heldout=True) for _ in range(num_scenes)]
    logits = torch.cat(
        [model(normalise(pictures_of(scenes[i : i + 64])), captions)[0] for i in range(0, num_scenes, 64)]
    )
    column = {name: c for c, name in enumerate(names)}
    right = total = 0
    for b, scene in enumerate(scenes):
        seen = {(t.colour, t.shape, t.place) for t in scene.things}
        for true in seen:
            rivals = [n for n in names if None not in n and n not in seen and sum(map(operator.ne, n, true)) == 1]
            right += bool(logits[b, column[true]] > logits[b, [column[n] for n in rivals]].max())
            total += 1
    own = [[column[t.colour, t.shape, t.place] for t in scene.things] for scene in scenes]
    log_odds = F.logsigmoid(logits) - F.logsigmoid(-logits)
    best = 0
    for start in range(0, num_scenes, num_rivals):
        group = range(start, start + num_rivals)
        scores = torch.stack([log_odds[start : start + num_rivals, own[c]].sum(1) for c in group], dim=1)
        best += int((scores.argmax(1) == torch.arange(num_rivals)).sum())
    return {"thing": right / total, "caption": best / num_scenes}


def save_clip(tower, folder):
    """Write the tower as CLIPVisionModel and its CLIPImageProcessor settings."""
    folder.mkdir(parents=True, exist_ok=True)
    save_half(tower, folder, rename=lambda key: key if key.startswith("vision_model.") else f"vision_model.{key}")
    processor = {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": IMAGE_SIZE_PX},
        "resample": 3,  # bicubic
        "do_center_crop": True,
        "crop_size": {"height": IMAGE_SIZE_PX, "width": IMAGE_SIZE_PX},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(IMAGE_MEAN),
        "image_std": list(IMAGE_STD),
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n")
