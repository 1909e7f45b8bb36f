"""One bit of one parameter on one rank is seen, and said with the rank's and the parameter's name."""

import pytest
import torch

from llava_ds.constants import DataError
from llava_ds.runtime.ranks import Ranks
from llava_ds.train import replicas
from llava_ds.train.replicas import check_replicas, replica_sums

RANKS = Ranks(0, 0, 3, torch.device("cpu"))


def model_of(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)).to(dtype)


def with_one_bit_changed(model: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        weight = model[1].weight.view(torch.int16)
        weight[0, 0] ^= 1
    return model


def as_seen_by_others(monkeypatch, *others: torch.nn.Module) -> None:
    sums = [list(replica_sums(other).values()) for other in others]
    monkeypatch.setattr(replicas, "gather", lambda value, ranks: [value, *sums])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_changed_bit_is_found_and_the_rank_named(monkeypatch, dtype):
    as_seen_by_others(monkeypatch, model_of(dtype), with_one_bit_changed(model_of(dtype)))
    with pytest.raises(DataError, match=r"step 20:.*most others'(?s:.*)rank 2: 1 of 4 parameters, 1\.weight"):
        check_replicas(model_of(dtype), 20, 10, RANKS)
    check_replicas(model_of(dtype), 21, 10, RANKS)
    check_replicas(model_of(dtype), 20, 0, RANKS)


def test_copies_pass_and_parts_of_zero_3_are_not_compared(monkeypatch):
    as_seen_by_others(monkeypatch, model_of(), model_of())
    check_replicas(model_of(), 20, 10, RANKS)
    parts = model_of()
    for parameter in parts.parameters():
        parameter.ds_id, parameter.ds_persist = 0, parameter.ndim == 1
    assert set(replica_sums(parts)) == {"0.bias", "1.bias"}
