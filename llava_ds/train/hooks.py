"""The work between two optimizer steps: core hooks and extension hooks, ordered by phase."""

import time

from llava_ds.config.arguments import Arguments
from llava_ds.engine.non_finite import settle_skipped_steps
from llava_ds.extensions.base import Hook, Phase, StepEnd
from llava_ds.runtime.ranks import Ranks, print_details
from llava_ds.tracking.peak import peak_flops
from llava_ds.tracking.progress import Progress, RunFacts
from llava_ds.tracking.skipped import SkippedSamples, SkippedSteps
from llava_ds.tracking.trackers import called
from llava_ds.train.session import Session


def log_lag_steps(args: Arguments, ranks: Ranks) -> int:
    """Return how many steps the log lags behind the run between saves: 1 on a GPU, else 0.

    On a GPU, a step's numbers are read after the next step is queued, so that the GPU does not idle. The lag is 0 if
    an extension may rewind the run because of these numbers.
    """
    return int(ranks.device.type == "cuda" and not args.rewinds)


class Stop(Hook):
    """Stops all ranks at the same step after a stop request."""

    def after_step(self, end: StepEnd) -> None:
        evaluation = self.session.evaluation
        ahead_s = 0.0 if evaluation is None else evaluation.ahead_s(end.step)
        end.stops = self.session.state.stops = self.session.stop.agreed(end.result.step_time_s, ahead_s)


class Log(Hook):
    """Logs and prints the numbers of each step, and writes the report at the end."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        plan, ranks = session.plan, session.ranks
        peak, line = peak_flops(ranks.device, plan.resolved.compute_dtype)
        print_details(line)
        steps, zero = f"{plan.steps.num_steps} steps", f"ZeRO-{plan.resolved.zero_stage}"
        title = f"{called(plan.args)}: {steps}, {zero}, {ranks.world_size} ranks"
        every, late = self.training.logging_steps, log_lag_steps(plan.args, ranks) > 0
        units, titles = session.objective.num_units, (title, plan.output_dir.name)
        run = RunFacts(*titles, plan.run_folder, every, plan.resumed_step, plan.flops, peak, units, late)
        self.progress = Progress(run, plan.steps, session.trackers, ranks, session.mesh)

    def after_step(self, end: StepEnd) -> None:
        saves = self.session.saves_at(end.step, end.last)
        evaluation = self.session.evaluation
        evaluates = evaluation is not None and not end.stops and evaluation.is_due(end.step, end.finished)
        end.read, rows = self.progress.after_step(end.result, flush=saves or evaluates or end.last)
        monitor = self.session.engine.monitor
        if self.session.ranks.is_first and monitor.enabled and rows:
            # DeepSpeed's engine does not log the loss here, so write it under DeepSpeed's name, over samples.
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
    """Ends the run after too many broken samples or skipped steps."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        plan, ranks, data = session.plan, session.ranks, session.plan.args.data
        folder, dataset, step = plan.run_folder, plan.steps.dataset, plan.resumed_step
        allowed = 0 if data.on_bad_sample == "stop" else data.max_bad_fraction * dataset.num_records
        before = (step, session.engine.skipped_steps)
        self.skipped = SkippedSamples(folder / "skipped.jsonl", dataset.rejections(), allowed, step, ranks)
        self.skipped_steps = SkippedSteps(folder, plan.steps, self.training.max_skipped_steps, before, ranks)

    def after_step(self, end: StepEnd) -> None:
        for watch in (self.skipped, self.skipped_steps):
            watch.add(end.read)
            if watch.problem is not None:
                end.problems.append(watch.problem)
        # After too many skipped steps, don't save and don't evaluate: these steps changed no weights.
        end.at_checkpoint = self.skipped_steps.problem is not None
        # Keep older checkpoints until a step changes the weights again.
        end.keeps_all = self.skipped_steps.in_a_row > 0

    def close(self) -> None:
        if self.session.ranks.is_first:
            for watch in (self.skipped, self.skipped_steps):
                watch.log.write([])  # write lines held back while the disk was full


class Save(Hook):
    """Saves checkpoints, and ends the run if the disk is full."""

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


HOOKS = ((Phase.STOP, Stop), (Phase.LOG, Log), (Phase.JUDGE, Health), (Phase.SAVE, Save))


def make_hooks(session: Session) -> list[Hook]:
    """Make the hooks of a run, ordered by phase; within a phase, core hooks come first."""
    own = list(HOOKS)
    if session.evaluation is not None:
        from llava_ds.train.evaluating.evals import Evaluate

        own.append((Phase.EVALUATE, Evaluate))
    kinds = sorted([*own, *session.plan.active.hooks], key=lambda pair: pair[0])
    return [kind(session) for _, kind in kinds]
