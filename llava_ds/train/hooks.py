"""The work between two optimizer steps: hooks, in a list whose order is the policy.

run/train.py takes Stop, Average, Log, Health, Evaluate, Save: a request to stop is heard first, so that what follows
knows which step is the last; numbers are written before anything judges them; a run that goes back to a checkpoint
neither evaluates nor saves what it gave up.
"""

import time
from dataclasses import dataclass, field

from llava_ds.config.arguments import TrainingArguments
from llava_ds.constants import DataError
from llava_ds.engine.averages import update_averages
from llava_ds.engine.non_finite import settle_skipped_steps
from llava_ds.runtime.ranks import Ranks, print_first
from llava_ds.tracking.peak import peak_flops
from llava_ds.tracking.progress import Progress, RunFacts
from llava_ds.tracking.trackers import called
from llava_ds.train.loss_spikes import LossSpikes
from llava_ds.train.replicas import check_replicas
from llava_ds.train.session import Session
from llava_ds.train.skipped_samples import SkippedSamples
from llava_ds.train.skipped_steps import SkippedSteps
from llava_ds.train.state import StepResult


@dataclass
class StepEnd:
    """The boundary after an optimizer step, handed from hook to hook.

    finished: the run's last step; stops: the run was asked to stop here; read: the results, with numbers, of the steps
    that were read from the device here; problems: reasons why the run has to end; at_checkpoint: the weights are those
    of the last checkpoint; keeps_all: no older checkpoint gives way to the next one; paused: the time since the step is
    not a step's.
    """

    result: StepResult
    finished: bool
    stops: bool = False
    read: list[StepResult] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    at_checkpoint: bool = False
    keeps_all: bool = False
    paused: bool = False
    began: float = field(default_factory=time.perf_counter)

    @property
    def step(self) -> int:
        """The number of the step that is done."""
        return self.result.step

    @property
    def last(self) -> bool:
        """True if nothing comes after this step."""
        return self.finished or self.stops or bool(self.problems)

    def raise_problems(self) -> None:
        """End the run, on every rank, if there are reasons to. Raises DataError."""
        if self.problems:
            raise DataError("\n".join(self.problems))

    def paused_s(self) -> float:
        """Seconds since the step that are not the next step's."""
        return time.perf_counter() - self.began if self.paused else 0.0


class Hook:
    """Something that acts between two steps, on every rank. Collectives are allowed: all ranks call in one order."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.training = session.plan.args.training

    def begin(self) -> None:
        """Act before the first step."""

    def after_step(self, end: StepEnd) -> None:
        """Act after a step."""

    def flush(self) -> None:
        """Write what waits, before an error ends the run."""

    def close(self) -> None:
        """Act after the last step, if training ended as it should. Hooks are closed in the reverse of their order."""


def steps_behind(training: TrainingArguments, ranks: Ranks) -> int:
    """The steps by which the log follows the run between saves.

    On a GPU a step is read when the next one is queued, or the GPU would wait at every reading; but not where what is
    read may take the run back.
    """
    return int(ranks.device.type == "cuda" and training.on_loss_spike != "rewind")


class Stop(Hook):
    """Hears that the run is asked to stop, on all ranks at the same step."""

    def after_step(self, end: StepEnd) -> None:
        ahead_s = self.session.evaluation.ahead_s(end.step)
        end.stops = self.session.state.stops = self.session.stop.agreed(end.result.step_time_s, ahead_s)


class Average(Hook):
    """Brings the moving average of the weights on, with --enable_ema."""

    def after_step(self, end: StepEnd) -> None:
        if self.training.enable_ema:
            update_averages(self.session.engine, self.training.ema_decay)


class Log(Hook):
    """Writes and shows the numbers of the steps, and leaves the report at the end."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        plan, ranks = session.plan, session.ranks
        peak, line = peak_flops(ranks.device, plan.resolved.compute_dtype)
        print_first(line)
        steps, zero = f"{plan.steps.num_steps} steps", f"ZeRO-{plan.resolved.zero_stage}"
        title = f"{called(plan.args)}: {steps}, {zero}, {ranks.world_size} ranks"
        every, late = self.training.logging_steps, steps_behind(self.training, ranks) > 0
        units = session.objective.num_units
        run = RunFacts(title, plan.output_dir, every, plan.resumed_step, plan.flops, peak, units, late)
        self.progress = Progress(run, plan.steps, session.trackers, ranks, session.mesh)

    def after_step(self, end: StepEnd) -> None:
        saves = self.session.saves_at(end.step, end.last)
        evaluates = not end.stops and self.session.evaluation.is_due(end.step, end.finished)
        end.read, rows = self.progress.after_step(end.result, flush=saves or evaluates or end.last)
        monitor = self.session.engine.monitor
        if self.session.ranks.is_first and monitor.enabled and rows:
            # DeepSpeed's own name and axis for the loss, which its engine does not write.
            name, size = "Train/Samples/train_loss", self.session.plan.steps.batch_size
            monitor.write_events([(name, row["loss"], row["step"] * size) for row in rows])

    def flush(self) -> None:
        self.progress.flush()

    def close(self) -> None:
        self.progress.close()
        if self.session.ranks.is_first:
            from llava_ds.tracking.page import report_at_end

            report_at_end(self.session.plan.output_dir)


class Health(Hook):
    """Judges what was logged: broken samples, skipped steps, spikes of the loss, and copies that differ.

    A run may end or go back to its last checkpoint by it.
    """

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        plan, ranks, data = session.plan, session.ranks, session.plan.args.data
        folder, dataset, step = plan.output_dir, plan.steps.dataset, plan.resumed_step
        allowed = 0 if data.on_bad_sample == "stop" else data.max_bad_fraction * dataset.num_records
        before = (step, session.engine.skipped_steps)
        self.skipped = SkippedSamples(folder / "skipped.jsonl", dataset.rejections(), allowed, step, ranks)
        self.skipped_steps = SkippedSteps(folder, plan.steps, self.training.max_skipped_steps, before, ranks)
        self.spikes = LossSpikes(folder, plan.steps, self.training, step, ranks)

    def after_step(self, end: StepEnd) -> None:
        for watch in (self.skipped, self.skipped_steps, self.spikes):
            watch.add(end.read)
        # Not wherever the log was read: where a run goes back may not depend on who looks at it when.
        read_at = end.step - steps_behind(self.training, self.session.ranks)
        regular = end.finished or read_at % self.training.logging_steps == 0
        if self.spikes.found and (regular or self.session.saves_at(end.step, end.last)):
            end.paused = True
            self._meet_spike(end.step)
        check_replicas(
            self.session.model, end.step, self.training.check_divergence_steps, self.session.ranks, self.session.mesh
        )
        # Weights that steps have left as they were, or that were brought back, are in the last checkpoint.
        unchanged = [p for p in (self.skipped_steps.problem, self.spikes.problem) if p is not None]
        end.at_checkpoint = bool(unchanged)
        end.problems += [p for p in (self.skipped.problem, *unchanged) if p is not None]
        # What was saved before steps that change nothing is kept until one changes something.
        end.keeps_all = self.skipped_steps.in_a_row > 0

    def close(self) -> None:
        if self.session.ranks.is_first:
            for watch in (self.skipped, self.skipped_steps, self.spikes):
                watch.log.write([])  # what waits for room on the disk
        if self.session.plan.steps.dataset.is_streamed and not self.session.state.stops:
            from llava_ds.train.data_books import write_data_books

            write_data_books(self.session.plan, self.skipped, self.session.ranks)

    def _meet_spike(self, step: int) -> None:
        """Report a spike, and go back to the last checkpoint if asked to: the samples since then are passed over."""
        session, went_back = self.session, None
        if self.spikes.rewinds:
            session.watchdog.set_phase("save", step)
            settle_skipped_steps(session.engine)
            went_back = session.saver.rewind()
        message = self.spikes.describe()
        if went_back is not None:
            message += f": back to {went_back.name}, and on with the samples after step {step:,}"
        elif self.spikes.rewinds:
            message += ": there is no checkpoint yet to go back to"
        print_first(message)
        self.spikes.settle(went_back and went_back.name)


class Evaluate(Hook):
    """Measures the eval loss and asks the sample questions when that is due."""

    def begin(self) -> None:
        """Make the evaluation that the stop before this start left no time for."""
        state, evaluation = self.session.state, self.session.evaluation
        finished = state.step == self.session.plan.steps.num_steps
        if state.step and evaluation.was_missed(state.step, finished):
            self._run(state.step, finished)
        elif state.step and not finished:  # the step may be the one with which an earlier start was over
            state.is_over = evaluation.is_over()

    def after_step(self, end: StepEnd) -> None:
        if not end.stops and not end.at_checkpoint and self.session.evaluation.is_due(end.step, end.finished):
            end.paused = True
            end.finished = self._run(end.step, end.finished)

    def _run(self, step: int, finished: bool) -> bool:
        """Returns whether the run ends with this step."""
        self.session.watchdog.set_phase("evaluation", step)
        is_last = self.session.evaluation.run(step, finished)
        self.session.state.is_over = is_last and not finished
        return is_last


class Save(Hook):
    """Saves checkpoints, and ends the run when the disk takes none."""

    def after_step(self, end: StepEnd) -> None:
        session, started = self.session, time.perf_counter()
        saves = session.saves_at(end.step, end.last) and not end.at_checkpoint
        if saves:
            end.paused = True
            session.watchdog.set_phase("save", end.step)
            settle_skipped_steps(session.engine)
        if problem := session.saver.after_step(end.step, saves, end.last, keeps_all=end.keeps_all):
            end.problems.append(problem)
        if saves:
            session.stop.saved(time.perf_counter() - started)
