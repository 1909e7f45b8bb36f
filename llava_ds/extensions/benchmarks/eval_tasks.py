# Q questions of a task
"""Answer benchmark questions during training, and score the answers like run/evaluate.py (--eval_tasks)."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import yaml
from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import NotRequired, TypedDict

from llava_ds.constants import ConfigError, DataError
from llava_ds.data.collate import LoadedSample
from llava_ds.data.encode import Encoder, EncodingOptions, encoder_of
from llava_ds.data.end_markers import end_markers
from llava_ds.extensions.base import EvalMeasure, Measure
from llava_ds.extensions.benchmarks.benchmark_files import Given
from llava_ds.extensions.benchmarks.question import Question, with_resized_sizes
from llava_ds.extensions.benchmarks.scores import Scored, metric_of
from llava_ds.extensions.benchmarks.task_names import CHOSEN_METRICS
from llava_ds.extensions.benchmarks.tasks import TASKS, read_questions
from llava_ds.extensions.infer.generate import decode_media, media_of
from llava_ds.model.llava import LlavaModel
from llava_ds.runtime.ranks import Ranks, broadcast_from_first, gather, on_every_rank
from llava_ds.train.evaluating.sampling import DrawRules, draw_answers
from llava_ds.train.evaluating.twin import make_twin, whole_weights
from llava_ds.train.plan import Plan

NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
TAKEN = ("loss", "step", "seconds", "samples", "broken_samples", "supervised_tokens", "source_losses")
MAX_BYTES = 2**20  # size limit of the task file
BATCH = 16  # questions per batch
UNBOUNDED = 2**31
NOT_BY_TASK = {"metric", "turns", "split"}  # keys that have no effect on most benchmarks


class _Entry(TypedDict):
    """A task in the file, with run/evaluate.py's flags as keys."""

    task: NotRequired[str]
    data_path: str
    annotations: NotRequired[str]
    image_folder: NotRequired[str]
    split: NotRequired[str]
    metric: NotRequired[str]
    turns: NotRequired[str]
    limit: NotRequired[Annotated[int, Field(ge=1)]]
    max_new_tokens: NotRequired[Annotated[int, Field(ge=1)]]


_ENTRIES: TypeAdapter[dict[str, _Entry]] = TypeAdapter(dict[str, _Entry])
_KEYS = set(_Entry.__annotations__)


@dataclass(frozen=True)
class EvalTask:
    """A task's questions, and the function that scores answers. max_new_tokens: maximum length of an answer."""

    name: str
    questions: list[Question]
    score: Callable[[list[Question], list[str]], Scored]
    max_new_tokens: int


def read_eval_tasks(path: str, cache_dir: str) -> tuple[EvalTask, ...]:
    """Read the tasks in a YAML file by name, and their questions.

    Raises ConfigError or DataError with the task's name.
    """
    tasks = []
    for name, entry in _entries(path).items():
        where = f"--eval_tasks {path}: {name}"
        if not NAME.fullmatch(name) or name in TAKEN or name.endswith("loss") or name.startswith("eval_"):
            raise ConfigError(
                f"{where} can't name a score: use letters, digits, '.', '_' and '-', don't start with eval_, "
                "and don't use a loss's name"
            )
        task = entry.get("task", "llava")
        if task not in TASKS or task == "preference":
            known = ", ".join(sorted(TASKS.keys() - {"preference"}))
            raise ConfigError(f"{where}: task {task} is unknown: give one of {known}")
        read = {"llava": {"metric", "turns", "split"}, "scienceqa": {"split"}}.get(task, set())
        unread = entry.keys() & NOT_BY_TASK - read
        if unread:
            raise ConfigError(f"{where}: {', '.join(sorted(unread))} has no effect on task {task}: leave it out")
        metric = TASKS[task].metric or entry.get("metric", "exact")
        if metric not in CHOSEN_METRICS and ":" not in metric and TASKS[task].metric is None:
            known = ", ".join(CHOSEN_METRICS)
            raise ConfigError(f"{where}: metric {metric} is unknown: give one of {known}, or file.py:function")
        given = Given(
            entry["data_path"],
            entry.get("annotations"),
            entry.get("image_folder"),
            entry.get("split"),
            metric,
            entry.get("turns", "together"),
            cache_dir,
        )
        if given.turns not in ("together", "each"):
            raise ConfigError(f"{where}: turns is {given.turns}, expected together or each")
        try:
            questions, score = read_questions(task, given, entry.get("limit")), metric_of(metric)
        except (ConfigError, DataError) as error:
            raise type(error)(f"{where}: {error}") from error
        tasks.append(EvalTask(name, questions, score, entry.get("max_new_tokens", 64)))
    return tuple(tasks)


def _entries(path: str) -> dict[str, Any]:
    expected = "a YAML file of task names, each with task, data_path, image_folder and metric"
    try:
        with Path(path).expanduser().open("rb") as file:
            found = yaml.safe_load(file.read(MAX_BYTES).decode("utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"--eval_tasks {path} can't be read ({error}): give {expected}") from error
    try:
        entries = _ENTRIES.validate_python(found, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"--eval_tasks {path}: {place or 'it'}: {first['msg']}. Expected {expected}") from None
    unknown = {f"{name}.{key}" for name, entry in found.items() for key in entry.keys() - _KEYS}
    if unknown:
        raise ConfigError(
            f"--eval_tasks {path}: {', '.join(sorted(unknown))} is unknown: {', '.join(sorted(_KEYS))} are known"
        )
    if not entries:
        raise ConfigError(f"--eval_tasks {path} lists no tasks: give {expected}")
    return entries


def open_tasks(plan: Plan, ranks: Ranks) -> EvalMeasure:
    """Read the questions of --eval_tasks, and return the measure that answers and scores them in evaluations.

    Collective. Raises ConfigError or DataError on every rank.
    """
    args = plan.args
    tasks = on_every_rank(ranks, partial(read_eval_tasks, args.own["benchmarks"].eval_tasks, args.data.cache_dir))
    return EvalMeasure(partial(EvalTasks, tasks=tasks, plan=plan, ranks=ranks), tuple(task.name for task in tasks))


def refuse_without_rows(tasks: Sequence[EvalTask], encoder: Encoder) -> None:
    """Raise DataError, before the first step, for a question with a token outside the model's embedding."""
    for task in tasks:
        for question in task.questions:
            try:
                encoder.refuse_without_rows([message.text for message in question.prompt.messages])
            except DataError as error:
                raise DataError(f"--eval_tasks, {task.name}: question {question.id}: {error}") from error


class EvalTasks(Measure):
    """Answers the questions of all tasks with the current weights, and scores the answers.

    Decoding is greedy, with a key-value cache and transformers' attention. The engine is not used or changed, so that
    training continues exactly as it would without evaluations.
    """

    def __init__(self, model: LlavaModel, tasks: tuple[EvalTask, ...], plan: Plan, ranks: Ranks) -> None:
        """Call on all ranks together, before the engine starts and changes the model's modules."""
        self._twin, self._ranks, self._images = make_twin(model), ranks, plan.images
        self._tasks = [replace(task, questions=with_resized_sizes(task.questions, plan.images)) for task in tasks]
        self._tokenizer, args = plan.model.tokenizer, plan.args.model
        options = EncodingOptions(
            args.version, UNBOUNDED, args.mm_use_im_start_end, split_special_tokens=args.split_special_tokens
        )
        self._encoder = encoder_of(self._tokenizer, options, plan.images)
        refuse_without_rows(tasks, self._encoder)
        self._ends = tuple(end_markers(args.version, self._tokenizer))
        self._positions = getattr(plan.model.text_config, "max_position_embeddings", None) or UNBOUNDED

    def scores(self, precision: torch.autocast) -> dict[str, float]:
        """Return the score of each task by name. Collective.

        precision: the engine's autocast. Raises DataError on every rank if a question can't be encoded or a metric
        fails.
        """
        with whole_weights(self._twin):
            answers = on_every_rank(self._ranks, lambda: self._answers(precision))
        shares = gather(answers, self._ranks)
        return broadcast_from_first(self._ranks, lambda: self._scored(shares))

    def _scored(self, shares: list[list[dict[int, str]]]) -> dict[str, float]:
        """Score the answers of all ranks."""
        found = {}
        for task, *parts in zip(self._tasks, *shares):
            texts = {number: text for part in parts for number, text in part.items()}
            try:
                scored = task.score(task.questions, [texts[number] for number in range(len(task.questions))])
            except DataError as error:
                raise DataError(f"--eval_tasks, {task.name}: {error}") from error
            found[task.name] = float(np.mean(scored.columns[:, 0]))
        return found

    def _answers(self, precision: torch.autocast) -> list[dict[int, str]]:
        """Return this rank's share of each task's answers, by question number.

        Batches don't depend on the number of ranks, because the other questions in a batch affect rounding.
        """
        found = []
        for task in self._tasks:
            numbers = range(len(task.questions))
            batches = [numbers[first : first + BATCH] for first in numbers[::BATCH]]
            with precision:
                found.append(
                    {
                        number: text
                        for batch in batches[self._ranks.rank :: self._ranks.world_size]
                        for number, text in zip(batch, self._texts(task, batch))
                    }
                )
        return found

    def _texts(self, task: EvalTask, numbers: range) -> list[str]:
        rules = DrawRules(1, task.max_new_tokens, self._positions, self._ends, self._images, top_k=1)
        samples = [self._sample(task.questions[number], rules) for number in numbers]
        # With top_k=1, only the most probable token is left, so the random numbers have no effect.
        drawn = draw_answers(self._twin, samples, [np.zeros((1, task.max_new_tokens))] * len(samples), rules)
        return [self._tokenizer.decode(answer.ids, skip_special_tokens=True).strip() for [answer] in drawn]

    def _sample(self, question: Question, rules: DrawRules) -> LoadedSample:
        media = media_of(question.prompt, self._images)
        ids = torch.tensor(self._encoder.prompt_ids(question.prompt.transcript, [layout.mark for *_, layout in media]))
        sample = LoadedSample(ids, ids, decode_media(media, question.prompt.blank, self._images))
        if rules.room(sample) < 1:
            raise DataError(
                f"--eval_tasks: question {question.id} has {len(ids):,} tokens: the model has no positions left for an "
                "answer. Leave it out"
            )
        return sample
