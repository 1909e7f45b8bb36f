"""However ranks have a model together, each number of every parameter is somewhere, and counts once."""

import re
from pathlib import Path

import pytest
from placements import SHAPES, check_that_each_number_counts_once, module_of
from torch import nn

from llava_ds.engine.placement import WHOLE, Placement, cut_dim, placement_of, slice_of

ROOT = Path(__file__).parents[2]
# Files that read, write or compare parameters, whoever has them.
NEUTRAL = [
    "engine/shards/pieces",
    "engine/shards/checkpoint_writer",
    "checkpoint/checkpoint_files",
    "checkpoint/reshard",
]
NEUTRAL += ["engine/non_finite", "extensions/ema/averages", "engine/placement", "export/tensors", "model/open/loading"]
NEUTRAL += [
    "extensions/replicas/replicas",
    "extensions/preference/reference",
    "checkpoint/training_state",
    "checkpoint/base_weights",
]
AXES = r"extensions\.mixtures"


def whole() -> list[tuple[Placement, nn.Module]]:
    return [(WHOLE, module_of(SHAPES))]


def test_all_ranks_name_the_same_parameters_and_each_number_counts_once():
    check_that_each_number_counts_once(whole())


@pytest.mark.parametrize("shape", [(4, 6), (4,), (2, 4, 6)])
def test_the_dimension_of_a_cut_is_seen_from_its_slice(shape):
    for dim, length in enumerate(shape):
        own = [length // 2 if n == dim else of_whole for n, of_whole in enumerate(shape)]
        assert [cut_dim(tuple(own), slice_of(shape, dim, index, 2)) for index in range(2)] == [dim, dim]


def test_a_model_is_whole_until_it_is_placed_and_an_engine_is_asked_for_its_model():
    model, engine = module_of(SHAPES), nn.Module()
    engine.module = model
    assert placement_of(model) is placement_of(engine) is WHOLE
    model.placement = Placement("tp", 2, 1)
    assert placement_of(model) is placement_of(engine) is model.placement


@pytest.mark.parametrize("file", NEUTRAL)
def test_what_reads_and_writes_parameters_knows_no_axis(file):
    path = ROOT / "llava_ds" / f"{file}.py"
    if file.startswith("extensions/") and not path.exists():
        pytest.skip("there is no such extension")
    source = path.read_text(encoding="utf-8")
    assert not re.findall(rf"^\s*(?:from|import) llava_ds\.(?:{AXES})\b.*", source, re.MULTILINE)
