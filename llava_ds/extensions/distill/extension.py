"""The distillation extension: its objective, and the teacher of a session."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from deepspeed import DeepSpeedEngine

from llava_ds.batch import Batch
from llava_ds.constants import ConfigError
from llava_ds.data.loader import Window
from llava_ds.engine.ds_config.resolve import ResolvedConfig
from llava_ds.engine.ds_config.zero import offload_device
from llava_ds.engine.runner import Runner
from llava_ds.extensions.active import plugins
from llava_ds.extensions.base import Extension, SessionPart
from llava_ds.extensions.distill.divergence import Divergence
from llava_ds.extensions.distill.drawn import DrawnSteps
from llava_ds.extensions.distill.kept import kept_teacher
from llava_ds.extensions.distill.teacher import LiveTeacher, plan_teacher
from llava_ds.model.llava import LlavaModel
from llava_ds.train.objectives.objective import MicroLoss, Objective, Wrapped
from llava_ds.train.plan import Plan
from llava_ds.train.start import Start


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
        alpha = 0.0 if batch.extra.get("drawn") else own.sft_alpha
        head = Divergence(own.temperature, self.part.teacher.of(batch), weights, own.beta, alpha)
        loss_sum, rows = engine(batch, head)  # rows (2, S)
        sources = batch.sources[batch.target_samples]
        is_from = sources == torch.arange(number, device=sources.device)[:, None]  # (sources, S)
        losses = rows[0] + alpha * rows[1]
        losses = losses if weights is None else losses * weights
        by_source = torch.stack([torch.where(is_from, losses, 0.0).sum(1), is_from.sum(1).double()])
        return MicroLoss(loss_sum, by_source, dict(zip(self.metric_names, rows.sum(1))))


class Distillation(SessionPart):
    """Has the teacher, in memory or as numbers on disk, and replaces records by drawn answers."""

    def __init__(self, plan: Plan, started: Start) -> None:
        super().__init__(plan, started)
        self.flags, self._drawn = plan.args.own["distill"], None
        if self.flags.gkd_logits_topk and plugins() and plan.args.training.check_plugin:
            raise ConfigError(
                "--gkd_logits_topk can't be used with the check of --plugin, whose batches have no teacher's numbers: "
                "give --check_plugin False"
            )

    def built(self, model: LlavaModel) -> None:
        if self.flags.lmbda:
            self._drawn = DrawnSteps(self.plan, self.ranks, self.mesh, model)

    def started(self, runner: Runner) -> None:
        opened = kept_teacher if self.flags.gkd_logits_topk else LiveTeacher.opened
        self.teacher = opened(self.plan, self.ranks, self.mesh)

    def windows(self, engine: DeepSpeedEngine, done: int, plain: Iterator[Window]) -> Iterator[Window]:
        if self._drawn is not None:
            return self._drawn.windows(done)
        return (
            self.teacher.windows(plain, self.plan.steps.after(done), self.mesh) if self.flags.gkd_logits_topk else plain
        )

    def training_objective(self, plain: Objective) -> Objective:
        return GKD(plain, self)


extension = Extension(check=check, plan=plan_teacher, part=Distillation)
