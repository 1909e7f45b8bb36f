"""Copies of metrics.jsonl in other formats: metrics.csv for spreadsheets, with a line per optimizer step, and
trainer_state.json for programs that read the format of Hugging Face's Trainer."""

import json
from collections.abc import Iterable
from pathlib import Path

from llava_ds.files.jsonl import append, read_metrics
from llava_ds.files.writing import run_folder, write_whole

TRAINER_STATE = "trainer_state.json"


class MetricsTable:
    """Writes metrics.csv: appends rows, and rewrites the file from metrics.jsonl at each start and after an error.

    A rewrite takes the columns from the scalar numbers of the newest row, so a new number in the log becomes a column.
    The rewrite is atomic and removes half or repeated lines of a killed run.
    """

    def __init__(self, path: Path, log: Path) -> None:
        """log: path of metrics.jsonl. It has to be written before this table."""
        self.path, self.log = path, log
        self.follows = False  # True if metrics.csv has all rows of metrics.jsonl
        self.columns: list[str] = []

    def write(self, rows: list[dict]) -> None:
        """Add rows that metrics.jsonl already has. If the disk is full, a later call rewrites the table."""
        try:
            if self.follows:
                append(self.path, as_csv(rows, self.columns))
                return
            stored = read_metrics(self.log)
            row = (stored or rows)[-1]  # if the disk is full, the log may be empty
            self.columns = [name for name, each in row.items() if name == "lr" or not isinstance(each, (list, dict))]
            write_whole(self.path, ",".join(self.columns) + "\n" + as_csv(stored, self.columns))
            self.follows = True
        except OSError:
            self.follows = False  # metrics.jsonl, on the same disk, reports the error


def as_csv(rows: Iterable[dict], columns: list[str]) -> str:
    """Return the rows as CSV lines, with six significant digits; missing values are empty."""
    return "".join(",".join(_cell(row.get(name)) for name in columns) + "\n" for row in rows)


def _cell(value: object) -> str:
    kind = type(value)  # compared below, because isinstance is slower and this runs for each cell of every step
    if kind is int:
        return str(value)
    if kind is list:
        value, kind = max(value), float  # the highest rate of the parameter groups
    return f"{value:.6g}" if kind is float else "" if value is None else str(value)


def write_trainer_state(output_dir: Path, batch_size: int, num_epochs: float) -> None:
    """Write trainer_state.json from metrics.jsonl.

    Source: transformers' TrainerState, as saved by LLaVA's scripts.
    """
    rows = read_metrics(run_folder(output_dir) / "metrics.jsonl")
    history = [
        {
            "epoch": row["epoch"],
            "step": row["step"],
            "loss": row["loss"],
            "learning_rate": row["lr"][0],
            **({} if row["grad_norm"] is None else {"grad_norm": row["grad_norm"]}),
        }
        for row in rows
    ]
    last = rows[-1] if rows else {"step": 0, "epoch": 0.0}
    state = {
        "epoch": last["epoch"],
        "global_step": last["step"],
        "max_steps": last["step"],
        "num_train_epochs": num_epochs,
        "train_batch_size": batch_size,
        "num_input_tokens_seen": sum(row["tokens"] for row in rows),
        "best_metric": None,
        "best_model_checkpoint": None,
        "is_hyper_param_search": False,
        "is_local_process_zero": True,
        "is_world_process_zero": True,
        "log_history": history,
        "trial_name": None,
        "trial_params": None,
    }
    write_whole(output_dir / TRAINER_STATE, json.dumps(state, indent=2) + "\n")
