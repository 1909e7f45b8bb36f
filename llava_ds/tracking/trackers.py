"""Send the logged numbers to the trackers in --report_to (TensorBoard, W&B, trackio), besides the run's own files."""

import math
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from llava_ds.config.arguments import Arguments
from llava_ds.config.rules import is_installed
from llava_ds.constants import ConfigError
from llava_ds.files.jsonl import rows_of
from llava_ds.runtime.ranks import Ranks, broadcast_from_first, print_first
from llava_ds.runtime.redact import redact
from llava_ds.tracking.series import objective_numbers

# Maximum points per curve. Longer runs send every n-th step only. TensorBoard draws 1,000.
MOST_POINTS = 5_000
CLOSING_S = 60.0
PROJECT = "llava_ds"  # default of WANDB_PROJECT and TRACKIO_PROJECT


class Tracker(Protocol):
    """A tracker. It writes points without a buffer, so a killed run loses none."""

    def write(self, values: dict[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class Trackers:
    """All requested trackers. A tracker that fails is reported and dropped, because the run's own files have all."""

    def __init__(self, opened: dict[str, Tracker], num_steps: int) -> None:
        self.opened = opened
        self.every = math.ceil(num_steps / MOST_POINTS)
        self.num_steps = num_steps

    def write(self, rows: list[dict]) -> None:
        """Write rows of metrics.jsonl."""
        for row in rows if self.opened else ():
            if row["step"] % self.every == 0 or row["step"] == self.num_steps:
                self.log(scalars(row), row["step"])

    def log(self, values: dict[str, float], step: int) -> None:
        """Write numbers of a step to all trackers. values: number by the name of its curve, like eval/loss."""
        self._all(lambda tracker: tracker.write(values, step))

    def close(self) -> None:
        """Close the trackers, but wait at most CLOSING_S seconds. Points that are not sent by then are lost."""
        thread = threading.Thread(target=lambda: self._all(lambda tracker: tracker.close()), daemon=True)
        thread.start()
        thread.join(CLOSING_S)
        if thread.is_alive():
            print_first(
                f"WARNING: {', '.join(self.opened)} did not close within {CLOSING_S:.0f} s: not waiting any longer"
            )
        self.opened = {}

    def _all(self, act: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self.opened.items()):
            try:
                act(tracker)
            except Exception as error:  # a tracker's failure must not end the run
                del self.opened[name]
                print_first(
                    f"WARNING: {name} failed ({type(error).__name__}: {error}) and receives no more data: "
                    "metrics.jsonl has everything"
                )


def open_trackers(args: Arguments, output_dir: Path, resume_step: int, num_steps: int, ranks: Ranks) -> Trackers:
    """Open the trackers of --report_to on rank 0; none on other ranks. Collective.

    A resumed run repeats the steps after resume_step. TensorBoard drops the old points; Logged does not send the steps
    again, and reads from metrics.jsonl which were sent, so call this before that file is rewritten. Raises ConfigError
    on every rank if a requested tracker can't be opened.
    """
    asked = args.training.report_to
    if asked is None and not is_installed("tensorboard"):
        print_first("no TensorBoard curves: pip install 'llava_ds[tensorboard]', or give --report_to none")
        asked = ""
    names = ["tensorboard"] if asked is None else [name for name in asked.split(",") if name]
    opened: dict[str, Tracker] = {}

    def open_all() -> None:
        for name in names:
            try:
                opened[name] = OPEN[name](args, output_dir, resume_step)
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                if asked is not None:
                    problem = f"--report_to {name} can't be opened ({why}): {REMEDIES[name]}, or leave it out"
                    raise ConfigError(problem) from error
                print_first(f"WARNING: no TensorBoard curves ({why})")

    before = random.getstate()  # trackers use random numbers for names
    broadcast_from_first(ranks, open_all)
    random.setstate(before)
    return Trackers(opened, num_steps)


def scalars(row: dict) -> dict[str, float]:
    """Return a row of metrics.jsonl as numbers by curve name. Names follow Hugging Face's Trainer if it has them."""
    values = {
        "train/loss": row["loss"],
        "train/learning_rate": row["lr"][0],
        "train/grad_norm": row["grad_norm"],
        "train/epoch": row["epoch"],
        "speed/tokens_per_s": row["tokens_per_s"],
        "speed/mfu": row["mfu"],
        "speed/step_time_s": row["step_time_s"],
        "speed/data_wait_s": row["data_wait_s"],
        "memory/peak_gb": row["peak_memory_bytes"] / 1e9,
    }
    rates = {f"train/learning_rate_{i}": rate for i, rate in enumerate(row["lr"]) if rate != row["lr"][0]}
    bad = {f"train/{name}": row[name] for name in ("skipped_steps", "broken_samples") if row[name]}
    by_source = {f"train/loss/{name}": loss for name, loss in row.get("source_losses", {}).items()}
    of_objective = {f"train/{name}": value for name, value in objective_numbers(row).items()}
    curves = {**values, **rates, **by_source, **of_objective, **bad}
    return {name: value for name, value in curves.items() if value is not None}


class TensorBoard:
    """Writes event files to output_dir/tensorboard, with tensorboard's own record writer and protos.

    torch's SummaryWriter buffers points for up to two minutes, so a killed run would lose them, and its thread prints a
    traceback when the disk is full.
    """

    def __init__(self, args: Arguments, output_dir: Path, resume_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.event, self.points = Event, Event()  # the event of the last step, reused for the next
        folder = output_dir / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        # Readers read the files in the order of their names.
        number = len(list(folder.glob("events.out.tfevents.*")))
        name = f"events.out.tfevents.{int(time.time()):010d}.{number:05d}.{socket.gethostname()}.{os.getpid()}"
        self.records = RecordWriter((folder / name).open("xb", buffering=0))
        # A START event makes readers ignore events of earlier files from this step on.
        self._add(resume_step + 1, file_version="brain.Event:2")
        self._add(resume_step + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, values: dict[str, float], step: int) -> None:
        points = self.points.summary.value
        if [point.tag for point in points] != list(values):  # usually the same as in the previous step
            del points[:]
            for name in values:
                points.add(tag=name)
        for point, number in zip(points, values.values()):
            point.simple_value = number
        self.points.wall_time, self.points.step = time.time(), step
        self.records.write(self.points.SerializeToString())

    def close(self) -> None:
        self.records.close()

    def _add(self, step: int, **content: object) -> None:
        self.records.write(self.event(wall_time=time.time(), step=step, **content).SerializeToString())


class Logged:
    """W&B, or trackio (it has the same methods). Their own processes send the data even if this one is killed.

    A resumed run continues the same tracker run. Points can't be deleted there, so steps that are repeated after the
    checkpoint are not sent again. Within a start, steps never decrease: a return to a checkpoint restores only the
    weights.
    """

    def __init__(self, run, last_step: int) -> None:
        """last_step: last step that an earlier start sent, 0 if none."""
        self.run, self.last_step = run, last_step

    def write(self, values: dict[str, float], step: int) -> None:
        if step > self.last_step:
            self.run.log(values, step=step)

    def close(self) -> None:
        self.run.finish()


def _open_wandb(args: Arguments, output_dir: Path, resume_step: int) -> Logged:
    """Open a W&B run, configured by WANDB_MODE and W&B's other variables.

    A resumed run continues the earlier W&B run, and updates its flags.
    """
    import wandb

    kept = output_dir / "wandb" / "run-id"
    kept.parent.mkdir(parents=True, exist_ok=True)
    begins = resume_step == 0 or not kept.is_file()
    if begins:
        kept.write_text(os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4), encoding="utf-8")
    # Don't let W&B send the command line or the printed output, because their secrets are not redacted.
    settings = wandb.Settings(console="off", x_disable_meta=True, disable_git=True, save_code=False, silent=True)
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        id=kept.read_text(encoding="utf-8").strip(),
        resume="allow",
        name=redact(called(args)),
        dir=str(output_dir),
        settings=settings,
    )
    run.config.update(redact(args.as_dict()), allow_val_change=True)  # allows changed flags
    return Logged(run, 0 if begins else _last_step(output_dir, resume_step))


def _open_trackio(args: Arguments, output_dir: Path, resume_step: int) -> Logged:
    """Open a trackio run in the folder TRACKIO_DIR. `trackio show` displays it."""
    import trackio

    run = trackio.init(
        project=os.environ.get("TRACKIO_PROJECT", PROJECT),
        name=redact(called(args)),
        resume="allow" if resume_step else "never",
        config=redact(args.as_dict()),
        embed=False,
    )
    return Logged(run, _last_step(output_dir, resume_step))


def _last_step(output_dir: Path, resume_step: int) -> int:
    """Return the last step in metrics.jsonl that an earlier start logged; 0 if the run does not resume."""
    steps = [row["step"] for row in rows_of(output_dir / "metrics.jsonl")] if resume_step else []
    return max(steps, default=0)


def called(args: Arguments) -> str:
    """Return the run's name: --run_name, or the name of --output_dir."""
    return args.training.run_name or Path(args.training.output_dir).resolve().name


OPEN: dict[str, Callable[[Arguments, Path, int], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": _open_wandb,
    "trackio": _open_trackio,
}
REMEDIES = {
    "tensorboard": "check that --output_dir can be written to",
    "wandb": "log in with `wandb login`, or set WANDB_MODE=offline",
    "trackio": "check TRACKIO_DIR",
}
