"""The trial before the first step runs the micro-batch of most tokens, and the one of most work if it is another."""

from types import SimpleNamespace

import pytest
import torch

from llava_ds.engine.warm_up import LargestMicroBatch, warm_up


@pytest.mark.parametrize("other", [None, "of most work"])
def test_both_are_run_and_their_gradients_discarded(other):
    calls = []
    optimizer = SimpleNamespace(zero_grad=lambda: calls.append("cleared"))
    engine = SimpleNamespace(
        device=torch.device("cpu"), optimizer=optimizer, train=lambda: None, zero_grad=lambda: None
    )
    runner = SimpleNamespace(engine=engine, warm_up=lambda batch, forward, accumulates: calls.append(batch))
    warm_up(runner, LargestMicroBatch("of most tokens", [1], accumulates=False, most_worked=other))
    assert calls == ["of most tokens", *([other] if other else []), "cleared"]
