"""Copies of metrics.jsonl in other formats: metrics.csv for spreadsheets, with a line per optimizer step, and
trainer_state.json in the format of Hugging Face's Trainer, for programs that read it."""

import json
from collections.abc import Iterable
from pathlib import Path

from llava_ds.files.jsonl import append, read_metrics
from llava_ds.files.writing import run_folder, write_whole

TRAINER_STATE = "trainer_state.json"


class MetricsTable:
    """metrics.csv, kept in step with metrics.jsonl: appended to, and rewritten from it when in doubt.

    Its columns are the scalar numbers of the newest row when it is rewritten, so a new number in the log becomes a
    column. A killed run leaves no half line and no repeated line: the next start rewrites the file, in one rename.
    """

    def __init__(self, path: Path, log: Path) -> None:
        """log: metrics.jsonl; it gets each row before this table does."""
        self.path, self.log = path, log
        self.follows = False  # True if the file has all rows written so far
        self.columns: list[str] = []

    def write(self, rows: list[dict]) -> None:
        """Add rows of metrics.jsonl. With a full disk the table is incomplete until there is room again."""
        try:
            if self.follows:
                append(self.path, as_csv(rows, self.columns))
                return
            stored = read_metrics(self.log)
            row = (stored or rows)[-1]  # a full disk may have kept all rows out of the log
            self.columns = [name for name, each in row.items() if name == "lr" or not isinstance(each, (list, dict))]
            write_whole(self.path, ",".join(self.columns) + "\n" + as_csv(stored, self.columns))
            self.follows = True
        except OSError:
            self.follows = False  # metrics.jsonl, on the same disk, reports the error


def as_csv(rows: Iterable[dict], columns: list[str]) -> str:
    """Return lines of the table, with six digits; missing values are empty."""
    return "".join(",".join(_cell(row.get(name)) for name in columns) + "\n" for row in rows)


def _cell(value: object) -> str:
    kind = type(value)  # fast: called for each cell of every step
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
