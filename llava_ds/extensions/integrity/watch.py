"""Checksums and counts of one rank, taken around the calls of its engine (DeepSpeed 0.19.8)."""

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator

import torch

from llava_ds.data.loader import Window
from llava_ds.extensions.integrity.checksums import Snapshot, snapshot
from llava_ds.extensions.integrity.judge import Report
from llava_ds.extensions.integrity.planned import PlannedBatches
from llava_ds.extensions.integrity.states import States
from llava_ds.runtime.mesh import Mesh

EARLIER = 4  # earlier steps whose optimizer states are compared with the current one's, to find stale shards


class Watch:
    """Watches one rank. counts: its Report of the step, scalars; details: snapshots, and the rows that changed.

    every: steps between checks of the states. Wraps methods of the engine.
    """

    def __init__(self, engine, every: int, mesh: Mesh) -> None:
        self.engine, self.every, self.mesh, self.step = engine, every, mesh, 0
        self.states = States(engine, mesh.dp_rank)
        # The ranks hold copies of the same weights.
        self.has_copies = not (self.mesh.places or self.mesh.in_data or self.states.shards)
        self.marks: list[torch.cuda.Event] | None = None
        self.forget()
        self.restart()
        engine.backward = _around(engine.backward, self._before_backward, self._after_backward)
        engine.step = _around(engine.step, self._before_step, self._after_step)
        engine.load_checkpoint = _around(engine.load_checkpoint, lambda: None, self.forget)
        if self.engine.device.type == "cuda":
            engine.forward = _around(engine.forward, self._mark, self._mark)

    def forget(self) -> None:
        """Drop the sums of states that a checkpoint replaced."""
        self.kept: dict[str, Snapshot] = {}
        self.gradients: Snapshot | None = None
        self.earlier: deque[list[torch.Tensor]] = deque(maxlen=EARLIER)

    def restart(self) -> None:
        """Begin the counts of a step."""
        self.counts = dict.fromkeys(Report._fields, self._number(0))
        self.details: list[tuple[Snapshot, torch.Tensor]] = []

    def _number(self, value: int) -> torch.Tensor:
        return torch.full((), value, dtype=torch.int64, device=self.engine.device)

    def windows(self, done: int, plain: Iterator[Window], planned: PlannedBatches | None) -> Iterator[Window]:
        """Pass the windows on, compared with the plan. done: steps that are over."""
        self.step = done
        self.forget()  # the warm-up's gradients
        self.restart()
        self.keep()
        while True:
            began = time.process_time()
            if (window := next(plain, None)) is None:
                return
            self.step += 1
            if planned is not None:
                self.counts["twice"], self.counts["missed"] = planned.check(window)
            self.counts["work"] = self._number(window.counts.tokens)
            spent = 0 if not self.marks else sum(a.elapsed_time(b) for a, b in zip(self.marks[::2], self.marks[1::2]))
            self.counts["spent_us"] = self._number(int(1000 * spent))  # on a GPU, the previous step's forward passes
            self.began, self.marks = began, []
            yield window

    def keep(self) -> None:
        """Keep the sums of the states if the next step is checked."""
        if (self.step + 1) % self.every == 0 or self.step % self.every == 0:
            kept = {"weight": snapshot(self.states.weights()), "state": snapshot(self.states.optimizer_states())}
            self.kept = kept
            # Shards of weights may stay the same for a while: a small rate changes few values in bfloat16.
            self.earlier.append([kept[kind].values for kind in ("state", "weight")[: 1 + self.has_copies]])

    def _compare(self, kind: str, kept: Snapshot | None) -> None:
        if kept is not None and kept.groups:
            changed = kept.changed()
            self.counts[kind] = self.counts[kind] + changed.sum()
            self.details.append((kept, changed))

    def _mark(self) -> None:
        if self.marks is not None:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()

    def _before_backward(self) -> None:
        self._compare("gradient", self.gradients)
        self.gradients = None

    def _after_backward(self) -> None:
        if self.step % self.every == 0:
            self.gradients = snapshot(self.states.gradients())

    def _before_step(self) -> None:
        self.updates = self.engine.is_gradient_accumulation_boundary()
        if not self.updates:
            return
        if self.engine.device.type == "cpu":
            self.counts["spent_us"] = self._number(int(1e6 * (time.process_time() - self.began)))
        self._compare("gradient", self.gradients)
        if self.step % self.every == 0:
            for kind, kept in self.kept.items():
                self._compare(kind, kept)

    def _after_step(self) -> None:
        if not self.updates:
            return
        before, gradients = list(self.earlier), self.gradients
        self.gradients = None
        self.keep()
        if self.step % self.every or not before or gradients is None:
            return
        counts, now = self.counts, self.earlier[-1]
        pairs = [pair for then in before for pair in zip(now, then)]
        same = [(a == b).all() for a, b in pairs if a.shape == b.shape and len(a)]
        if same:
            counts["stale"] = counts["stale"] + (torch.stack(same).any() & (gradients.values != 0).any())
        counts["behind"] = counts["behind"] + self.states.behind()
        if self.has_copies:
            weights, own = self.kept["weight"], self.mesh.dp_rank
            counts["own"], counts["whole"] = weights.total(own), weights.total()
            counts["copies"] = weights.total(of_all=True) - counts["whole"]


def _around(method: Callable, before: Callable[[], None], after: Callable[[], None]) -> Callable:
    @functools.wraps(method)
    def wrapped(*args, **kwargs):
        before()
        result = method(*args, **kwargs)
        after()
        return result

    return wrapped
