"""The benchmarks by name: who reads their files, and how they are scored."""

from collections.abc import Callable
from dataclasses import dataclass

from llava_ds.constants import ConfigError, DataError
from llava_ds.evaluation.benchmark_files import Given
from llava_ds.evaluation.choice_questions import mmbench, scienceqa
from llava_ds.evaluation.llava_questions import captions, llava, preferences
from llava_ds.evaluation.open_questions import gqa, pope, textvqa, vqav2
from llava_ds.evaluation.question import Question


@dataclass(frozen=True)
class Task:
    """metric: of scores.METRICS; None: the user's --metric."""

    read: Callable[[Given], list[Question]]
    metric: str | None


TASKS = {
    "llava": Task(llava, None),
    "caption": Task(captions, "caption"),
    "vqav2": Task(vqav2, "vqa"),
    "textvqa": Task(textvqa, "textvqa"),
    "pope": Task(pope, "yes_no"),
    "scienceqa": Task(scienceqa, "choice"),
    "gqa": Task(gqa, "gqa"),
    "mmbench": Task(mmbench, "circular"),
    "preference": Task(preferences, "preference"),
}
# What --metric offers for a LLaVA-format file.
CHOSEN_METRICS = ("exact", "vqa", "yes_no", "choice", "caption")


def read_questions(task: str, given: Given, limit: int | None) -> list[Question]:
    """The first questions of a benchmark, all if there is no limit. Raises ConfigError or DataError."""
    if given.image_folder is None and task not in ("llava", "mmbench", "preference"):
        raise ConfigError(f"--image_folder is missing: {task}'s files name images, say where they lie")
    questions = TASKS[task].read(given)[:limit]
    if not questions:
        raise DataError(f"{given.data_path}: there is no question in it")
    return questions
