"""Benchmarks by name, with their readers and metrics."""

from collections.abc import Callable
from dataclasses import dataclass

from llava_ds.constants import ConfigError, DataError
from llava_ds.extensions.benchmarks.benchmark_files import Given
from llava_ds.extensions.benchmarks.benchmarks import BENCHMARKS
from llava_ds.extensions.benchmarks.choice_questions import MMBENCH, SCIENCEQA
from llava_ds.extensions.benchmarks.llava_questions import llava, preferences
from llava_ds.extensions.benchmarks.open_questions import CAPTIONS, GQA, POPE, TEXTVQA, VQAV2
from llava_ds.extensions.benchmarks.question import Question


@dataclass(frozen=True)
class Task:
    """A benchmark's reader and metric. metric: a key of scores.METRICS, or None to use --metric."""

    read: Callable[[Given], list[Question]]
    metric: str | None


# Benchmarks whose files contain names of images in --image_folder.
WITH_IMAGE_FOLDER = {"caption": CAPTIONS, "vqav2": VQAV2, "textvqa": TEXTVQA, "scienceqa": SCIENCEQA, "gqa": GQA}
TASKS = {
    "llava": Task(llava, None),
    "preference": Task(preferences, "preference"),
    **{
        name: Task(benchmark.read, benchmark.metric)
        for name, benchmark in {**WITH_IMAGE_FOLDER, "pope": POPE, "mmbench": MMBENCH, **BENCHMARKS}.items()
    },
}


def read_questions(task: str, given: Given, limit: int | None) -> list[Question]:
    """Read the first `limit` questions of a benchmark, or all if limit is None. Raises ConfigError or DataError."""
    if given.image_folder is None and task in WITH_IMAGE_FOLDER:
        raise ConfigError(f"--image_folder is missing: {task}'s files name images: give their folder")
    questions = TASKS[task].read(given)[:limit]
    if not questions:
        raise DataError(f"{given.data_path}: it contains no questions")
    return questions
