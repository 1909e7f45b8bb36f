"""The checks in a run: checksums around every optimizer step, and one small collective after it."""

from collections import deque
from collections.abc import Iterator

import torch

from llava_ds.data.loader import Window
from llava_ds.engine.ds_config.resolve import ResolvedConfig
from llava_ds.engine.ds_config.zero import offload_device
from llava_ds.extensions.base import Extension, Hook, Phase, SessionPart, StepEnd
from llava_ds.extensions.integrity.judge import Report, Speeds, faults, message
from llava_ds.extensions.integrity.planned import PlannedBatches
from llava_ds.extensions.integrity.watch import Watch
from llava_ds.runtime.ranks import gather, print_first
from llava_ds.runtime.waiting import waiting
from llava_ds.train.hooks import log_lag_steps


class Integrity(SessionPart):
    """Watches the engine, and the batches if their samples are known before the run."""

    def started(self, runner) -> None:
        """See SessionPart.started."""
        self.watch = Watch(runner.engine, self.plan.args.own["integrity"].check_integrity_steps, self.mesh)

    def windows(self, engine, done: int, plain: Iterator[Window]) -> Iterator[Window]:
        """See SessionPart.windows."""
        steps = self.plan.steps
        knows = self.mesh.shared == 1 and not self.plan.args.traits.draws and steps.dataset.is_whole
        return self.watch.windows(done, plain, PlannedBatches(steps, self.mesh.dp_rank, done) if knows else None)


class Judge(Hook):
    """Exchanges the ranks' reports after every step, and ends the run on a fault."""

    def begin(self) -> None:
        """See Hook.begin."""
        self.watch = next(part for part in self.session.parts if isinstance(part, Integrity)).watch
        self.speeds, self.unread = Speeds(), deque()

    def after_step(self, end: StepEnd) -> None:
        """See Hook.after_step. On a GPU the numbers are read a step later, but before a checkpoint is saved."""
        session, watch = self.session, self.watch
        own = torch.stack([watch.counts[name].to(torch.int64) for name in Report._fields])
        everyone = own.new_zeros(session.ranks.world_size, len(own))
        torch.distributed.all_gather_into_tensor(everyone, own[None])
        self.unread.append((end.step, everyone, watch.details))
        watch.restart()
        at_once = end.last or session.saves_at(end.step, end.last)
        while len(self.unread) > (0 if at_once else log_lag_steps(session.plan.args, session.ranks)):
            self._judge(end, *self.unread.popleft())

    def _judge(self, end: StepEnd, step: int, everyone: torch.Tensor, details: list) -> None:
        with waiting("the reports of all ranks"):
            reports = [Report(*row) for row in everyone.tolist()]
        for rank, ratio in self.speeds.add(reports).items():
            print_first(
                f"warning: step {step:,}: rank {rank} is slow: its own time per token is {ratio:.1f} times the median "
                "rank's. Look at its machine's clock, temperature and other processes"
            )
        if found := faults(reports):
            places = gather([name for kept, changed in details for name in kept.names(changed)], self.session.ranks)
            end.at_checkpoint = True  # a corrupted state is not saved
            end.problems.append(message(step, found, places, self.watch.every))


def check(resolved: ResolvedConfig) -> Iterator[str]:
    """Yield a line for states on NVMe: between steps they are not in memory."""
    if offload_device(resolved.config, "offload_optimizer") == "nvme":
        yield '--check_integrity_steps can\'t read states on NVMe: leave it out, or set offload_optimizer to "cpu"'


extension = Extension(check=check, part=Integrity, hooks=((Phase.JUDGE, Judge),))
