"""A run that records its hooks' calls, without model, engine or files."""

from pathlib import Path
from types import SimpleNamespace

import torch

from llava_ds.data.loader import Counts
from llava_ds.extensions.base import StepEnd
from llava_ds.runtime.mesh import ALONE
from llava_ds.runtime.ranks import Ranks
from llava_ds.train.session import Session
from llava_ds.train.state import StepResult, TrainState


class FakeWatch:
    """Stands for the logs of bad samples, skipped steps and spikes."""

    def __init__(self, problem: str | None = None, found: tuple = (), rewinds: bool = False) -> None:
        self.problem, self.found, self.rewinds, self.in_a_row, self.settled = problem, found, rewinds, 0, []
        self.log = SimpleNamespace(write=lambda rows: None)

    def add(self, read: list) -> None: ...

    def describe(self) -> str:
        return "a spike"

    def settle(self, rewound_to: str | None) -> None:
        self.settled.append(rewound_to)


class FakeSession:
    """A run of 10 steps that saves every 4, evaluates every 2, and records its hooks' calls."""

    def __init__(self, stops: bool = False, save_strategy: str = "steps") -> None:
        self.done: list[str] = []
        training = SimpleNamespace(save_strategy=save_strategy, save_steps=4, logging_steps=1)
        args = SimpleNamespace(training=training, rewinds=False)
        dataset = SimpleNamespace(is_whole=True)
        self.plan = SimpleNamespace(args=args, steps=SimpleNamespace(num_steps=10, dataset=dataset))
        self.ranks, self.state, self.engine, self.model = Ranks(0, 0, 1, torch.device("cpu")), TrainState(), None, None
        self.runner = SimpleNamespace(engine=None)
        self.mesh = ALONE
        self.stop = SimpleNamespace(agreed=lambda step_s, ahead_s: stops, saved=lambda seconds: None)
        self.watchdog = SimpleNamespace(set_phase=lambda phase, step: None)
        self.evaluation = SimpleNamespace(
            is_due=lambda step, last: last or step % 2 == 0,
            ahead_s=lambda step: 0.0,
            run=self._evaluate,
        )
        self.ends_at: int | None = None  # the step whose evaluation ends the run
        self.saver = SimpleNamespace(after_step=self._save, rewind=self._rewind)

    def _evaluate(self, step: int, last: bool) -> bool:
        self.done.append("evaluate")
        return last or step == self.ends_at

    def saves_at(self, step: int, last: bool) -> bool:
        return Session.saves_at(self, step, last)

    def windows(self) -> None:
        """Nothing takes their place: run_steps is another here."""

    def _save(self, step: int, saves: bool, last: bool, keeps_all: bool) -> None:
        self.done += ["save"] * saves

    def _rewind(self) -> Path:
        self.done.append("rewind")
        return Path("checkpoint-4")


def end_of(step: int) -> StepEnd:
    counts = Counts(4, 9, 9, 1, 9, 1)
    values = {"loss": 1.0, "by_source": None, "grad_norm": None, "skipped_steps": 0, "lr": [], "broken": []}
    result = StepResult(step=step, counts=counts, num_planned=4, data_wait_s=0.0, step_time_s=0.1, **values)
    return StepEnd(result, finished=step == 10)
