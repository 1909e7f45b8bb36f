"""Read the files of a run for its page. A missing or broken file gives a message for the page, and no error."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from llava_ds.constants import DataError
from llava_ds.files.reading import read_json, read_rows
from llava_ds.files.writing import run_folder
from llava_ds.tracking.blocks import note
from llava_ds.tracking.series import is_number, running_mean

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's folder. saved_s: time of saving, in seconds since 1970; whole: True if it has a manifest."""

    name: str
    step: int
    num_bytes: int
    saved_s: float
    whole: bool


@dataclass(frozen=True)
class RunFiles:
    """Everything about a run that a report shows. folder: the folder of its logs; record: content of run.json.

    metrics, evals, skipped, skipped_steps: rows of the .jsonl files of these names. evaluations: content of
    run/evaluate.py's files, by name. problems: message for each missing or damaged file, by name.
    """

    output_dir: Path
    folder: Path
    record: dict
    ds_config: dict
    metrics: list[dict]
    evals: list[dict]
    skipped: list[dict]
    skipped_steps: list[dict]
    evaluations: dict[str, dict]
    checkpoints: list[Checkpoint]
    problems: dict[str, str] = field(default_factory=dict)

    @property
    def flags(self) -> dict[str, object]:
        flags = self.record.get("arguments")
        return flags if isinstance(flags, dict) else {}

    @property
    def name(self) -> str:
        """--run_name, or the folder's name."""
        return str(self.flags.get("run_name") or self.output_dir.resolve().name)

    def column(self, name: str, rows: list[dict] | None = None) -> tuple[list[int], list[float]]:
        """Return the steps and values of a number, from all rows that have it. If the value is a list, its first
        element is used."""
        steps, values = [], []
        for row in self.metrics if rows is None else rows:
            value = row.get(name)
            value = value[0] if isinstance(value, list) and value else value
            if is_number(value):
                steps.append(row["step"])
                values.append(float(value))
        return steps, values

    def blocks_of(self, name: str, shown: Callable[[list[dict], Path], list]) -> list:
        """Return the blocks that `shown` makes of a .jsonl file's rows, or a note that the file is damaged."""
        problems: dict[str, str] = {}
        rows = [row for row in _rows(self.folder, name, problems) if is_number(row.get("step"))]
        if problems:
            return [note(problems[name], "warn")]
        return shown(rows, self.output_dir) if rows else []

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers that summarise the run, without those that its files lack."""
        found: dict[str, float] = {}
        if self.metrics:
            last = self.metrics[-1]
            found["steps"] = last["step"]
            found |= {name: last[name] for name in ("epoch", "skipped_steps") if is_number(last.get(name))}
            means = running_mean(self.column("loss")[1])
            if means and math.isfinite(means[-1]):
                found["loss"] = means[-1]
        if held_out := self.column("loss", self.evals)[1]:
            found["held_out_loss"] = held_out[-1]
        for name in ("samples", "tokens", "supervised_tokens", "step_time_s", "data_wait_s", "broken_samples"):
            if values := self.column(name)[1]:
                found[name] = sum(values)
        if found.get("step_time_s") and "data_wait_s" in found:
            found["wait"] = found["data_wait_s"] / found["step_time_s"]
        for name in ("tokens_per_s", "mfu"):
            if values := sorted(self.column(name)[1]):
                # The median, because the first steps and steps next to a save are not typical.
                found[name] = values[len(values) // 2]
        if values := self.column("peak_memory_bytes")[1]:
            found["peak_memory_bytes"] = max(values)
        return found


def read_run(output_dir: Path) -> RunFiles:
    """Read the files of a run. Missing or broken files are noted in `problems`, and raise no error."""
    problems: dict[str, str] = {}

    folder = run_folder(output_dir)
    rows = partial(_rows, folder, problems=problems)

    def stepped(name: str, required: bool = False) -> list[dict]:
        found = [row for row in rows(name, required=required) if is_number(row.get("step"))]
        if required and not found and name not in problems:
            problems[name] = f"{name} has no steps yet."
        return found

    def whole(name: str, folder: Path = folder) -> dict:
        return _read(folder / name, lambda path: read_json(path, dict), {}, problems, required=True)

    return RunFiles(
        output_dir=output_dir,
        folder=folder,
        record=whole("run.json"),
        ds_config=whole("ds_config.json"),
        metrics=stepped("metrics.jsonl", required=True),
        evals=stepped("evals.jsonl"),
        skipped=rows("skipped.jsonl"),
        skipped_steps=stepped("skipped_steps.jsonl"),
        evaluations={path.name: whole(path.name, output_dir) for path in sorted(output_dir.glob("evaluation*.json"))},
        checkpoints=_checkpoints(output_dir),
        problems=problems,
    )


def is_run(folder: Path) -> bool:
    """Return True if a folder has files of a run."""
    return any((run_folder(folder) / name).is_file() for name in ("run.json", "metrics.jsonl"))


def _rows(folder: Path, name: str, problems: dict[str, str], required: bool = False) -> list[dict]:
    """Return the rows of a .jsonl file. Adds a message to `problems` if lines are damaged or the file can't be read."""
    found, damaged = _read(folder / name, read_rows, ([], []), problems, required)
    if damaged:
        lines = ", ".join(map(str, damaged[:3])) + (", …" if len(damaged) > 3 else "")
        problems[name] = f"{name} can't be read in some lines ({lines})."
    return found


def _read(path: Path, read: Callable[[Path], object], nothing: object, problems: dict[str, str], required: bool):
    try:
        return read(path)
    except FileNotFoundError:
        if required:
            problems[path.name] = f"There is no {path.name} in this folder."
    except DataError as error:
        problems[path.name] = f"{path.name} can't be read ({error})."
    return nothing


def _checkpoints(output_dir: Path) -> list[Checkpoint]:
    """Return the checkpoints, sorted by step."""
    found = []
    for path in output_dir.glob("checkpoint-*"):
        if match := _CHECKPOINT.fullmatch(path.name):
            try:
                sizes = [file.stat().st_size for file in path.rglob("*") if not file.is_dir()]
                saved_s = path.stat().st_mtime
            except OSError:
                continue  # it is being replaced right now
            manifest = (path / "manifest.json").is_file()
            found.append(Checkpoint(path.name, int(match[1]), sum(sizes), saved_s, manifest))
    return sorted(found, key=lambda checkpoint: checkpoint.step)
