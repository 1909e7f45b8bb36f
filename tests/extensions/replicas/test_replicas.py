"""One bit of one parameter on one rank is seen, and said with the rank's and the parameter's name."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llava_ds.constants import DataError
from llava_ds.engine import non_finite
from llava_ds.engine.non_finite import _norm
from llava_ds.engine.placement import Placement
from llava_ds.extensions.replicas import replicas
from llava_ds.extensions.replicas.extension import Compare
from llava_ds.extensions.replicas.replicas import check_replicas, replica_sums
from llava_ds.model.open import loading
from llava_ds.runtime.ranks import Ranks

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
    sums = [replica_sums(other) for other in others]
    monkeypatch.setattr(replicas, "gather", lambda value, ranks: [value, *sums])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_changed_bit_is_found_and_the_rank_named(monkeypatch, dtype):
    as_seen_by_others(monkeypatch, model_of(dtype), with_one_bit_changed(model_of(dtype)))
    with pytest.raises(DataError, match=r"step 20:.*most others'(?s:.*)rank 2: 1 of 4 parameters, 1\.weight"):
        check_replicas(model_of(dtype), 20, 10, RANKS)


def test_a_run_compares_them_at_every_so_many_steps(monkeypatch):
    as_seen_by_others(monkeypatch, model_of(), with_one_bit_changed(model_of()))

    def compare(every: int, step: int, ranks: Ranks = RANKS) -> None:
        args = SimpleNamespace(own={"replicas": SimpleNamespace(check_divergence_steps=every)}, training=None)
        session = SimpleNamespace(model=model_of(), ranks=ranks, plan=SimpleNamespace(args=args))
        Compare(session).after_step(SimpleNamespace(step=step))

    with pytest.raises(DataError, match="step 20"):
        compare(10, 20)
    compare(10, 21)
    compare(0, 20)
    compare(10, 20, dataclasses.replace(RANKS, world_size=1))


def test_copies_pass_and_parts_of_zero_3_are_not_compared(monkeypatch):
    as_seen_by_others(monkeypatch, model_of(), model_of())
    check_replicas(model_of(), 20, 10, RANKS)
    parts = model_of()
    for parameter in parts.parameters():
        parameter.ds_id, parameter.ds_persist = 0, parameter.ndim == 1
    assert set(replica_sums(parts)) == {("0.bias", ()), ("1.bias", ())}


class Divided(Placement):
    """Of the second layer each rank has a slice, or one of its own by another name."""

    def shares(self, model):
        for share, parameter in super().shares(model):
            if share.name == "1.bias":
                share = share._replace(slice=(2 * self.index, 2 * self.index + 2, 4))
            elif share.name == "1.weight":
                share = share._replace(name=f"1.weight.{self.index}", owner=self.index)
            yield share, parameter


def divided(seed: int) -> torch.nn.Module:
    """A model of a rank of two that have the second layer together; the first is everybody's."""
    model = model_of()
    torch.manual_seed(seed)
    torch.nn.init.normal_(model[1].weight)
    torch.nn.init.normal_(model[1].bias)
    model.placement = Divided(size=2, index=seed % 2)
    return model


def test_parts_are_compared_with_the_ranks_that_have_the_same(monkeypatch):
    ranks = Ranks(0, 0, 4, torch.device("cpu"))
    as_seen_by_others(monkeypatch, divided(1), divided(0), divided(1))
    check_replicas(divided(0), 20, 10, ranks)
    as_seen_by_others(monkeypatch, divided(1), divided(0), with_one_bit_changed(divided(1)))
    with pytest.raises(DataError, match=r"\n  rank 3: 1 of 4 parameters, 1\.weight\.1\n"):
        check_replicas(divided(0), 20, 10, ranks)
    as_seen_by_others(monkeypatch, divided(1), divided(2), divided(1))
    with pytest.raises(DataError, match=r"\n  rank 2: 2 of 4 parameters, 1\.weight\.0, 1\.bias\n"):
        check_replicas(divided(0), 20, 10, ranks)


class Converted(TorchDispatchMode):
    """The most numbers that a sum or a norm in another precision takes, which torch copies to it first."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if kwargs.get("dtype", args[0].dtype if args and isinstance(args[0], torch.Tensor) else None) in WIDE:
            self.most = max(self.most, args[0].numel() if args[0].dtype not in WIDE else 0)
        return function(*args, **kwargs)


WIDE = (torch.int64, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_is_copied_whole_to_be_summed(monkeypatch, dtype):
    model = torch.nn.Sequential(torch.nn.Linear(70, 50), torch.nn.Linear(50, 3)).to(dtype)
    whole, norm = replica_sums(model), _norm(list(model.parameters()), "cpu")
    monkeypatch.setattr(loading, "SUM_NUMBERS", 64)
    monkeypatch.setattr(non_finite, "NORM_NUMBERS", 64)
    with Converted() as seen:
        assert replica_sums(model) == whole
        assert torch.isclose(_norm(list(model.parameters()), "cpu"), norm, rtol=1e-12)
    assert seen.most == 64
