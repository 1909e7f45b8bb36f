"""The distillation extension: its objective, its teacher, and training steps on answers sampled from the student."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import numpy as np

from llava_ds.batch import Batch
from llava_ds.constants import IGNORE_INDEX
from llava_ds.data.collate import LoadedSample
from llava_ds.data.dataset import BrokenSample
from llava_ds.data.loader import Window, micro_batch_of
from llava_ds.extensions.base import Extension, SessionPart
from llava_ds.extensions.distill.teacher import Divergence, KeptTeacher, run_teacher
from llava_ds.model.heads import sum_by_source
from llava_ds.runtime.ranks import gather
from llava_ds.second_models.frozen import FrozenPlan, open_together, plan_frozen
from llava_ds.train.evaluating.sampling import DrawRules, draw_answers, numbers_for, packs_of_rank, with_answer
from llava_ds.train.evaluating.twin import make_twin, whole_weights
from llava_ds.train.objectives.objective import MicroLoss, Objective, Wrapped
from llava_ds.train.plan import PlanDraft


def plan_teacher(draft: PlanDraft) -> FrozenPlan:
    """Plan the teacher. Raises ConfigError if its tokens or image preprocessing differ from the student's."""
    path, length = draft.args.own["distill"].teacher_model_name_or_path, draft.args.data.model_max_length
    return plan_frozen("--teacher_model_name_or_path", path, draft.model, draft.images, length, same_tokens=True)


@dataclass(frozen=True)
class GKD(Wrapped):
    """The objective of training: the divergence from the teacher. Evaluations use the cross-entropy."""

    part: "Distillation"
    metric_names = ("divergence", "cross_entropy")

    def forward(self, engine, batch: Batch) -> MicroLoss:
        """Run the teacher, and the student with the divergence as its head."""
        alpha = 0.0 if batch.extra.get("drawn") else self.part.flags.sft_alpha
        head = replace(self.part.teacher(batch), row_weights=batch.target_weights, sft_alpha=alpha)
        loss_sum, (losses, *others) = engine(batch, head)  # (S,) each
        by_source = sum_by_source(losses, batch.sources[batch.target_samples], self.objective.num_sources)
        return MicroLoss(loss_sum, by_source, {name: each.sum() for name, each in zip(self.metric_names, others)})


class Distillation(SessionPart):
    """Holds the teacher, in memory or as log-probabilities on disk, and samples answers for some of the steps.

    This has probability lmbda, decided only by --seed and the step's number, so all ranks and resumed runs agree.
    """

    def built(self, model) -> None:
        self.flags, self._seed = self.plan.args.own["distill"], self.plan.args.training.seed
        if self.flags.lmbda:
            self._twin, self._rules = make_twin(model), DrawRules.of(self.plan, self.flags, num_answers=1)

    def started(self, runner) -> None:
        plan, frozen, own = self.plan, self.plan.own["distill"], self.flags
        rows = min(each.text_config.vocab_size for each in (plan.model, frozen.model))
        head = Divergence(own.temperature, num_rows=rows, beta=own.beta)

        def live() -> Callable[[Batch], Divergence]:
            return partial(run_teacher, open_together(frozen, plan.resolved, self.ranks, self.mesh), head)

        self.teacher = KeptTeacher(live, head, plan, self.ranks, self.mesh) if own.gkd_logits_topk else live()

    def training_objective(self, plain: Objective) -> Objective:
        return GKD(plain, self)

    def windows(self, engine, done: int, plain: Iterator[Window]) -> Iterator[Window]:
        for step, window in enumerate(plain, done + 1):
            is_drawn = np.random.default_rng([self._seed, step]).random() < self.flags.lmbda
            yield self._drawn(step, window) if is_drawn else window

    def _drawn(self, step: int, window: Window) -> Window:
        """Sample an answer to each prompt, and pack them into the same number of micro-batches per rank. Collective."""
        began, steps = time.perf_counter(), self.plan.steps
        found = [(index, self._prompt(step, index)) for index in chain(*steps.of_rank(step, self.ranks.rank))]
        asked = [(index, prompt) for index, prompt in found if not isinstance(prompt, BrokenSample)]
        numbers = [numbers_for(self._rules, self._seed, step, index) for index, _ in asked]
        with whole_weights(self._twin), self.plan.resolved.autocast(self.ranks.device):
            answers = draw_answers(self._twin, [prompt for _, prompt in asked], numbers, self._rules)
        samples = [with_answer(prompt, answer.ids) for (_, prompt), [answer] in zip(asked, answers)]
        packs = packs_of_rank([len(sample.input_ids) for sample in samples], steps.packing)
        items = [[samples[i] for i in pack] for pack in packs]
        items += [[] for _ in range(max(1, *gather(len(items), self.ranks)) - len(items))]
        items[0] += [prompt for _, prompt in found if isinstance(prompt, BrokenSample)]
        made = [micro_batch_of(each, self.plan.images) for each in items]
        made = [replace(one, batch=one.batch.with_extra(drawn=True).to(self.ranks.device)) for one in made]
        return replace(window, micro_batches=made, data_wait_s=window.data_wait_s + time.perf_counter() - began)

    def _prompt(self, step: int, index: int) -> LoadedSample | BrokenSample:
        """Return the tokens of a sample that precede one of its answers, chosen at random."""
        sample = self.plan.steps.dataset[index]
        if isinstance(sample, BrokenSample):
            return sample
        is_answer = sample.labels.numpy() != IGNORE_INDEX
        begins = np.flatnonzero(is_answer & np.diff(is_answer, prepend=False)).tolist()
        rng = np.random.default_rng([self._seed, step, index])
        return self._rules.prompt(self.plan.steps.dataset, index, sample, rng.choice(begins) if begins else 0)


extension = Extension(plan=plan_teacher, part=Distillation)
