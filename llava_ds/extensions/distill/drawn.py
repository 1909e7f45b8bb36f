"""Steps on answers that the student draws and the teacher scores."""

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch.nn.functional import pad

from llava_ds.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX
from llava_ds.data.collate import LoadedSample, collate, counts_of
from llava_ds.data.dataset import BrokenSample
from llava_ds.data.end_markers import end_markers
from llava_ds.data.loader import MicroBatch, Window, micro_batches, numbers_of
from llava_ds.data.packing import plan_by_tokens
from llava_ds.model.llava import LlavaModel
from llava_ds.runtime.mesh import Mesh
from llava_ds.runtime.ranks import Ranks, gather
from llava_ds.runtime.waiting import waiting
from llava_ds.train.evaluating.sampling import DrawRules, draw_answers, numbers_for, with_answer
from llava_ds.train.evaluating.twin import make_twin, whole_weights
from llava_ds.train.plan import Plan


class DrawnSteps:
    """The windows of a run in which a part of the steps trains on drawn answers.

    A step is drawn with probability lmbda, decided by --seed and its number alone: all ranks and resumed runs agree.
    """

    def __init__(self, plan: Plan, ranks: Ranks, mesh: Mesh, model: LlavaModel) -> None:
        """model: without its engine."""
        self._plan, self._ranks, self._mesh = plan, ranks, mesh
        self._own, self._seed, self._twin = plan.args.own["distill"], plan.args.training.seed, make_twin(model)
        self._rules = DrawRules(
            num_answers=1,
            max_new_tokens=self._own.max_completion_length,
            max_length=plan.args.data.model_max_length,
            ends=tuple(end_markers(plan.args.model.version, plan.model.tokenizer)),
            images=plan.images,
            temperature=self._own.temperature,
        )

    def windows(self, done: int) -> Iterator[Window]:
        """Yield this rank's window of every step after `done`. Collective."""
        steps, rank, workers = self._plan.steps, self._mesh.dp_rank, self._plan.args.data.dataloader_num_workers
        numbered = enumerate(steps.after(done), done + 1)
        ahead = (micro for step, layout in numbered if not self._is_drawn(step) for micro in layout.of_ranks[rank])
        given = micro_batches(steps.dataset, ahead, workers, self._ranks.device, self._mesh)
        for step, (samples, of_ranks) in enumerate(steps.after(done), done + 1):
            began, own = time.perf_counter(), of_ranks[rank]
            if self._is_drawn(step):
                found = self._drawn(step, [sample for micro in own for sample in micro])
            else:
                found = [next(given) for _ in own]
            yield Window(found, len(samples), time.perf_counter() - began)

    def _is_drawn(self, step: int) -> bool:
        return np.random.default_rng([self._seed, step]).random() < self._own.lmbda

    def _drawn(self, step: int, samples: list[int]) -> list[MicroBatch]:
        """Draw an answer to each prompt, and pack them: equally many micro-batches on every rank."""
        found = {index: self._prompt(step, index) for index in samples}
        broken = tuple(item for item in found.values() if isinstance(item, BrokenSample))
        prompts = {index: item for index, item in found.items() if not isinstance(item, BrokenSample)}
        numbers = [numbers_for(self._rules, self._seed, step, index) for index in prompts]
        size, asked, answers = self._own.per_device_generation_batch_size, list(prompts.values()), []
        with whole_weights(self._twin), self._plan.resolved.autocast(self._ranks.device):
            for first in range(0, len(asked), size):
                part = slice(first, first + size)
                answers += draw_answers(self._twin, asked[part], numbers[part], self._rules)
        packs = self._packs([with_answer(prompt, one.ids) for prompt, [one] in zip(asked, answers)])
        most = max(1, *gather(len(packs), self._ranks))
        with waiting("the answers on their way to the device"):
            made = [self._micro_batch(pack) for pack in [*packs, *([] for _ in range(most - len(packs)))]]
        return [replace(made[0], broken=broken), *made[1:]]

    def _prompt(self, step: int, index: int) -> LoadedSample | BrokenSample:
        """Return a sample up to one of its answers, chosen at random."""
        dataset = self._plan.steps.dataset
        sample = dataset[index]
        if isinstance(sample, BrokenSample):
            return sample
        is_answer = sample.labels != IGNORE_INDEX
        begins = (is_answer & ~pad(is_answer[:-1], (1, 0))).nonzero()[:, 0].tolist()
        rng = np.random.default_rng([self._seed, step, index])
        ids, media = sample.input_ids[: rng.choice(begins) if begins else 0], []
        left = int((ids == IMAGE_TOKEN_INDEX).sum())
        for one in sample.media:
            if left > 0:
                media.append(one)
            left -= len(one[1].rows)
        prompt = LoadedSample(ids, torch.full_like(ids, IGNORE_INDEX), media, sample.source)
        if not len(ids) or self._rules.room(prompt) < 1:
            return dataset.broken(index, "no room is left for an answer: raise --model_max_length")
        return prompt

    def _packs(self, samples: list[LoadedSample]) -> list[list[LoadedSample]]:
        """Pack this rank's samples by tokens or by number, as the run does."""
        packing = self._plan.steps.packing
        most, size = packing.tokens_per_micro_batch, packing.micro_batch_size
        if most is None or not samples:
            return [samples[first : first + size] for first in range(0, len(samples), size)]
        lengths = np.array([len(sample.input_ids) for sample in samples])
        [packs] = plan_by_tokens(range(len(samples)), lengths, 1, most, packing.costs(lengths))
        return [[samples[i] for i in pack] for pack in packs]

    def _micro_batch(self, samples: list[LoadedSample]) -> MicroBatch:
        batch = collate(samples, self._plan.images).with_extra(drawn=True).to(self._ranks.device)
        return MicroBatch(batch, tuple(range(len(samples))), broken=(), **numbers_of(list(map(counts_of, samples))))
