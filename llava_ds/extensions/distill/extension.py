"""The distillation extension: its objective, and the teacher of a session."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from llava_ds.batch import Batch
from llava_ds.engine.ds_config.resolve import ResolvedConfig
from llava_ds.engine.ds_config.zero import offload_device
from llava_ds.engine.runner import Runner
from llava_ds.extensions.base import Extension, SessionPart
from llava_ds.extensions.distill.divergence import Divergence
from llava_ds.extensions.distill.teacher import LiveTeacher, plan_teacher
from llava_ds.train.objectives.objective import MicroLoss, Objective, Wrapped


def check(resolved: ResolvedConfig) -> Iterator[str]:
    """Yield a line if the teacher's weights would be swapped to the student's files."""
    if offload_device(resolved.config, "offload_param") == "nvme":
        yield (
            '--objective gkd, but zero_optimization.offload_param.device is "nvme", where the teacher\'s weights would '
            'overwrite the student\'s: write "cpu"'
        )


@dataclass(frozen=True)
class GKD(Wrapped):
    """Divergence from the teacher instead of the cross-entropy; evaluations measure the cross-entropy."""

    part: "Distillation"
    metric_names = ("divergence", "cross_entropy")

    def forward(self, engine, batch: Batch) -> MicroLoss:
        """Run the teacher, and the student with the divergence as its head."""
        own, weights, number = self.part.flags, batch.target_weights, self.objective.num_sources
        head = Divergence(own.temperature, self.part.teacher.of(batch), weights, own.beta, own.sft_alpha)
        loss_sum, rows = engine(batch, head)  # rows (2, S)
        sources = batch.sources[batch.target_samples]
        is_from = sources == torch.arange(number, device=sources.device)[:, None]  # (sources, S)
        losses = rows[0] + own.sft_alpha * rows[1]
        losses = losses if weights is None else losses * weights
        by_source = torch.stack([torch.where(is_from, losses, 0.0).sum(1), is_from.sum(1).double()])
        return MicroLoss(loss_sum, by_source, dict(zip(self.metric_names, rows.sum(1))))


class Distillation(SessionPart):
    """Opens the teacher."""

    def started(self, runner: Runner) -> None:
        self.flags = self.plan.args.own["distill"]
        self.teacher = LiveTeacher.opened(self.plan, self.ranks, self.mesh)

    def training_objective(self, plain: Objective) -> Objective:
        return GKD(plain, self)


extension = Extension(check=check, plan=plan_teacher, part=Distillation)
