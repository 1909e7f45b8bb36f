"""Images at their own size: sizes and positions are transformers', and bounds of pixels are kept up to the export."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from ready_models import QWEN_PROCESSORS, change_image_settings, write_ready
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
    get_aspect_ratio_preserving_size,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.constants import IMAGE_TOKEN_INDEX, ConfigError, DataError
from llava_ds.extensions.ready.axes import axis_positions, tower_inputs
from llava_ds.extensions.ready.exported_folder import write_image_sizes
from llava_ds.extensions.ready.known_families import family_of
from llava_ds.extensions.ready.ready_tilings import BudgetTiling, CellTiling, FrameCells
from llava_ds.model.open.model_plan import plan_model, read_parts
from llava_ds.tilings import Grid
from llava_ds.videos import FrameChoice


def cells_of(side: int, least: int, most: int, **more) -> CellTiling:
    return CellTiling(side, 2, least, most, "<|image_pad|>", **more)


def test_sizes_are_the_processors():
    rng = np.random.default_rng(0)
    for _ in range(2000):
        size = tuple(int(2 ** rng.uniform(0, 12)) for _ in range(2))
        side = int(rng.choice([16, 28, 32]))
        least = int(rng.integers(1, 300)) * side**2
        tiling = cells_of(side, least, least * int(rng.integers(1, 50)))
        if max(size) > 200 * min(size):
            with pytest.raises(DataError, match="more than 200 times longer than wide"):
                tiling.cut(size)
            continue
        height, width = smart_resize(size[1], size[0], side, tiling.least, tiling.most)
        cut = tiling.cut(size)
        assert cut.steps == ((width, height),)
        assert cut.grid == (width // side, height // side)


def test_sizes_within_a_budget_are_the_processors():
    """Gemma 4's, and the positions of patches, which the worker makes cell by cell."""
    rng = np.random.default_rng(0)
    for _ in range(2000):
        width, height = (int(2 ** rng.uniform(0, 13)) for _ in range(2))
        patch, merge, most = int(rng.choice([8, 14, 16])), int(rng.integers(1, 5)), int(rng.choice([70, 280, 1120]))
        tiling = BudgetTiling(patch * merge, merge, most, "<i>", "<b>", "<e>")
        down, across = get_aspect_ratio_preserving_size(height, width, patch, most * merge**2, merge)
        cut = tiling.cut((width, height))
        assert cut.steps == ((across, down),)
        assert cut.grid == (across // tiling.side, down // tiling.side) and cut.num_tiles <= most
    tiling = BudgetTiling(16, 2, 70, "<i>", "<b>", "<e>")
    found = Gemma4ImageProcessorPil(patch_size=8, pooling_kernel_size=2, max_soft_tokens=70)(
        [Image.new("RGB", size) for size in ((90, 30), (40, 41))], return_tensors="pt"
    )["image_position_ids"]
    cells = [tiling.cut(size).grid for size in ((90, 30), (40, 41))]
    layouts = [SimpleNamespace(cells=each, moments=1, is_video=False, num_tokens=0) for each in cells]
    config = SimpleNamespace(vision_config=SimpleNamespace(pooling_kernel_size=2))
    patches = torch.zeros(4 * sum(across * down for across, down in cells), 3)
    own = family_of("gemma4").outer_inputs(config, patches, layouts, torch.zeros(1, 1) > 0)["image_position_ids"]
    assert torch.equal(own, found[:, : own.shape[1]]) and (found[:, own.shape[1] :] == -1).all()
    rows, columns = tower_inputs([Grid(*cells[0])], tiling)["position_ids"].T
    across, down = cells[0]
    assert rows.tolist() == [2 * (i // (4 * across)) + i % 4 // 2 for i in range(4 * across * down)]
    assert columns.tolist() == [2 * (i // 4 % across) + i % 2 for i in range(4 * across * down)]


@pytest.mark.parametrize("in_all", [False, True])
def test_sizes_of_videos_are_the_processors(in_all):
    """Also where its settings bound the pixels of a frame further."""
    rng = np.random.default_rng(0)
    for _ in range(2000):
        size, side = tuple(int(2 ** rng.uniform(1, 11)) for _ in range(2)), int(rng.choice([16, 28, 32]))
        frames, least = int(rng.integers(2, 40)), int(rng.integers(1, 50)) * side**2
        most, cap = least * int(rng.integers(1, 50)), int(rng.choice([0, 16])) if in_all else None
        tiling = FrameCells(side, 2, least, most, in_all, "<|video_pad|>", cap or None)
        upright = (max(side, size[0]), max(side, size[1])) if in_all else size
        if max(upright) > 100 * min(upright) or max(size) > 100 * min(size):
            continue
        cut = tiling.cut(size, frames)
        if not in_all:
            assert cut.steps == (smart_resize(size[1], size[0], side, least, most)[::-1],)
            continue
        theirs = SimpleNamespace(
            size={"shortest_edge": least, "longest_edge": most}, patch_size=side // 2, merge_size=2,
            temporal_patch_size=2, cap_pixels_per_frame=bool(cap), max_video_tokens=cap,
        )  # fmt: skip
        patches = Qwen3VLVideoProcessor.get_num_of_video_patches(theirs, frames, size[1], size[0])
        assert 4 * cut.num_tiles * -(-frames // 2) == patches


@pytest.mark.parametrize("family", QWEN_PROCESSORS)
def test_positions_are_those_of_transformers(family, tmp_path):
    """Of samples with none to three images and videos; those of a sample that is cut are the first ones."""
    write_ready(tmp_path, family)
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(tmp_path)).model
    has_seconds = family == "qwen2_5_vl"
    per_second = np.float32(model.config.vision_config.tokens_per_second if has_seconds else 1)
    rng = np.random.default_rng(0)
    for _ in range(30):
        parts = [torch.ones(rng.integers(1, 9), dtype=torch.int64)]
        grids, types, rows, seconds = [], [torch.zeros(len(parts[0]))], {1: [], 2: []}, []
        for _ in range(rng.integers(0, 4)):
            across, down, moments = (int(n) for n in rng.integers(1, 7, 3))
            kind = int(rng.integers(1, 3))
            moments = 1 if kind == 1 else moments
            rows[kind].append((moments, 2 * down, 2 * across))
            seconds += [float(rng.uniform(0.1, 3))] * (kind == 2)
            times = per_second * np.float32(seconds[-1]) if has_seconds and kind == 2 else 1
            apart = moments if "qwen3" in family else 1
            grids += [Grid(across, down, moments // apart, float(times))] * apart
            for _ in range(apart):
                text = torch.ones(rng.integers(1, 9), dtype=torch.int64)
                features = torch.full((across * down * moments // apart,), IMAGE_TOKEN_INDEX)
                parts += [features, text]
                types += [torch.full((len(features),), kind), torch.zeros(len(text))]
        ids = torch.cat(parts)
        found = axis_positions(ids, grids)
        given = {"second_per_grid_ts": torch.tensor(seconds)} if has_seconds and seconds else {}
        images, videos = (torch.tensor(rows[kind]).reshape(-1, 3).long() for kind in (1, 2))
        expected, deltas = model.get_rope_index(
            ids[None],
            mm_token_type_ids=torch.cat(types).int()[None],
            image_grid_thw=images,
            video_grid_thw=videos,
            **given,
        )
        assert torch.equal(found, expected[:, 0])
        assert found.max() + 1 - len(ids) == deltas[0, 0]
        cut = int(rng.integers(1, len(ids) + 1))
        assert torch.equal(axis_positions(ids[:cut], grids), found[:, :cut])


def test_a_tower_is_told_of_every_image_and_window():
    inputs = tower_inputs([Grid(3, 1), Grid(2, 4)], cells_of(16, 256, 2560, window=2, table=6))
    assert inputs["cu_seqlens"].tolist() == [0, 12, 44]
    assert inputs["max_seqlen"] == 32
    assert inputs["cu_window_seqlens"].tolist() == [0, 8, 12, 28, 44]
    assert inputs["max_window_seqlen"] == 16
    assert sorted(inputs["window_index"].tolist()) == list(range(11))
    assert [len(inputs[name]) for name in ("position_ids", "interp_indices", "interp_weights")] == [44] * 3
    assert torch.allclose(inputs["interp_weights"].sum(1), torch.ones(44))
    video = tower_inputs([Grid(2, 4, 3)], cells_of(16, 256, 2560, window=2, table=6))
    moments = tower_inputs([Grid(2, 4)] * 3, cells_of(16, 256, 2560, window=2, table=6))
    assert video["cu_seqlens"].tolist() == [0, 32, 64, 96]
    assert all(np.array_equal(video[name], moments[name]) for name in video)


def with_pixels(folder, **flags):
    model = ModelArguments(model_name_or_path=str(folder), version="processor")
    args = Arguments(model, DataArguments(), TrainingArguments(), frozenset(flags)).replaced(**flags)
    return plan_model(args.model, 512), args


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "smolvlm", "internvl", "gemma4"])
@pytest.mark.parametrize("forced", [False, True])
def test_bounds_of_pixels_are_kept_up_to_the_exports_files(tmp_path, family, forced):
    """And so is the choice of a video's frames."""
    write_ready(tmp_path, family)
    flags = {"video_fps": 3, "frames_upbound": 6, "force_sample": forced}
    if family in QWEN_PROCESSORS:
        flags |= {"min_pixels": 1024, "max_pixels": 2048, "video_min_pixels": 1280, "video_max_pixels": 4096}
    plan, args = with_pixels(tmp_path, **flags)
    options = plan.tower.image_options(args)
    if family in QWEN_PROCESSORS:
        assert (options.tiling.least, options.tiling.most) == (1024, 2048)
        assert (options.video.frame.least, options.video.frame.most) == (1280, 4096)
        most = options.tiling.cut((400, 400)).num_tiles
        assert most <= 2048 // 16**2 < plan.tower.tiles.tiling.cut((400, 400)).num_tiles
        change_image_settings(tmp_path, max_pixels=4096)  # as older folders have it
    written = tmp_path / "written"
    written.mkdir()
    write_image_sizes(SimpleNamespace(model=plan, image_options=options, source_folder=tmp_path), written)
    for file in tmp_path.iterdir():
        if file.is_file() and not (written / file.name).exists():
            (written / file.name).write_bytes(file.read_bytes())
    tower = read_parts(ModelArguments(model_name_or_path=str(written))).tower
    again = tower.image_options(Arguments(args.model, DataArguments(), TrainingArguments(), frozenset()))
    assert (again.tiling, again.video) == (options.tiling, options.video)
    forced = forced and family != "smolvlm"  # whose settings have no word for it
    assert (again.frames_upbound, again.force_sample) == (6, forced)
    assert again.video_fps == (1 if forced else 3)
    if family in QWEN_PROCESSORS:
        whole = json.loads((written / "processor_config.json").read_text())["image_processor"]
        assert whole["size"] == {"shortest_edge": 1024, "longest_edge": 2048}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"max_pixels": 255},
            "--max_pixels 255: an image would have 1024 to 255 pixels: give --max_pixels of at least",
        ),
        ({"min_pixels": 99999}, "--min_pixels 99999: an image would have 99999 to 16384 pixels"),
        ({"video_max_pixels": 255}, "--video_max_pixels 255: a frame of a video would have 1024 to 255 pixels"),
    ],
)
def test_impossible_bounds_are_refused(tmp_path, flags, message):
    write_ready(tmp_path, "qwen2_vl")
    plan, args = with_pixels(tmp_path, **flags)
    with pytest.raises(ConfigError, match=message):
        plan.tower.image_options(args)


def test_frames_are_chosen_by_flags_that_are_given_and_else_by_the_folder(tmp_path):
    """Frames of a second replace a fixed number of frames."""
    write_ready(tmp_path, "gemma4")
    for flags, choice in (
        ({}, FrameChoice(1, 6, True)),
        ({"video_fps": 2}, FrameChoice(2, 32, False)),
        ({"frames_upbound": 3}, FrameChoice(1, 3, True)),
    ):
        plan, args = with_pixels(tmp_path, **flags)
        assert plan.tower.image_options(args).frame_choice == choice


def test_bounds_are_for_models_whose_images_keep_their_size(tmp_path):
    write_ready(tmp_path, "smolvlm")
    plan, args = with_pixels(tmp_path, video_max_pixels=4096)
    with pytest.raises(ConfigError, match="--video_max_pixels 4096: this model's processor alone decides"):
        plan.tower.image_options(args)
    plan, args = with_pixels(tmp_path, max_pixels=4096)
    with pytest.raises(ConfigError, match="--max_pixels 4096: this model's processor alone decides"):
        plan.tower.image_options(args)
