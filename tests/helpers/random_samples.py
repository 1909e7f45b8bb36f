"""Random samples for the collator: texts with images and videos of any layout, cut anywhere."""

import dataclasses
import random

import torch

from llava_ds.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX
from llava_ds.data.collate import LoadedSample
from llava_ds.geometry import ImageOptions, media_layout
from llava_ds.layouts import MediaLayout

SIZE, P = 4, 4  # features per tile
SQUARE = ImageOptions(SIZE, 2, (0.5, 0.5, 0.5))
UNPAD = dataclasses.replace(SQUARE, aspect_ratio="anyres", merge_type="spatial_unpad", newline_position="frame")
ALL = [
    SQUARE,
    UNPAD,
    dataclasses.replace(UNPAD, aspect_ratio="anyres_max_1"),
    dataclasses.replace(UNPAD, pool_stride=1),
]


def sample(
    ids: list[int], labels: list[int] | None = None, layouts: list[MediaLayout] = (), colour: int = 0
) -> LoadedSample:
    """A sample; without labels every text position is supervised."""
    if labels is None:
        labels = [IGNORE_INDEX if token == IMAGE_TOKEN_INDEX else token for token in ids]
    media = [
        (torch.full((layout.num_tiles, 3, SIZE, SIZE), colour + i, dtype=torch.uint8), layout)
        for i, layout in enumerate(layouts)
    ]
    return LoadedSample(torch.tensor(ids), torch.tensor(labels), media)


def random_samples(seed: int, options: ImageOptions = SQUARE) -> list[LoadedSample]:
    rng = random.Random(seed)
    samples = []
    for i in range(rng.randint(1, 6)):
        count = rng.choice([0, 0, 1, 2])
        layouts = []
        for _ in range(count):
            kind = rng.choice(["image", "frames"])
            sizes = tuple((rng.randint(1, 40), rng.randint(1, 40)) for _ in range(1 if kind == "image" else 3))
            layouts.append(media_layout(kind, sizes, count, options))
        pieces = [[rng.randint(1, 99) for _ in range(rng.randint(1, 5))] for _ in range(count + 1)]
        ids = list(pieces[0])
        for piece, layout in zip(pieces[1:], layouts):
            ids += [IMAGE_TOKEN_INDEX] * layout.num_tokens + piece
        labels = [IGNORE_INDEX if token < 0 or rng.random() < 0.5 else token for token in ids]
        cut = rng.randint(1, len(ids))  # model_max_length may cut anywhere, even inside an image
        samples.append(sample(ids[:cut], labels[:cut], layouts, 10 * i))
    return samples
