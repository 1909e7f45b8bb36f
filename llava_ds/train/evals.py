# B questions, V vocabulary
"""Evaluation while training: the loss on samples that are not trained on, and answers to sample questions.

Nothing here draws random numbers or leaves anything in the engine: the steps after it are those of a run without it.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import PreTrainedTokenizerBase

from llava_ds.batch import Batch
from llava_ds.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX
from llava_ds.data.collate import LoadedSample, collate
from llava_ds.data.dataset import BrokenSample, EncodedDataset
from llava_ds.data.end_markers import end_markers
from llava_ds.data.loader import micro_batches
from llava_ds.data.step_plan import Packing, steps_between
from llava_ds.data.templates import TEMPLATES
from llava_ds.engine.runner import Runner
from llava_ds.geometry import ImageOptions
from llava_ds.model.heads import Logits
from llava_ds.model.llava import LlavaModel
from llava_ds.runtime.mesh import Mesh, sum_over
from llava_ds.runtime.ranks import Ranks, broadcast_from_first, gather, print_first
from llava_ds.runtime.waiting import queuing, waiting
from llava_ds.tracking.eval_log import EvalLoss, Evals
from llava_ds.tracking.series import means_by_source
from llava_ds.tracking.trackers import Trackers
from llava_ds.train.objectives.objective import MicroLoss, Objective
from llava_ds.train.plan import Plan


@dataclass(frozen=True)
class SampleQuestion:
    """The part of a sample up to its first answer, and that answer's text; index: of the sample in its data set;
    images: where they lie, for a person to look at (EncodedDataset.images_of)."""

    index: int
    id: str
    question: str
    images: list[str | dict[str, object]]
    reference: str
    sample: LoadedSample


@torch.no_grad()
def eval_loss(
    runner: Runner, dataset: EncodedDataset, packing: Packing, num_workers: int, objective: Objective, mesh: Mesh
) -> EvalLoss:
    """Measure the objective's loss and metrics over a data set. All ranks call it together.

    The data are laid out as one optimizer step that takes all of them: every rank has as many micro-batches, as ZeRO-3
    needs.
    """
    dataset.wait_for(range(len(dataset)))
    of_ranks = packing.lay_out_all(dataset.lengths)
    engine = runner.engine
    engine.eval()
    num_sources = len(dataset.sources)
    objective = dataclasses.replace(objective, num_sources=num_sources)
    sums: dict[str, torch.Tensor | int] = {"samples": 0, "targets": 0}
    for micro in micro_batches(dataset, of_ranks[mesh.dp_rank], num_workers, engine.device, mesh):
        with queuing():
            loss = runner.forward(engine, micro.batch, objective.forward)
        if loss is None:  # another rank sees it
            loss = MicroLoss(None, torch.zeros(2, num_sources, dtype=torch.float64, device=engine.device), {})
        counted = {"samples": micro.counts.samples, "targets": micro.counts.targets}
        found = {**counted, "by_source": loss.by_source, **loss.metrics}
        sums = {name: sums.get(name, 0) + value for name, value in found.items()}
    engine.train()
    with waiting("the eval loss"):
        tensors = [torch.as_tensor(value, dtype=torch.float64, device=engine.device) for value in sums.values()]
        total = sum_over(mesh.data_group, torch.cat([tensor.flatten() for tensor in tensors]))
        total = iter(runner.agree(total).tolist())
    found = {name: list(itertools.islice(total, tensor.numel())) for name, tensor in zip(sums, tensors)}
    (samples,), (targets,), by_source = found.pop("samples"), found.pop("targets"), found.pop("by_source")
    losses, units = by_source[:num_sources], by_source[num_sources:]
    means = means_by_source(dataset.sources, losses, units) if num_sources > 1 else {}
    number = max(1.0, sum(units))
    metrics = {name: value / number for name, (value,) in found.items()}
    return EvalLoss(sum(losses) / number, int(targets), int(samples), means, metrics)


def prompts_of(
    dataset: EncodedDataset, number: int, tokenizer: PreTrainedTokenizerBase, template: str
) -> list[SampleQuestion]:
    """Take the first samples of a data set that have an answer and whose images can be shown, at most `number`.

    Those with images come first: they tell more about a model that sees.
    """
    found: list[SampleQuestion] = []
    for index in itertools.chain(dataset.positions(images=True), dataset.positions(images=False)):
        if len(found) == number:
            break
        sample = dataset[index]
        if isinstance(sample, BrokenSample):
            continue
        sample = sample.samples[0]
        supervised = (sample.labels != IGNORE_INDEX).nonzero()[:, 0].tolist()
        if not supervised or supervised[0] == 0:
            continue
        begin = supervised[0]
        after = (sample.labels[begin:] == IGNORE_INDEX).nonzero()[:, 0].tolist()
        end = begin + after[0] if after else len(sample.labels)
        shown = _shown_before(sample, begin)
        row = dataset.row(int(dataset.rows[index]))
        ids = sample.input_ids[:begin]
        question = tokenizer.decode(ids[ids != IMAGE_TOKEN_INDEX], skip_special_tokens=True)
        found.append(
            SampleQuestion(
                index=index,
                id=str(row["id"]),
                question=question.replace(TEMPLATES[template].system, "", 1).strip(),
                images=dataset.images_of(index)[: len(shown)],
                reference=tokenizer.decode(sample.input_ids[begin:end], skip_special_tokens=True).strip(),
                sample=LoadedSample(ids, torch.full_like(ids, IGNORE_INDEX), shown),
            )
        )
    return found


def _shown_before(sample: LoadedSample, position: int) -> list[tuple]:
    """Return the images of a sample whose places all lie before a position."""
    room, shown = int((sample.input_ids[:position] == IMAGE_TOKEN_INDEX).sum()), []
    for tiles, layout in sample.media:
        room -= layout.num_tokens
        if room < 0:
            break
        shown.append((tiles, layout))
    return shown


@dataclass(frozen=True)
class Decoding:
    """Greedy decoding. images: the layout of images; max_length: the length at which training cuts samples, beyond
    which a language model may have no positions."""

    tokenizer: PreTrainedTokenizerBase
    template: str
    images: ImageOptions
    max_new_tokens: int
    max_length: int


@torch.no_grad()
def answers(runner: Runner, prompts: list[SampleQuestion], decoding: Decoding, ranks: Ranks) -> list[str]:
    """Return the greedy answer to each prompt, by the engine as it trains, at any ZeRO stage.

    All ranks call it together and compute all of it, for at ZeRO-3 no rank can compute alone. The whole sequence is
    computed again for every token, which a few short answers can afford: no cache has to fit the language model.
    """
    engine = runner.engine
    engine.eval()
    ends = set(end_markers(decoding.template, decoding.tokenizer))
    decoded: list[list[int]] = [[] for _ in prompts]
    going = list(range(len(prompts)))
    while going:
        batch = collate([_continued(prompts[i].sample, decoded[i]) for i in going], decoding.images)
        with waiting("the questions on their way to the device"):
            batch = batch.to(ranks.device)
        with queuing():
            logits = runner.forward(engine, batch, _next_logits)  # (B, V)
        chosen = batch.cu_seqlens[1:].long() if logits is None else logits.argmax(-1)
        if ranks.world_size > 1:  # the same on every rank, on whatever hardware
            torch.distributed.broadcast(chosen, src=ranks.world_size - 1)
        with waiting("the next token"):
            tokens = chosen.tolist()
        for i, token in zip(list(going), tokens):
            if token in ends:
                going.remove(i)
                continue
            decoded[i].append(token)
            if len(decoded[i]) == min(decoding.max_new_tokens, decoding.max_length - len(prompts[i].sample.input_ids)):
                going.remove(i)
    engine.train()
    return [decoding.tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in decoded]


def _next_logits(engine, batch: Batch) -> torch.Tensor:
    return engine(batch, Logits(batch.cu_seqlens[1:].long() - 1))


def _continued(sample: LoadedSample, decoded: list[int]) -> LoadedSample:
    ids = torch.cat([sample.input_ids, torch.tensor(decoded, dtype=torch.int64)])
    return dataclasses.replace(sample, input_ids=ids, labels=torch.full_like(ids, IGNORE_INDEX))


class Tasks(Protocol):
    """Benchmarks whose questions a model is asked while it trains."""

    def scores(self, precision: torch.autocast) -> dict[str, float]:
        """The score of each by its name. All ranks call it together.

        precision: the engine's own.
        """


# Makes Tasks of the model. All ranks call it together, before the engine is started, which changes the model's modules.
Asks = Callable[[LlavaModel], Tasks]


def numbers_of(plan: Plan, tasks: tuple[str, ...]) -> list[str]:
    """Names of the numbers of a run's evaluations. tasks: names of --eval_tasks."""
    eval_set, known = plan.evals.eval_set, list(tasks)
    if eval_set is not None:
        known += ["loss", *_metrics_of(plan.args.training.objective)]
        known += [f"loss/{name}" for name in eval_set.sources] if len(eval_set.sources) > 1 else []
    return known


def _metrics_of(objective: str) -> tuple[str, ...]:
    """Numbers of an evaluation that come from the objective, beside its loss."""
    if objective == "dpo":
        from llava_ds.train.objectives.dpo import METRICS

        return METRICS
    if objective == "reward":
        from llava_ds.train.objectives.reward import METRICS

        return METRICS
    return ()


class Measure:
    """What an extension does at evaluations (Evaluation.measures)."""

    def why_over(self) -> str | None:
        """The reason to end the run, by the evaluations so far; on rank 0."""


class Evaluation:
    """Measures the eval loss and asks sample questions when that is due, and logs both (evals.jsonl, samples.jsonl)."""

    def __init__(
        self,
        runner: Runner,
        plan: Plan,
        objective: Objective,
        tasks: Tasks | None,
        trackers: Trackers,
        ranks: Ranks,
        mesh: Mesh,
    ) -> None:
        """All ranks call it together."""
        args, training, num_steps = plan.args, plan.args.training, plan.steps.num_steps
        self._eval_steps = steps_between(training.eval_steps, num_steps)
        self._sample_steps = steps_between(training.sample_steps, num_steps)
        self._runner, self._ranks, self._mesh, self._packing = runner, ranks, mesh, plan.steps.packing
        self._objective, self._tasks = objective, tasks
        autocast = plan.resolved.config.get("torch_autocast", {}).get("enabled", False)
        self._precision = torch.autocast(ranks.device.type, plan.resolved.compute_dtype, enabled=autocast)
        self._num_workers, self._eval_set = args.data.dataloader_num_workers, plan.evals.eval_set
        self.log = Evals(plan.output_dir, plan.resumed_step, ranks, trackers)
        self._num_steps, self._last_s = num_steps, 0.0  # seconds of the last evaluation
        self.measures: list[Measure] = []
        tokenizer, template, questions = plan.model.tokenizer, args.model.version, plan.evals.questions
        length = args.data.model_max_length
        self._decoding = Decoding(tokenizer, template, plan.images, training.sample_max_new_tokens, length)
        prompts = prompts_of(questions, training.num_sample_questions, tokenizer, template) if questions else []
        # An image may be missing on one machine only.
        shown = set.intersection(*(set(part) for part in gather([prompt.index for prompt in prompts], ranks)))
        self._prompts = [prompt for prompt in prompts if prompt.index in shown]

    def is_due(self, step: int, last: bool) -> bool:
        """True if there is something to do at a step. last: the run ends with it."""
        return self._measures(step, last) or self._asks(step, last)

    def was_missed(self, step: int, last: bool) -> bool:
        """True if it was due at the step that a run resumes from, whose stop left no time for it. All ranks call it."""
        return self.is_due(step, last) and not broadcast_from_first(self._ranks, lambda: self.log.has(step))

    def ahead_s(self, step: int) -> float:
        """Seconds of an evaluation that comes before the next chance to stop, judged by the last one."""
        due = any(self.is_due(at, at == self._num_steps) for at in (step, step + 1))
        return self._last_s if due else 0.0

    def is_over(self) -> bool:
        """True if the evaluations so far end the run. All ranks call it together."""
        if not self.measures:
            return False
        why = broadcast_from_first(self._ranks, lambda: [each.why_over() for each in self.measures])
        print_first(*filter(None, why))
        return any(why)

    def run(self, step: int, last: bool) -> bool:
        """Do what is due. Returns whether the run ends with this step, as it does where `last` is true. All ranks call
        it together."""
        began = time.perf_counter()
        if self._measures(step, last):
            self._measure(step)
            last = self.is_over() or last
        if self._asks(step, last):
            started = time.perf_counter()
            decoded = answers(self._runner, self._prompts, self._decoding, self._ranks)
            shown = ("id", "question", "images", "reference")
            rows = [{**{name: getattr(p, name) for name in shown}, "answer": a} for p, a in zip(self._prompts, decoded)]
            self.log.add_answers(step, rows, seconds=time.perf_counter() - started)
        self._last_s = time.perf_counter() - began
        return last

    def _measure(self, step: int) -> None:
        """The eval loss, and the scores of tasks."""
        began, loss, scores = time.perf_counter(), None, {}
        if self._eval_set is not None:
            loss = eval_loss(
                self._runner, self._eval_set, self._packing, self._num_workers, self._objective, self._mesh
            )
        measured = time.perf_counter()
        if self._tasks is not None:
            scores = self._tasks.scores(self._precision)
        broken = 0 if loss is None else len(self._eval_set) - loss.samples
        seconds = measured - began, time.perf_counter() - measured
        self.log.add(step, loss, scores, broken=broken, seconds=seconds)

    def _measures(self, step: int, last: bool) -> bool:
        has_any = self._eval_set is not None or self._tasks is not None
        return has_any and (last or _is_multiple(step, self._eval_steps))

    def _asks(self, step: int, last: bool) -> bool:
        every = self._sample_steps
        return bool(self._prompts) and every is not None and (last or _is_multiple(step, every))


def _is_multiple(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
