"""The benchmarks by name: who reads their files, and how they are scored."""

from collections.abc import Callable
from dataclasses import dataclass

from llava_ds.constants import ConfigError, DataError
from llava_ds.evaluation.benchmark_files import Given
from llava_ds.evaluation.benchmarks import BENCHMARKS
from llava_ds.evaluation.choice_questions import mmbench, scienceqa
from llava_ds.evaluation.llava_questions import captions, llava, preferences
from llava_ds.evaluation.open_questions import gqa, pope, textvqa, vqav2
from llava_ds.evaluation.question import Question


@dataclass(frozen=True)
class Task:
    """metric: of scores.METRICS; None: the user's --metric; names_images: in --image_folder, all that it asks about."""

    read: Callable[[Given], list[Question]]
    metric: str | None
    names_images: bool = False


TASKS = {
    "llava": Task(llava, None),
    "caption": Task(captions, "caption", names_images=True),
    "vqav2": Task(vqav2, "vqa", names_images=True),
    "textvqa": Task(textvqa, "textvqa", names_images=True),
    "pope": Task(pope, "yes_no"),
    "scienceqa": Task(scienceqa, "choice", names_images=True),
    "gqa": Task(gqa, "gqa", names_images=True),
    "mmbench": Task(mmbench, "circular"),
    "preference": Task(preferences, "preference"),
    **{name: Task(benchmark.read, benchmark.metric) for name, benchmark in BENCHMARKS.items()},
}


def read_questions(task: str, given: Given, limit: int | None) -> list[Question]:
    """The first questions of a benchmark, all if there is no limit. Raises ConfigError or DataError."""
    if given.image_folder is None and TASKS[task].names_images:
        raise ConfigError(f"--image_folder is missing: {task}'s files name images, say where they lie")
    questions = TASKS[task].read(given)[:limit]
    if not questions:
        raise DataError(f"{given.data_path}: there is no question in it")
    return questions
