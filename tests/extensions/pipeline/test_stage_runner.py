"""The order of a pipeline's micro-batches, on one process that is both ends of it in turn."""

import dataclasses
import weakref
from types import SimpleNamespace

import torch

from llava_ds.batch import Batch
from llava_ds.extensions.pipeline import stage_runner
from llava_ds.extensions.pipeline.stage_runner import forward_and_backward
from llava_ds.extensions.pipeline.stages import HIDDEN, Stage

WIDTH = 3
LENGTHS = (5, 2, 7, 4, 6)


@dataclasses.dataclass(frozen=True)
class Micro:
    input_ids: torch.Tensor
    extra: dict = dataclasses.field(default_factory=dict)
    with_extra = Batch.with_extra


class Engine:
    """Counts steps; its module has the last stage of two."""

    def __init__(self) -> None:
        stage = Stage(1, 2, None, WIDTH, torch.float32)
        self.module, self.device = SimpleNamespace(stage=stage), torch.device("cpu")
        self.boundaries, self.steps = [], 0

    def set_gradient_accumulation_boundary(self, is_last: bool) -> None:
        self.boundaries.append(is_last)

    def backward(self, loss: torch.Tensor, scale_wrt_gas: bool) -> None:
        loss.backward()

    def step(self) -> None:
        self.steps += 1


def test_the_last_stage_lets_go_of_a_micro_batch_when_its_backward_is_over(monkeypatch):
    received, sent, alive = [], [], []

    class Neighbours:
        def __init__(self, *_) -> None:
            pass

        def exchange(self, before=None, after=None, wants_before=None, wants_after=None):
            assert after is None
            if before is not None:
                sent.append(before.clone())
            if wants_before is None:
                return None, None
            hidden = torch.full(wants_before, float(len(received) + 1))
            received.append(weakref.ref(hidden))
            return hidden, None

    def forward(engine, batch):
        alive.append(sum(each() is not None for each in received))
        return (batch.extra[HIDDEN] ** 2).sum()

    monkeypatch.setattr(stage_runner, "_Neighbours", Neighbours)
    engine = Engine()
    batches = [Micro(torch.zeros(1, length, dtype=torch.long)) for length in LENGTHS]
    found = forward_and_backward(engine, batches, forward, lambda i, loss: (loss * 10**i, loss.item()))
    assert found == [(i + 1) ** 2 * length * WIDTH for i, length in enumerate(LENGTHS)]
    assert [tuple(each.shape) for each in sent] == [(1, length, WIDTH) for length in LENGTHS]
    assert [each.flatten()[0].item() for each in sent] == [2 * (i + 1) * 10**i for i in range(len(LENGTHS))]
    assert max(alive) <= 2  # its own, and the one before, whose gradient has just been sent
    assert engine.boundaries == [False] * (len(LENGTHS) - 1) + [True] and engine.steps == len(LENGTHS) - 1
