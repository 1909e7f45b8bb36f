"""Ranks that share experts: each number of a parameter counts once, and buffers between ranks have one size."""

import re
from types import SimpleNamespace

import pytest
import torch
from placements import SHAPES, check_owners, check_that_each_number_counts_once, module_of
from torch import nn

from llava_ds.extensions.mixtures.expert_layer import ExpertLayer
from llava_ds.extensions.mixtures.expert_parallel import BufferSize, SharedExperts

WIDTH, TOKENS, MORE = 8, 30, 17


def layer_of(k: int, capacity_factor: float | None) -> ExpertLayer:
    torch.manual_seed(0)
    mixture = SimpleNamespace(num_experts=4, top_k=k, use_residual=False)
    made = ExpertLayer(nn.Linear(WIDTH, WIDTH), WIDTH, mixture, capacity_factor, 2)
    for expert in made.deepspeed_moe.experts.deepspeed_experts:
        expert.reset_parameters()  # experts that differ, so that it matters which are dropped
    return made


@pytest.fixture
def agreed(monkeypatch) -> list[int]:
    """The capacities that were agreed on: another rank's are MORE rows larger."""
    seen = []

    def all_reduce(tensor, op, group):
        assert op == torch.distributed.ReduceOp.MAX and group == "group"
        seen.append(int(tensor.add_(MORE)))

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    return seen


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_rank_sends_as_many_rows_as_the_largest_has_and_drops_what_it_dropped_alone(agreed, k):
    hidden, rows = torch.randn(1, TOKENS, WIDTH), []
    alone, shared = layer_of(k, 0.5), layer_of(k, 0.5)
    BufferSize("group").watch(shared.deepspeed_moe)
    shared.deepspeed_moe.experts.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].shape[2]))
    expected = alone(hidden)
    assert torch.equal(shared(hidden), expected)
    assert rows == agreed == [-(-TOKENS * k // 8) + MORE]
    dropping_none = layer_of(k, None)(hidden)
    assert not torch.allclose(expected, dropping_none)


def test_where_no_token_is_dropped_deepspeed_agrees_by_itself(agreed):
    hidden = torch.randn(1, TOKENS, WIDTH)
    dropping_none, in_eval = layer_of(2, None), layer_of(2, 0.5).eval()
    for layer in (dropping_none, in_eval):
        BufferSize("group").watch(layer.deepspeed_moe)
        layer(hidden)
    assert not agreed


def test_a_deepspeed_that_takes_another_number_is_noticed(agreed, monkeypatch):
    layer, size = layer_of(2, 0.5), BufferSize("group")
    monkeypatch.setattr(size, "_agree", lambda *_: setattr(size, "_rows", 5))
    size.watch(layer.deepspeed_moe)
    with pytest.raises(AssertionError, match="exchanges 8 rows for an expert, not the agreed 5"):
        layer(torch.randn(1, TOKENS, WIDTH))


@pytest.mark.parametrize("k", [1, 2, 3])
def test_fewer_tokens_than_an_expert_takes_in_any_case_are_all_taken(k):
    """A rank without samples has one token, and so has an answer that is being drawn."""
    one = torch.randn(1, 1, WIDTH)
    assert torch.equal(layer_of(k, 0.5)(one), layer_of(k, None)(one))
    assert torch.equal(layer_of(k, 0.5).eval()(one), layer_of(k, None).eval()(one))


def shared() -> list[tuple[SharedExperts, nn.Module]]:
    own = {name: shape for name, shape in SHAPES.items() if not re.search(r"_experts\.[23]\.", name)}
    return [(SharedExperts("ep", 2, index, in_data=True, number=2), module_of(own)) for index in range(2)]


def test_all_ranks_name_the_same_parameters_and_each_number_counts_once():
    check_that_each_number_counts_once(shared())


def test_every_parameter_is_with_its_owner_alone():
    check_owners(shared())
