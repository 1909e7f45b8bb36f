"""Repair damaged files that an earlier start left in --output_dir. The originals are renamed and reported."""

import fnmatch
import os
from collections.abc import Iterable
from pathlib import Path

from typing_extensions import NotRequired, TypedDict

from llava_ds.constants import ConfigError, DataError
from llava_ds.extensions.table import EXTENSIONS
from llava_ds.files.jsonl import replace_rows
from llava_ds.files.reading import move_aside, read_rows, why_not_regular
from llava_ds.files.writing import RUN_FOLDER
from llava_ds.runtime.ranks import Ranks, broadcast_from_first, print_first


class _Step(TypedDict):
    step: int


class _Metrics(TypedDict):
    """The fields of a metrics.jsonl row that later code reads."""

    step: int
    loss: float
    epoch: float
    lr: list[float]
    tokens: int
    grad_norm: NotRequired[float | None]


class _Skipped(TypedDict):
    file: str
    index: int
    step: NotRequired[int]


ROWS = {
    "metrics.jsonl": _Metrics,
    "evals.jsonl": _Step,
    "skipped_steps.jsonl": _Step,
    "skipped.jsonl": _Skipped,
    **{name: _Step for each in EXTENSIONS.values() for name in each.leaves.split() if name.endswith(".jsonl")},
}
OTHERS = ("run.json", "ds_config.json", "trainer_state.json", "data_files.parquet")  # rewritten by every start


def mend_side_files(output_dir: Path, names: Iterable[str], ranks: Ranks) -> None:
    """Repair a run's files: rename what is not a regular file, and drop damaged lines from .jsonl files. Collective.

    names: file names or patterns of the run's files. Raises ConfigError on every rank if a file can't be renamed.
    """
    wanted = (*names, *OTHERS)

    def mend_all() -> None:
        folder = output_dir / RUN_FOLDER
        if os.path.lexists(folder) and not folder.is_dir():
            move_aside(folder)
        for path in sorted([*output_dir.glob("*"), *folder.glob("*")]):
            if any(fnmatch.fnmatchcase(path.name, name) for name in wanted):
                try:
                    _mend(path)
                except OSError as error:
                    problem = f"{path} is damaged and can't be moved aside ({error.strerror}): move it yourself"
                    raise ConfigError(problem) from error

    broadcast_from_first(ranks, mend_all)


def _mend(path: Path) -> None:
    problem = why_not_regular(path)
    rows, damaged = [], []
    if problem is None and path.name in ROWS:
        try:
            rows, damaged = read_rows(path, ROWS[path.name])
        except DataError as error:
            problem = str(error)
    if damaged:
        lines = ", ".join(map(str, damaged[:5])) + (", …" if len(damaged) > 5 else "")
        problem = f"{len(damaged)} lines are not valid rows ({lines}) and are removed, {len(rows)} are kept"
    if problem is None:
        return
    kept = move_aside(path)
    if damaged:
        replace_rows(path, rows)
    print_first(f"WARNING: {path} is damaged: {problem}; the original is now {kept.name}")
