# n tiles of a picture, P patches of a tile (side x side of them), D language-model width
"""Features in the order of LLaVA-NeXT's prepare_inputs_labels_for_multimodal, read once more in torch's own words."""

import math
import re
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from llava_ds.anyres import best_pinpoint
from llava_ds.batch import Batch
from llava_ds.data.collate import LoadedSample, collate
from llava_ds.geometry import ImageOptions, Size, media_layout
from llava_ds.model.llava import merge_features
from llava_ds.model.projector import Newline

SIDE, WIDTH = 5, 3  # an odd side, so that pooling leaves something out
OPTIONS = ImageOptions(SIDE, 1, (0.5,) * 3, "anyres", merge_type="spatial_unpad", frames_upbound=0)
MERGE_TYPES = [
    f"spatial{unpad}{pool}{nobase}"
    for unpad in ("", "_unpad")
    for pool in ("", "_maxpool2x2")
    for nobase in ("", "_nobase")
]
SIZES = [(5, 5), (10, 5), (5, 10), (15, 4), (3, 17), (9, 10), (40, 11), (1, 60)]


def unpadded(image: torch.Tensor, size: Size) -> torch.Tensor:
    """(D, height, width) without the rows or columns that a picture of the size does not reach."""
    (width, height), (rows, columns) = size, image.shape[1:]
    if width / height > columns / rows:
        margin = (rows - int(height * (columns / width))) // 2
        return image[:, margin : rows - margin]
    margin = (columns - int(width * (rows / height))) // 2
    return image[:, :, margin : columns - margin]


def with_row_ends(image: torch.Tensor, newline: torch.Tensor) -> torch.Tensor:
    """(D, height, width) to (height * (width + 1), D), a newline behind each row."""
    ends = newline[:, None, None].expand(len(newline), image.shape[1], 1)
    return torch.cat([image, ends], 2).flatten(1).T


def next_picture(features: torch.Tensor, size: Size, options: ImageOptions, newline: torch.Tensor) -> torch.Tensor:
    """What a single picture's features (n, P, D) become."""
    merge, ratio = options.merge_type, options.aspect_ratio
    if len(features) == 1:
        return torch.cat([features[0], newline[None]]) if "unpad" in merge else features[0]
    base, tiles = features[0], features[1:]
    across, down = (length // options.size for length in best_pinpoint(size, options.anyres_sizes))
    grid = tiles.view(down, across, SIDE, SIDE, WIDTH)
    image = grid.permute(4, 0, 2, 1, 3).reshape(WIDTH, down * SIDE, across * SIDE)
    most = re.match(r"anyres_max_(\d+)", ratio)
    if "maxpool2x2" in merge:
        tokens = functional.max_pool2d(image, 2).flatten(1).T
    elif "unpad" in merge:
        image = unpadded(image, size)
        if most:
            height, width = image.shape[1:]
            times = math.sqrt(height * width / (int(most[1]) * SIDE**2))
            if times > 1.1:
                new = [max(1, int(height // times)), max(1, int(width // times))]
                image = functional.interpolate(image[None], new, mode="bilinear")[0]
        tokens = with_row_ends(image, newline)
    else:
        tokens = image.flatten(1).T
    return tokens if "nobase" in merge else torch.cat([base, tokens])


def next_video(features: torch.Tensor, options: ImageOptions, newline: torch.Tensor) -> torch.Tensor:
    """What a video's features (frames, P, D) become with a newline behind each row."""
    stride = options.pool_stride
    frames = features.view(len(features), SIDE, SIDE, WIDTH).permute(0, 3, 1, 2)
    if options.pool_mode == "bilinear":
        frames = functional.interpolate(frames, [math.ceil(SIDE / stride)] * 2, mode="bilinear")
    else:
        frames = {"average": functional.avg_pool2d, "max": functional.max_pool2d}[options.pool_mode](frames, stride)
    if "unpad" not in options.merge_type:
        return frames.flatten(2).transpose(1, 2).reshape(-1, WIDTH)
    return torch.cat([with_row_ends(frame, newline) for frame in frames])


def batch_of(shown: list[tuple[str, tuple[Size, ...]]], options: ImageOptions) -> tuple[Batch, list[int]]:
    """A batch of samples that show one picture or video each, and how many tiles each has."""
    layouts = [media_layout(kind, sizes, 1, options) for kind, sizes in shown]
    samples = []
    for layout in layouts:
        ids = torch.tensor([7, *[-200] * layout.num_tokens, 8])
        tiles = torch.zeros(layout.num_tiles, 3, options.size, options.size, dtype=torch.uint8)
        samples.append(LoadedSample(ids, ids.clamp(min=-100), [(tiles, layout)]))
    return collate(samples, options), [layout.num_tiles for layout in layouts]


@pytest.mark.parametrize("mode", ["average", "max", "bilinear"])
@pytest.mark.parametrize("ratio", ["anyres", "anyres_max_1", "pad"])
@pytest.mark.parametrize("merge", MERGE_TYPES)
def test_features_and_their_gradients_are_those_of_llava_next(merge, ratio, mode):
    options = replace(OPTIONS, merge_type=merge, aspect_ratio=ratio, pool_mode=mode)
    shown = [("image", (size,)) for size in SIZES] + [("video", ((9, 9),) * 3)]
    batch, tiles = batch_of(shown, options)
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(sum(tiles), SIDE**2, WIDTH, generator=generator)
    features = features.mul(4).round().div(4).requires_grad_()  # so that some of a square are equal
    newline = Newline(WIDTH)
    torch.nn.init.normal_(newline.embedding, generator=generator)
    embeds = torch.zeros(1, batch.input_ids.shape[1], WIDTH)
    placed = merge_features(embeds, features, batch.placing, newline if options.has_newline else None)[0][0]
    found = placed[(batch.input_ids[0] == 0)]

    parts = features.split(tiles)
    expected = [next_picture(part, size[0], options, newline.embedding) for part, (_, size) in zip(parts, shown[:-1])]
    expected = torch.cat([*expected, next_video(parts[-1], options, newline.embedding)])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)

    direction = torch.randn(expected.shape, generator=generator)
    trained = [features, newline.embedding] if options.has_newline else [features]
    gradients = (torch.autograd.grad((each * direction).sum(), trained) for each in (found, expected))
    for ours, theirs in zip(*gradients):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
