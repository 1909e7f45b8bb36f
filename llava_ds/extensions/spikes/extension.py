"""Record every step with a loss far above previous losses, and its samples, in loss_spikes.jsonl.

Spikes are acted on only at the regular reads of the log.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from llava_ds.data.dataset import sample_ids
from llava_ds.data.step_plan import StepPlan
from llava_ds.engine.ds_config.resolve import ResolvedConfig
from llava_ds.engine.ds_config.zero import offload_device
from llava_ds.engine.non_finite import settle_skipped_steps
from llava_ds.extensions.base import Extension, Hook, Phase, StepEnd
from llava_ds.extensions.spikes.flags import Flags
from llava_ds.files.jsonl import RowLog, rows_of
from llava_ds.runtime.ranks import Ranks, broadcast_from_first, print_first
from llava_ds.train.hooks import log_lag_steps
from llava_ds.train.session import Session

FILE = "loss_spikes.jsonl"
LEAST_DEVIATION = 0.01  # minimum deviation, relative to the mean, for losses that hardly differ
MOST_REWINDS = 3  # maximum returns to the same checkpoint before the run ends


class LossSpikes:
    """Judges every loss by the previous --loss_spike_window steps.

    A spike is more than --loss_spike_sigma standard deviations above their mean. Mean and deviation exclude spikes and
    non-finite losses, and judging starts after half a window. A resumed run judges like an uninterrupted one, because
    it reads all losses from the run's files. Source: the rule of OLMo-core's SkipStepOptimizer, applied to the loss.
    """

    def __init__(self, output_dir: Path, plan: StepPlan, flags: Flags, resume_step: int, ranks: Ranks) -> None:
        self.path, self.sigma, self.ranks = output_dir / FILE, flags.loss_spike_sigma, ranks
        self.rewinds = flags.rewinds
        self.found: list[dict] = []  # spikes not recorded yet, equal on every rank
        self._plan = plan
        window = flags.loss_spike_window

        def read() -> tuple[list[tuple[int, float]], list[dict]]:
            steps = [(row["step"], row["loss"]) for row in rows_of(output_dir / "metrics.jsonl")]
            earlier = [(step, loss) for step, loss in steps if step <= resume_step]
            return earlier[-window:], [row for row in rows_of(self.path) if row["step"] <= resume_step]

        losses, earlier = broadcast_from_first(ranks, read)
        self.log = RowLog(self.path, earlier) if ranks.is_first else None
        self._rewound = [row["rewound_to"] for row in earlier if row.get("last") and row.get("rewound_to")]
        known = {row["step"] for row in earlier}
        self._losses: deque[float | None] = deque((None if step in known else loss for step, loss in losses), window)
        self.problem: str | None = None  # the reason to end the run, equal on every rank

    def add(self, results: list) -> None:
        """Judge some steps. results: StepResults with numbers, equal on every rank."""
        for result in results:
            known = [loss for loss in self._losses if loss is not None and math.isfinite(loss)]
            spike = None
            if math.isfinite(result.loss) and len(known) * 2 >= max(self._losses.maxlen, 4):
                mean = statistics.fmean(known)
                deviation = LEAST_DEVIATION * abs(mean)
                if result.loss > mean + self.sigma * deviation:  # else skip the slow exact deviation
                    deviation = max(statistics.pstdev(known, mean), deviation)
                if result.loss > mean + self.sigma * deviation:
                    spike = {"step": result.step, "loss": result.loss, "mean": mean, "deviation": deviation}
                    self.found.append(spike)
            self._losses.append(result.loss if spike is None else None)

    def settle(self, rewound_to: str | None) -> None:
        """Record the detected spikes. rewound_to: the checkpoint that the run returned to, None if it didn't."""
        for row in self.found:
            of_ranks = self._plan.step(row["step"]).of_ranks
            samples = [sample for rank in of_ranks for micro_batch in rank for sample in micro_batch]
            row["samples"] = sample_ids(self._plan.dataset, samples)
            row["rewound_to"], row["last"] = rewound_to, row is self.found[-1]
        if self.ranks.is_first:
            self.log.write(self.found)
        if rewound_to is not None:
            self._rewound.append(rewound_to)
            latest = self._rewound[-MOST_REWINDS:]
            if len(latest) == MOST_REWINDS and len(set(latest)) == 1:
                self.problem = self._too_often(rewound_to)
        self.found = []

    def _too_often(self, checkpoint: str) -> str:
        return (
            f"the run went back to {checkpoint} {MOST_REWINDS} times and met another spike of the loss each time. "
            f"{self.path} has the samples of those steps. {checkpoint} is unchanged: check the data, lower "
            "--learning_rate or set --max_grad_norm (both start a new run), or continue from there with a larger "
            "--loss_spike_sigma and --allow_changed_flags loss_spike_sigma"
        )

    def describe(self) -> str:
        """Describe the detected spikes in a few words."""
        first = self.found[0]
        more = f" and {len(self.found) - 1} more" if len(self.found) > 1 else ""
        return (
            f"the loss of step {first['step']:,}{more} is a spike: {first['loss']:.4f}, where the steps before had "
            f"{first['mean']:.4f} (standard deviation {first['deviation']:.4f})"
        )


class Spikes(Hook):
    """Judges logged losses. A spike may return the run to its last checkpoint, or end it."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        plan, own = session.plan, session.plan.args.own["spikes"]
        self.spikes = LossSpikes(plan.run_folder, plan.steps, own, plan.resumed_step, session.ranks)

    def after_step(self, end: StepEnd) -> None:
        self.spikes.add(end.read)
        # Don't act at every read of the log, because the step to return to must not depend on extra reads.
        read_at = end.step - log_lag_steps(self.session.plan.args, self.session.ranks)
        regular = end.finished or read_at % self.training.logging_steps == 0
        if self.spikes.found and (regular or self.session.saves_at(end.step, end.last)):
            end.paused = True
            self._handle_spikes(end.step)
        if self.spikes.problem is not None:
            end.at_checkpoint = True
            end.problems.append(self.spikes.problem)

    def close(self) -> None:
        if self.session.ranks.is_first:
            self.spikes.log.write([])  # rows still waiting for disk space

    def _handle_spikes(self, step: int) -> None:
        """Report spikes, and return to the last checkpoint if requested. The samples since then are skipped."""
        session, went_back = self.session, None
        if self.spikes.rewinds:
            session.watchdog.set_phase("save", step)
            settle_skipped_steps(session.engine)
            went_back = session.saver.rewind()
        message = self.spikes.describe()
        if went_back is not None:
            message += f": back to {went_back.name}, and on with the samples after step {step:,}"
        elif self.spikes.rewinds:
            message += ": no checkpoint to go back to yet"
        print_first(message)
        self.spikes.settle(went_back and went_back.name)


def check(resolved: ResolvedConfig) -> Iterator[str]:
    """Yield a line for NVMe: DeepSpeed 0.19.8 would continue at rate 0, without the states that stayed in memory."""
    if resolved.args.rewinds and offload_device(resolved.config, "offload_optimizer") == "nvme":
        yield (
            "--on_loss_spike rewind can't go back: DeepSpeed can't restore an optimizer from NVMe. Give "
            'continue, or offload_optimizer to "cpu"'
        )


extension = Extension(check=check, hooks=((Phase.JUDGE, Spikes),))
