"""What happens between two optimizer steps."""

import time

from torch import nn

from llava_ds.config.arguments import TrainingArguments
from llava_ds.constants import DataError
from llava_ds.engine.non_finite import settle_skipped_steps
from llava_ds.runtime.ranks import Ranks, print_first
from llava_ds.runtime.stopping import Stopping
from llava_ds.runtime.watchdog import Watchdog
from llava_ds.train.evals import Evaluation
from llava_ds.train.loop import StepResult, TrainState
from llava_ds.train.replicas import check_replicas


class Boundary:
    """Stopping, logging, going back, checking, evaluating and saving, in this order, on every rank after every step."""

    def __init__(
        self,
        engine,
        model: nn.Module,
        state: TrainState,
        num_steps: int,
        training: TrainingArguments,
        stop: Stopping,
        watchdog: Watchdog,
        progress,
        evaluation: Evaluation,
        saver,
        ranks: Ranks,
    ) -> None:
        """progress: of llava_ds.report; saver: of llava_ds.checkpoint."""
        self.engine, self.model, self.state, self.num_steps, self.ranks = engine, model, state, num_steps, ranks
        self.save_steps = training.save_steps if training.save_strategy != "no" else None
        self.check_divergence_steps = training.check_divergence_steps
        self.stop, self.watchdog, self.progress, self.evaluation = stop, watchdog, progress, evaluation
        self.skipped, self.skipped_steps, self.spikes = progress.skipped, progress.skipped_steps, progress.spikes
        self.saver, self.logging_steps, self._evaluation_s = saver, training.logging_steps, 0.0

    def begin(self) -> None:
        """Make the evaluation that the stop before this start left no time for. All ranks call it together."""
        step = self.state.step
        if step and self.evaluation.was_missed(step, step == self.num_steps):
            self._evaluate(step, step == self.num_steps)
        self.watchdog.enters("step", step + 1)

    def after_step(self, result: StepResult) -> float:
        """What the loop calls. Returns the seconds that are not the step's.

        Raises DataError, on every rank, where the run can't go on: too many broken samples or skipped steps, copies
        that differ between ranks, a disk that takes no checkpoint.
        """
        started, step = time.perf_counter(), result.step
        finished = step == self.num_steps
        self.state.stops = self.stop.agreed(result.step_time_s, self._evaluation_ahead_s(step))
        evaluates = not self.state.stops and self.evaluation.is_due(step, finished)
        last = finished or self.state.stops
        saves = self.save_steps is not None and (last or step % self.save_steps == 0)
        self.progress.after_step(result, flush=saves or evaluates)
        # Not wherever the log was read: where a run goes back may not depend on who looks at it when.
        rewinds = bool(self.spikes.found) and (saves or finished or step % self.logging_steps == 0)
        if rewinds:
            self._meet_spike(step)
        check_replicas(self.model, step, self.check_divergence_steps, self.ranks)
        # Weights that steps have left as they were, or that were brought back, are in the last checkpoint.
        ends = [p for p in (self.skipped_steps.problem, self.spikes.problem) if p is not None]
        last = last or bool(ends) or self.skipped.problem is not None
        saves = (saves or (last and self.save_steps is not None)) and not ends
        if evaluates and not ends:
            self._evaluate(step, finished)
        # What was saved before steps that change nothing is kept until one changes something.
        failed = self._save(step, saves, last, keeps_all=self.skipped_steps.in_a_row > 0)
        if problems := [p for p in (self.skipped.problem, *ends, failed) if p is not None]:
            raise DataError("\n".join(problems))
        self.watchdog.enters("step", step + 1)
        return time.perf_counter() - started if saves or evaluates or rewinds else 0.0

    def _save(self, step: int, saves: bool, last: bool, keeps_all: bool) -> str | None:
        """Let the saver do what is due. Returns why the run has to end, if it has to."""
        started = time.perf_counter()
        if saves:
            self.watchdog.enters("save", step)
            settle_skipped_steps(self.engine)
        failed = self.saver.after_step(step, saves, last, keeps_all=keeps_all)
        if saves:
            self.stop.saved(time.perf_counter() - started)
        return failed

    def _evaluate(self, step: int, finished: bool) -> None:
        started = time.perf_counter()
        self.watchdog.enters("evaluation", step)
        self.evaluation.run(step, finished)
        self._evaluation_s = time.perf_counter() - started

    def _evaluation_ahead_s(self, step: int) -> float:
        """Seconds of an evaluation that would come before the next chance to stop."""
        due = any(self.evaluation.is_due(at, at == self.num_steps) for at in (step, step + 1))
        return self._evaluation_s if due else 0.0

    def _meet_spike(self, step: int) -> None:
        """Say it, and go back to the last checkpoint where that is asked for: what came since then is passed over."""
        went_back = None
        if self.spikes.rewinds:
            self.watchdog.enters("save", step)
            settle_skipped_steps(self.engine)
            went_back = self.saver.rewind()
        what = self.spikes.describe()
        if went_back is not None:
            what += f": back to {went_back.name}, and on with the samples after step {step:,}"
        elif self.spikes.rewinds:
            what += ": there is no checkpoint yet to go back to"
        print_first(what)
        self.spikes.settle(went_back and went_back.name)
