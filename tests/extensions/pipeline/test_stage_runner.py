"""The order of a pipeline's micro-batches, and its tied output layer, on one process that is both ends in turn."""

import dataclasses
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from llava_ds.batch import Batch
from llava_ds.constants import ConfigError
from llava_ds.extensions.pipeline import stage_runner
from llava_ds.extensions.pipeline.stage_runner import Pipelined, forward_and_backward
from llava_ds.extensions.pipeline.stages import HIDDEN, Stage, TiedCopy
from llava_ds.train.objectives.objective import SFT, MicroLoss, Wrapped, check_metrics

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


class Model(nn.Module):
    """The first or last stage of two, with the embedding or its copy (4, WIDTH)."""

    def __init__(self, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.stage = Stage(index, 2, None, WIDTH, dtype, tied_rows=4)
        ends, self.language_model = nn.Embedding(4, WIDTH, dtype=dtype), nn.Module()
        self.language_model.get_output_embeddings = self.language_model.get_input_embeddings = lambda: ends
        self.language_model.tied_copy = TiedCopy()

    def forward(self, batch: Micro) -> torch.Tensor:
        return self.language_model.get_input_embeddings()(batch.input_ids)


class TiedEngine(Engine):
    """Sums gradients in fp32, whatever the model's dtype."""

    def __init__(self, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.module = Model(index, dtype)

    def __call__(self, batch: Micro) -> torch.Tensor:
        return self.module(batch)

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        return self.module.stage.dtype, torch.float32


class Alone:
    """Neighbours that send nothing and receive ones."""

    def __init__(self, *_) -> None:
        pass

    def exchange(self, before=None, after=None, wants_before=None, wants_after=None):
        return [None if shape is None else torch.ones(shape) for shape in (wants_before, wants_after)]


def test_a_tied_output_layer_sums_its_gradient_in_the_dtype_of_accumulation(monkeypatch):
    moved = []
    monkeypatch.setattr(stage_runner, "_Neighbours", Alone)
    monkeypatch.setattr(stage_runner, "_move", lambda operation, tensor, *_: moved.append(tensor))
    engine = TiedEngine(1, torch.bfloat16)
    weight = engine.module.language_model.get_output_embeddings().weight
    rates = (256.0, 1.0, 1.0, 1.0)  # in bf16, 256 + 1 is 256
    batches = [Micro(torch.zeros(1, 1, dtype=torch.long)) for _ in rates]
    forward_and_backward(engine, batches, lambda *_: weight.sum(), lambda i, loss: (loss * rates[i], None))
    (gradient,) = moved
    assert gradient.dtype == torch.float32 and gradient.eq(259.0).all() and weight.grad is None
    forward_and_backward(engine, batches, lambda _, batch: batch.extra[HIDDEN].sum(), lambda i, loss: (loss, None))
    assert moved[1].dtype == torch.float32 and not moved[1].any()  # a head without the output layer
    engine = TiedEngine(0, torch.bfloat16)
    monkeypatch.setattr(stage_runner, "_move", lambda operation, tensor, *_: tensor.fill_(259.0))
    forward_and_backward(engine, batches[:2], None, None)
    assert engine.module.language_model.get_input_embeddings().weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("index", (0, 1))
def test_a_tied_output_layer_is_sent_once_for_all_forwards_without_backward(monkeypatch, index):
    moved = []
    monkeypatch.setattr(stage_runner, "_Neighbours", Alone)
    monkeypatch.setattr(stage_runner, "_move", lambda operation, tensor, *_: moved.append(operation))
    engine = TiedEngine(index, torch.float32)
    model, batch = engine.module, Micro(torch.zeros(1, 2, dtype=torch.long))
    runner = Pipelined(engine)

    def forward() -> int:
        runner.forward(engine, batch, lambda *_: torch.ones(()))
        return len(moved)

    assert [forward(), forward()] == [1, 2]  # in training mode: weights may change between any two
    model.eval()
    assert [forward(), forward(), forward()] == [3, 3, 3]
    model.train()
    model.eval()
    assert [forward(), forward()] == [4, 4]


def test_metrics_that_other_stages_do_not_know_are_refused():
    sft, zero = SFT(grad_ranks=1), torch.zeros(())
    check_metrics(Wrapped(sft), [MicroLoss(zero, zero, {})])
    with pytest.raises(ConfigError, match=r"returned the metrics \['load'\], but its metric_names are \[\]"):
        check_metrics(Wrapped(sft), [MicroLoss(zero, zero, {"load": zero})])
