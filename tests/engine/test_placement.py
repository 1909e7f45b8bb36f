"""However ranks have a model together, each number of every parameter is somewhere, and counts once."""

import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from llava_ds.engine.expert_parallel import SharedExperts
from llava_ds.engine.pipeline import OwnedByStages
from llava_ds.engine.placement import WHOLE, Placement, Share, cut_dim, placement_of, slice_of
from llava_ds.engine.tensor_parallel import CutMatrices

ROOT = Path(__file__).parents[2]
LAYER, EXPERTS = "language_model.model.layers.0", "mlp.deepspeed_moe.experts.deepspeed_experts"
SHAPES = {
    f"{LAYER}.self_attn.q_proj.weight": (4, 6),
    f"{LAYER}.self_attn.q_proj.bias": (4,),
    f"{LAYER}.self_attn.o_proj.weight": (6, 4),
    f"{LAYER}.norm.weight": (6,),
    **{f"{LAYER}.{EXPERTS}.{expert}.up_proj.weight": (3, 6) for expert in range(4)},
    "projector.weight": (6, 5),
}
# Files that read, write or compare parameters, whoever has them.
NEUTRAL = [f"engine/{name}" for name in ("pieces", "checkpoint_files", "checkpoint_writer", "reshard")]
NEUTRAL += ["engine/non_finite", "extensions/ema/averages", "engine/placement", "export/tensors", "model/loading"]
NEUTRAL += [
    "extensions/replicas/replicas",
    "extensions/preference/reference",
    "checkpoint/training_state",
    "checkpoint/base_weights",
]
AXES = r"engine\.(tensor_parallel|expert_parallel|pipeline)|model\.(stages|upcycling|mixture|families\.upcycled)"


def module_of(shapes: dict[str, tuple[int, ...]]) -> nn.Module:
    """A module whose parameters have these names."""
    model = nn.Module()
    for name, shape in shapes.items():
        *path, last = name.split(".")
        inner = model
        for part in path:
            if not hasattr(inner, part):
                inner.add_module(part, nn.Module())
            inner = getattr(inner, part)
        inner.register_parameter(last, nn.Parameter(torch.zeros(shape)))
    return model


def whole() -> list[tuple[Placement, nn.Module]]:
    return [(WHOLE, module_of(SHAPES))]


def cut() -> list[tuple[Placement, nn.Module]]:
    own = {name: list(shape) for name, shape in SHAPES.items()}
    for name, dim in (("q_proj.weight", 0), ("q_proj.bias", 0), ("o_proj.weight", 1)):
        own[f"{LAYER}.self_attn.{name}"][dim] //= 2
    return [(CutMatrices("tp", 2, index), module_of(own)) for index in range(2)]


def experts() -> list[tuple[Placement, nn.Module]]:
    own = {name: shape for name, shape in SHAPES.items() if not re.search(r"_experts\.[23]\.", name)}
    return [(SharedExperts("ep", 2, index, in_data=True, number=2), module_of(own)) for index in range(2)]


def stages() -> list[tuple[Placement, nn.Module]]:
    owners = {name: min(number // 4, 1) for number, name in enumerate(SHAPES)}
    everything = tuple(Share(name, shape, torch.float32, owner=owners[name]) for name, shape in SHAPES.items())
    of_stage = [{name: SHAPES[name] for name in SHAPES if owners[name] == index} for index in range(2)]
    return [(OwnedByStages("pp", 2, i, everything=everything), module_of(own)) for i, own in enumerate(of_stage)]


@pytest.mark.parametrize("ranks", [whole(), cut(), experts(), stages()], ids=["whole", "cut", "experts", "stages"])
def test_all_ranks_name_the_same_parameters_and_each_number_counts_once(ranks):
    named = [[(s.name, s.shape, s.dtype, s.owner) for s, _ in each.shares(model)] for each, model in ranks]
    assert all(names == named[0] for names in named)
    assert {name: shape for name, shape, _, _ in named[0]} == SHAPES and len(named[0]) == len(SHAPES)
    counts = {name: torch.zeros(math.prod(shape)) for name, shape in SHAPES.items()}
    for placement, model in ranks:
        counted = placement.counted(model)
        for parameter, share in placement.held(model).items():
            if counted is None or parameter in counted:
                begin, end, period = share.slice or (0, 1, 1)
                own = counts[share.name].view(-1, period)[:, begin:end]
                assert own.numel() == parameter.numel()
                own += 1
    assert all(torch.equal(count, torch.ones_like(count)) for count in counts.values())


def test_every_parameter_is_with_its_owner_alone():
    for ranks in (experts(), stages()):
        held = [{share.name for share in placement.held(model).values()} for placement, model in ranks]
        for share, _ in ranks[0][0].shares(ranks[0][1]):
            has = [rank for rank, names in enumerate(held) if share.name in names]
            assert has == ([0, 1] if share.owner is None else [share.owner])


@pytest.mark.parametrize("shape", [(4, 6), (4,), (2, 4, 6)])
def test_the_dimension_of_a_cut_is_seen_from_its_slice(shape):
    for dim, length in enumerate(shape):
        own = [length // 2 if n == dim else of_whole for n, of_whole in enumerate(shape)]
        assert [cut_dim(tuple(own), slice_of(shape, dim, index, 2)) for index in range(2)] == [dim, dim]


def test_a_model_is_whole_until_it_is_placed_and_an_engine_is_asked_for_its_model():
    model, engine = module_of(SHAPES), nn.Module()
    engine.module = model
    assert placement_of(model) is placement_of(engine) is WHOLE
    model.placement = CutMatrices("tp", 2, 1)
    assert placement_of(model) is placement_of(engine) is model.placement


@pytest.mark.parametrize("file", NEUTRAL)
def test_what_reads_and_writes_parameters_knows_no_axis(file):
    path = ROOT / "llava_ds" / f"{file}.py"
    if file.startswith("extensions/") and not path.exists():
        pytest.skip("there is no such extension")
    source = path.read_text(encoding="utf-8")
    assert not re.findall(rf"^\s*(?:from|import) llava_ds\.(?:{AXES})\b.*", source, re.MULTILINE)
