"""Marks where a rank first reads what needs the other ranks: under NCCL it waits there, and nothing else shows it."""

import dataclasses
import threading
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from llava_ds.checkpoint.saver import Saver
from llava_ds.data.loader import MicroBatch
from llava_ds.engine.non_finite import SKIPPED, settle_skipped_steps
from llava_ds.engine.placement import on_host
from llava_ds.engine.runner import Direct
from llava_ds.runtime.mesh import Mesh
from llava_ds.runtime.ranks import Ranks
from llava_ds.runtime.stopping import Agreement
from llava_ds.runtime.waiting import QUEUE, waits_for
from llava_ds.tracking.progress import Progress
from llava_ds.train import loop
from llava_ds.train.evaluating import evals
from llava_ds.train.objectives.objective import MicroLoss
from llava_ds.train.state import TrainState

RANKS = Ranks(0, 0, 1, torch.device("cpu"))
READING = ("tolist", "cpu", "to", "__int__", "item", "numpy")


class StopHere(Exception):
    pass


@dataclasses.dataclass
class Objective:
    """Gives one loss, and notes the mark under which it is queued."""

    note: Callable[[], None]
    num_sources: int = 1

    def forward(self, engine, batch):
        self.note()
        return MicroLoss(torch.zeros(()), torch.ones(2, 1, dtype=torch.float64), {})


class Marks:
    """Notes this thread's mark at every reading of a tensor, and wherever it is called."""

    def __init__(self, monkeypatch) -> None:
        self.found: list[str] = []
        for name in READING:
            self._watch(monkeypatch, name)

    def note(self, *_: object, **__: object) -> None:
        self.found.append(waits_for(threading.current_thread()))

    def _watch(self, monkeypatch, name: str) -> None:
        own = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda *given, **more: (self.note(), own(*given, **more))[1])


@pytest.fixture
def marks(monkeypatch) -> Marks:
    for module in (evals, loop):
        monkeypatch.setattr(module, "sum_over", lambda group, values: values)
    return Marks(monkeypatch)


def engine() -> SimpleNamespace:
    return SimpleNamespace(eval=lambda: None, train=lambda: None, device=RANKS.device)


class OneSample(SimpleNamespace):
    """A data set of one record."""

    lengths, sources, num_records, rows = (3,), ("one",), 1, np.array([0])

    def __len__(self) -> int:
        return 1

    def wait_for(self, samples: range) -> None:
        pass


PACKING = SimpleNamespace(lay_out_all=lambda lengths: [[[0]]])
MICRO = MicroBatch(None, (0,), num_tokens=1, num_targets=1, num_pairs=1, num_tiles=0, broken=())


def test_sums_of_weights(marks):
    replicas = pytest.importorskip("llava_ds.extensions.replicas.replicas")
    replicas.replica_sums(torch.nn.Linear(2, 2))
    assert marks.found == ["sums of the weights"]


def test_gathered_weights_and_skipped_steps(marks):
    layer = torch.nn.Linear(2, 2)
    on_host(layer.weight)
    settle_skipped_steps(SimpleNamespace(skipped_steps=0, **{SKIPPED: torch.zeros((), dtype=torch.int64)}))
    assert marks.found == ["a gathered weight", "the count of skipped steps"]


def test_answers_of_the_other_ranks(marks):
    agreement, saver = object.__new__(Agreement), object.__new__(Saver)
    work = SimpleNamespace(wait=marks.note)
    agreement._begun, saver._reduction = (work, np.array([1])), (work, np.array([1]))
    assert agreement.close() == 1 and saver._reduced()
    assert marks.found == ["the other ranks' answer on stopping", "the other ranks' answer on a save"]


def test_the_log_waits_for_the_numbers_of_a_step(marks):
    progress = object.__new__(Progress)
    progress.readings, progress.pending = [object()], []
    progress._end = lambda reading: (marks.note(), (_ for _ in ()).throw(StopHere))
    with pytest.raises(StopHere):
        progress._write(False, True)
    assert marks.found == ["the numbers of a step"]


def test_a_step_is_queued_under_a_mark(marks, monkeypatch):
    def micro_steps(*_):
        marks.note()
        raise StopHere

    monkeypatch.setattr(loop, "micro_steps", micro_steps)
    monkeypatch.setattr(loop, "_on_device", lambda numbers, device: torch.tensor(numbers))
    windows = iter([SimpleNamespace(counts=(1, 1), micro_batches=[], passes=1)])
    started = SimpleNamespace(**vars(engine()), optimizer=SimpleNamespace(param_groups=[]))
    with pytest.raises(StopHere):
        loop.run_steps(Direct(started), windows, TrainState(), 1, None, Mesh.of(RANKS), None)
    assert marks.found == [QUEUE]


def test_an_eval_loss_is_queued_and_then_waited_for(marks, monkeypatch):
    monkeypatch.setattr(evals, "micro_batches", lambda *_: [MICRO])
    evals.eval_loss(Direct(engine()), OneSample(), PACKING, 0, Objective(marks.note), Mesh.of(RANKS))
    assert marks.found[0] == QUEUE and set(marks.found[1:]) == {"the eval loss"}


def test_reference_log_probabilities_are_queued_and_then_waited_for(marks, monkeypatch):
    reference = pytest.importorskip("llava_ds.extensions.preference.reference")
    monkeypatch.setattr(reference, "sum_over", lambda group, values: values)
    started = engine()

    class Engine(SimpleNamespace):
        def __call__(self, batch, head):
            marks.note()

    monkeypatch.setattr(reference, "micro_batches", lambda *_: [MICRO])
    monkeypatch.setattr(reference, "sum_by_sample", lambda values, batch: (torch.zeros(2, dtype=torch.float64), None))
    reference.log_probs(Direct(Engine(**vars(started))), OneSample(), PACKING, 0, started.device, Mesh.of(RANKS))
    assert marks.found[0] == QUEUE and set(marks.found[1:]) == {"the reference log-probabilities"}
    marks.found.clear()
    reference.weights_digest(torch.nn.Linear(2, 2), Mesh.of(RANKS))
    assert marks.found == ["sums of the weights"]
