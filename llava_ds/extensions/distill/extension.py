"""The distillation extension: its objective, its teacher, and steps on answers sampled from the student."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from deepspeed import DeepSpeedEngine
from torch.nn.functional import pad

from llava_ds.batch import Batch
from llava_ds.constants import IGNORE_INDEX
from llava_ds.data.collate import LoadedSample
from llava_ds.data.dataset import BrokenSample
from llava_ds.data.loader import MicroBatch, Window, micro_batch_of, micro_batches
from llava_ds.engine.ds_config.resolve import ResolvedConfig
from llava_ds.engine.ds_config.zero import offload_device
from llava_ds.engine.runner import Runner
from llava_ds.extensions.base import Extension, SessionPart
from llava_ds.extensions.distill.divergence import Divergence
from llava_ds.extensions.distill.kept import kept_teacher
from llava_ds.extensions.distill.teacher import LiveTeacher, plan_teacher
from llava_ds.model.heads import sum_by_source
from llava_ds.model.llava import LlavaModel
from llava_ds.runtime.ranks import gather
from llava_ds.runtime.waiting import waiting
from llava_ds.train.evaluating.sampling import DrawRules, draw_answers, numbers_for, packs_of_rank, with_answer
from llava_ds.train.evaluating.twin import make_twin, whole_weights
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
        own = self.part.flags
        alpha = 0.0 if batch.extra.get("drawn") else own.sft_alpha
        head = Divergence(own.temperature, self.part.teacher.of(batch), batch.target_weights, own.beta, alpha)
        loss_sum, (losses, *others) = engine(batch, head)  # (S,) each
        sources = batch.sources.index_select(0, batch.target_samples)
        by_source = sum_by_source(losses, sources, self.objective.num_sources)
        return MicroLoss(loss_sum, by_source, {name: each.sum() for name, each in zip(self.metric_names, others)})


class Distillation(SessionPart):
    """Holds the teacher, in memory or as log-probabilities on disk. Some steps may train on sampled answers.

    A step does with probability lmbda, decided by --seed and its number alone: all ranks and resumed runs agree.
    """

    def __init__(self, plan: Plan, started: Start) -> None:
        super().__init__(plan, started)
        self.flags, self._seed, self._steps = plan.args.own["distill"], plan.args.training.seed, plan.steps

    def built(self, model: LlavaModel) -> None:
        if self.flags.lmbda:
            self._twin, self._rules = make_twin(model), DrawRules.of(self.plan, self.flags, num_answers=1)

    def started(self, runner: Runner) -> None:
        opened = kept_teacher if self.flags.gkd_logits_topk else LiveTeacher.opened
        self.teacher = opened(self.plan, self.ranks, self.mesh)

    def training_objective(self, plain: Objective) -> Objective:
        return GKD(plain, self)

    def windows(self, engine: DeepSpeedEngine, done: int, plain: Iterator[Window]) -> Iterator[Window]:
        return self._windows(done) if self.flags.lmbda else plain

    def _windows(self, done: int) -> Iterator[Window]:
        rank, workers = self.mesh.dp_rank, self.plan.args.data.dataloader_num_workers
        steps, ahead = itertools.tee(enumerate(self._steps.after(done), done + 1))
        own = (micro for step, layout in ahead if not self._is_drawn(step) for micro in layout.of_ranks[rank])
        given = micro_batches(self._steps.dataset, own, workers, self.ranks.device, self.mesh)
        for step, (samples, of_ranks) in steps:
            began, planned = time.perf_counter(), of_ranks[rank]
            found = self._drawn(step, planned) if self._is_drawn(step) else [next(given) for _ in planned]
            yield Window(found, len(samples), time.perf_counter() - began)

    def _is_drawn(self, step: int) -> bool:
        return np.random.default_rng([self._seed, step]).random() < self.flags.lmbda

    def _drawn(self, step: int, planned: list[list[int]]) -> list[MicroBatch]:
        """Sample an answer to each prompt, and pack them: equally many micro-batches on every rank. Collective."""
        found = [(index, self._prompt(step, index)) for index in itertools.chain(*planned)]
        broken = [item for _, item in found if isinstance(item, BrokenSample)]
        asked = [(index, item) for index, item in found if isinstance(item, LoadedSample)]
        prompts = [prompt for _, prompt in asked]
        numbers = [numbers_for(self._rules, self._seed, step, index) for index, _ in asked]
        with whole_weights(self._twin), self.plan.resolved.autocast(self.ranks.device):
            answers = draw_answers(self._twin, prompts, numbers, self._rules)
        samples = [with_answer(prompt, one.ids) for prompt, [one] in zip(prompts, answers)]
        packs = packs_of_rank([len(sample.input_ids) for sample in samples], self._steps.packing)
        items = [[samples[i] for i in pack] for pack in packs]
        items += [[] for _ in range(max(1, *gather(len(items), self.ranks)) - len(items))]
        items[0] += broken
        with waiting("the answers on their way to the device"):
            made = [micro_batch_of(each, self.plan.images) for each in items]
            return [replace(one, batch=one.batch.with_extra(drawn=True).to(self.ranks.device)) for one in made]

    def _prompt(self, step: int, index: int) -> LoadedSample | BrokenSample:
        """Return a sample up to one of its answers, chosen at random."""
        dataset = self._steps.dataset
        sample = dataset[index]
        if isinstance(sample, BrokenSample):
            return sample
        is_answer = sample.labels != IGNORE_INDEX
        begins = (is_answer & ~pad(is_answer[:-1], (1, 0))).nonzero()[:, 0].tolist()
        rng = np.random.default_rng([self._seed, step, index])
        return self._rules.prompt(dataset, index, sample, rng.choice(begins) if begins else 0)


extension = Extension(check=check, plan=plan_teacher, part=Distillation)
