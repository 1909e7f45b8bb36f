"""Exporting a model that a test has built in this process."""

from pathlib import Path

import torch
import toys

from llava_ds.config.arguments import ModelArguments
from llava_ds.config.bounds import DEFAULT_SHARD_SIZE, parse_size
from llava_ds.engine.construct import build_model
from llava_ds.export.export_plan import ExportPlan
from llava_ds.export.output_folder import write_live_folder
from llava_ds.geometry import ImageOptions
from llava_ds.model.open.model_plan import plan_model
from llava_ds.runtime.ranks import Ranks

RANKS = Ranks(0, 0, 1, torch.device("cpu"))


def export_plan(model, plan, args, image_options, **more) -> ExportPlan:
    return ExportPlan(plan, args, image_options, next(model.parameters()).dtype, 512, **more)


def export(model, plan, args, image_options, folder, form="hf", max_shard_size=DEFAULT_SHARD_SIZE):
    """Write the folder of a live model."""
    folder.mkdir(parents=True, exist_ok=True)
    more = {"form": form, "max_shard_bytes": parse_size(max_shard_size)}
    write_live_folder(export_plan(model, plan, args, image_options, **more), model, folder, RANKS)


def export_toy(folder: Path) -> Path:
    """The exported folder of a random toy."""
    args = ModelArguments(**toys.write_base(folder / "base"))
    plan = plan_model(args, 512)
    model = build_model(plan, args, {"zero_optimization": {"stage": 0}}, torch.float32, 0, RANKS)
    spec = plan.images
    export(model, plan, args, ImageOptions(spec.size, spec.patch_size, spec.mean), folder / "out")
    return folder / "out"
