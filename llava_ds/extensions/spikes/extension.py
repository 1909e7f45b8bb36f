"""Loss spikes in a run: acted on only at the regular reads of the log."""

from collections.abc import Iterator

from llava_ds.engine.ds_config.resolve import ResolvedConfig
from llava_ds.engine.ds_config.zero import offload_device
from llava_ds.engine.non_finite import settle_skipped_steps
from llava_ds.extensions.base import Extension, Hook, Phase, StepEnd
from llava_ds.extensions.spikes.loss_spikes import LossSpikes
from llava_ds.runtime.ranks import print_first
from llava_ds.train.hooks import steps_behind
from llava_ds.train.session import Session


class Spikes(Hook):
    """Judges logged losses. A spike may return the run to its last checkpoint, or end it."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        plan, own = session.plan, session.plan.args.own["spikes"]
        self.spikes = LossSpikes(plan.output_dir, plan.steps, own, plan.resumed_step, session.ranks)

    def after_step(self, end: StepEnd) -> None:
        self.spikes.add(end.read)
        # Not at every read of the log: the step to return to must not depend on extra reads.
        read_at = end.step - steps_behind(self.session.plan.args, self.session.ranks)
        regular = end.finished or read_at % self.training.logging_steps == 0
        if self.spikes.found and (regular or self.session.saves_at(end.step, end.last)):
            end.paused = True
            self._meet(end.step)
        if self.spikes.problem is not None:
            end.at_checkpoint = True
            end.problems.append(self.spikes.problem)

    def close(self) -> None:
        if self.session.ranks.is_first:
            self.spikes.log.write([])  # rows still waiting for disk space

    def _meet(self, step: int) -> None:
        """Report a spike, and return to the last checkpoint if requested: the samples since then are skipped."""
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
