"""The exchange around attention over fake CUDA tensors: with a group of four that is not there, nothing waits."""

import dataclasses
import itertools

import pytest
import torch
import toys
from fake_gpu import gpu
from fake_models import arguments, backward, built, sample, tower_plan
from torch.testing._internal.distributed.fake_pg import FakeStore

from llava_ds.data.collate import collate
from llava_ds.engine.activation_checkpointing import checkpoint_layers
from llava_ds.model.heads import SummedLoss

cutting = pytest.importorskip("llava_ds.extensions.sequence_parallel.cut")
sharing = pytest.importorskip("llava_ds.extensions.sequence_parallel.shared_tokens")

pytestmark = pytest.mark.cuda

RANKS = 4


@pytest.fixture
def group():
    """A group of ranks of which this one is alone: collectives return at once, with whatever was there."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=RANKS)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


FAMILIES = ("llama", "qwen2_5", "mixtral")
CHANGES = ("plain", "recomputed", "tiled")


@pytest.mark.parametrize(
    ("family", "change"), sorted({*itertools.product(FAMILIES, CHANGES)} - {("mixtral", "tiled")})
)  # a mixture has no MLP to tile
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), RANKS - 1])
def test_forward_and_backward_of_a_part(group, rank, family, change):
    options = toys.image_options()
    args, text = arguments(), toys.language_model_config(family)
    samples = [sample(options, 9, [("image", ((40, 30),))]), sample(options, 30), sample(options, 14)]
    whole = collate(samples, options)
    layouts = [layout for one in samples for _, layout in one.media]
    part, tiles = cutting.cut(whole, options, layouts, rank, RANKS)
    pixels = whole.pixel_values[tiles] if tiles else torch.zeros_like(whole.pixel_values[:1])
    part = dataclasses.replace(part, pixel_values=pixels)
    with gpu() as rules:
        with rules.building():
            model = built(text, tower_plan("clip", args), args, short=False)
            sharing.share_tokens(model, group)
            if change == "recomputed":
                checkpoint_layers(model.language_model)
            if change == "tiled":
                tiles = pytest.importorskip("llava_ds.extensions.mlp_tiles.extension")
                tiles.tile_mlps(model.language_model, 5)
        batch = part.pin_memory().to(torch.device("cuda"))
        loss, by_source = model(batch, SummedLoss(1))
        assert (loss.device.type, loss.dtype, by_source.dtype) == ("cuda", torch.float32, torch.float64)
        backward(model, loss)
        assert not rules.waits
