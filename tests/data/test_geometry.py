"""Tiles, tokens and the order of features, against what LLaVA-NeXT's own code gave for the same sizes."""

import json
import math
import random
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from llava_ds.anyres import best_pinpoint, parse_pinpoints, unpadded_box
from llava_ds.config.arguments import DataArguments, ModelArguments
from llava_ds.constants import ConfigError
from llava_ds.geometry import ImageOptions, ImageSpec, image_options, media_layout
from llava_ds.layouts import MediaLayout

# Per case: a picture's size or a video's frames, the flags, and what LLaVA-NeXT's functions made of features that are
# their own numbers (a newline is -1): how many, their mean, their mean weighted from 0 to 1, and a checksum where no
# feature is pooled.
GOLDENS = json.loads((Path(__file__).parents[1] / "data" / "goldens" / "layouts.json").read_text())
MEAN = (0.5, 0.5, 0.5)
ANYRES = ImageOptions(336, 14, MEAN, "anyres", merge_type="spatial_unpad")


def merged(layout: MediaLayout) -> np.ndarray:
    """The sequence that a layout makes of features that are their own numbers, a newline being -1."""
    features = np.arange(layout.num_tiles * layout.side**2, dtype=np.float64)
    pooled = (features[layout.pool_index] * layout.pool_weight).sum(1)
    return np.concatenate([features, [-1], pooled])[layout.rows]


def golden_layout(case: dict) -> MediaLayout:
    names = ("mm_newline_position", "mm_spatial_pool_mode", "mm_spatial_pool_stride", "image_aspect_ratio")
    data = DataArguments(image_grid_pinpoints=case["image_grid_pinpoints"], **{name: case[name] for name in names})
    spec = ImageSpec(*case["tower"], MEAN, MEAN)
    options = image_options(ModelArguments(mm_patch_merge_type=case["mm_patch_merge_type"]), data, spec)
    size = tuple(case["size"])
    if case["frames"] is None:
        return media_layout("image", (size,), 1, options)
    return media_layout("video", (size,) * case["frames"], 1, options)


def test_layouts_are_those_of_llava_next():
    for case in GOLDENS:
        layout = golden_layout(case)
        assert (layout.num_tiles, layout.num_tokens) == (case["tiles"], case["tokens"]), case
        found = merged(layout)
        assert len(found) == layout.num_tokens
        if "crc32" in case:
            assert zlib.crc32(found.astype("<i4").tobytes()) == case["crc32"], case
        assert math.isclose(found.mean(), case["mean"], rel_tol=1e-5, abs_tol=1e-4), case
        weighted = (found * np.linspace(0, 1, len(found))).mean()
        assert math.isclose(weighted, case["weighted"], rel_tol=1e-5, abs_tol=1e-4), case


@pytest.mark.parametrize(("side", "stride"), [(24, 2), (27, 2), (7, 3), (5, 5), (24, 1)])
def test_pooled_features_are_torchs(side, stride):
    features = torch.randn(3, side, side, 4)
    for mode in ("average", "max", "bilinear"):
        options = replace(ANYRES, size=side, patch_size=1, pool_mode=mode, pool_stride=stride)
        layout = media_layout("frames", ((9, 9),) * 3, 1, options)
        channels = features.permute(0, 3, 1, 2)
        if mode == "average":
            expected = torch.nn.functional.avg_pool2d(channels, stride)
        elif mode == "max":
            expected = torch.nn.functional.max_pool2d(channels, stride)
        else:
            expected = torch.nn.functional.interpolate(channels, [math.ceil(side / stride)] * 2, mode="bilinear")
        expected = expected.permute(0, 2, 3, 1).reshape(-1, 4)
        found = features.reshape(-1, 4)
        if stride > 1:
            weights, parts = torch.tensor(layout.pool_weight)[..., None], found[torch.tensor(layout.pool_index)]
            assert bool(weights.isinf().all()) == layout.pools_by_max == (mode == "max")
            found = parts.amax(1) if mode == "max" else (parts * weights).sum(1)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_every_patch_of_an_unpadded_image_is_read_once_from_left_to_right():
    """The overview, then the picture's rows across tiles, each with a newline; padding nowhere."""
    layout = media_layout("image", ((1000, 500),), 1, ANYRES)
    assert layout.num_tiles == 1 + 2 and layout.grid == (2, 1)
    body = merged(layout)[576:].reshape(24, 49)
    assert (body[:, 48] == -1).all()
    assert body[0, :48].tolist() == [*range(576, 600), *range(1152, 1176)]
    padded = media_layout("image", ((1000, 250),), 1, ANYRES)
    left, top, right, bottom = unpadded_box((1000, 250), padded.grid[0] * 24, padded.grid[1] * 24)
    assert padded.num_tokens == 576 + (bottom - top) * (right - left + 1)


def test_several_images_of_a_sample_are_not_cut_into_tiles():
    alone, together = (media_layout("image", ((900, 300),), count, ANYRES) for count in (1, 2))
    assert alone.num_tiles == 4 and together.num_tiles == 1
    assert merged(together).tolist() == [*range(576), -1]


def test_the_length_is_known_for_any_image_and_fits_the_rows():
    rng = random.Random(1)
    for _ in range(300):
        size = rng.choice([(1, rng.randint(1, 40_000)), (rng.randint(1, 5000), rng.randint(1, 5000))])
        for ratio in ("anyres", "anyres_max_1"):
            options = replace(ANYRES, size=24, patch_size=8, aspect_ratio=ratio)
            layout = media_layout("image", (size,), 1, options)
            assert len(layout.rows) == layout.num_tokens >= 9 and layout.rows.max() <= layout.num_tiles * 9 + 10**4


def test_pinpoints():
    assert parse_pinpoints(None, 336) == ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
    assert parse_pinpoints("[[336, 672], (672, 336)]", 336) == ((336, 672), (672, 336))
    assert parse_pinpoints("(1x1),...,(2x3)", 10) == ((10, 10), (10, 20), (10, 30), (20, 10), (20, 20), (20, 30))
    assert parse_pinpoints("(1x1),(1x2)", 10) == ((10, 10), (10, 20))
    assert best_pinpoint((1, 10_000), parse_pinpoints(None, 336)) == (336, 672)
    for text in (
        "",
        "[]",
        "336",
        "[(336,600)]",
        "[(0,336)]",
        "[(336,)]",
        "(0x1),...,(0x1)",
        "[('336','672')]",
        "(2x2),(1x1)",
    ):
        with pytest.raises(ConfigError, match=r"--image_grid_pinpoints .* multiples of the tower's 336 pixels"):
            parse_pinpoints(text, 336)


@pytest.mark.parametrize("stride", [0, 25])
def test_a_stride_that_does_not_fit_the_tower_is_refused(stride):
    with pytest.raises(ConfigError, match=rf"--mm_spatial_pool_stride is {stride}: give a value from 1 to 24"):
        image_options(ModelArguments(), DataArguments(mm_spatial_pool_stride=stride), ImageSpec(336, 14, MEAN, MEAN))


def test_the_defaults_are_those_of_the_flags():
    found = image_options(ModelArguments(), DataArguments(), ImageSpec(24, 8, MEAN, MEAN))
    assert found == ImageOptions(24, 8, MEAN) and found.newline_position == "grid"
    assert found.anyres_sizes == parse_pinpoints(None, 24)
    assert replace(found, pinpoints=((24, 48),)).anyres_sizes == ((24, 48),)


def test_every_flag_of_images_is_read():
    data = DataArguments(
        image_aspect_ratio="anyres_max_4",
        image_grid_pinpoints="(1x1),(2x2)",
        max_image_pixels=7,
        fast_image_decoding=True,
        video_fps=2,
        frames_upbound=5,
        mm_spatial_pool_stride=3,
        mm_spatial_pool_mode="average",
        mm_newline_position="frame",
        force_sample=True,
    )
    found = image_options(ModelArguments(mm_patch_merge_type="spatial"), data, ImageSpec(24, 8, MEAN, MEAN))
    pinpoints = ((24, 24), (24, 48), (48, 24), (48, 48))
    expected = (24, 8, MEAN, "anyres_max_4", pinpoints, "spatial", 7, True, 2, 5, 3, "average", "frame", True)
    assert found == ImageOptions(*expected) and found.max_tiles == 4


@pytest.mark.parametrize("text", ["(1x1),...,(99999x99999)", "(1x1),...,(6x" + "9" * 5000 + ")"])
def test_a_range_of_more_grids_than_anybody_means_is_refused_at_once(text):
    with pytest.raises(ConfigError, match="with more than 100 tiles in a row or column") as caught:
        parse_pinpoints(text, 336)
    assert len(str(caught.value)) < 400
