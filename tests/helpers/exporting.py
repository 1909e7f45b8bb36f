"""Exporting a model that a test has built in this process."""

import torch

from llava_ds.export.plan import Finished
from llava_ds.export.safetensors_shards import DEFAULT_SHARD_SIZE, parse_size
from llava_ds.export.write import export_live
from llava_ds.runtime.ranks import Ranks

RANKS = Ranks(0, 0, 1, torch.device("cpu"))


def finished(model, plan, args, image_options, **more) -> Finished:
    return Finished(plan, args, image_options, next(model.parameters()).dtype, 512, **more)


def export(model, plan, args, image_options, folder, form="hf", max_shard_size=DEFAULT_SHARD_SIZE):
    """Write the folder of a live model."""
    folder.mkdir(parents=True, exist_ok=True)
    export_live(finished(model, plan, args, image_options), model, form, folder, parse_size(max_shard_size), RANKS)
