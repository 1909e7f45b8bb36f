"""A run's checkpoints, saved at once or in the background, one at a time; failed saves are counted."""

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from llava_ds.checkpoint import commit
from llava_ds.checkpoint.resume import ResumePlan
from llava_ds.config.arguments import TrainingArguments
from llava_ds.engine.shards.checkpoint_writer import ENGINE, CheckpointWriter, save_engine
from llava_ds.engine.shards.pieces import layout_file, layout_text
from llava_ds.extensions.base import StatePart
from llava_ds.files.writing import described
from llava_ds.runtime.random_states import random_states
from llava_ds.runtime.ranks import Ranks, broadcast_from_first, print_first
from llava_ds.runtime.waiting import waiting

MAX_FAILED_SAVES = 3  # consecutive failures that end the run


@dataclasses.dataclass(frozen=True)
class ModelWriter:
    """Writes only the model (--save_only_model).

    form: "hf", "llava", "adapter" or "projector"; write: writes into a folder; collective; raises OSError on rank 0
    only, after the other ranks are done.
    """

    form: str
    write: Callable[[Path], None]


def can_be_resumed(training: TrainingArguments) -> bool:
    """Return True if the same command resumes from a run's checkpoints."""
    return training.save_strategy != "no" and not training.save_only_model


def describe_saving(training: TrainingArguments) -> str:
    """Describe in a clause whether the last step is saved, and the effect of the same command."""
    if training.save_strategy == "no":
        return "not saved (--save_strategy no)"
    if training.save_only_model:
        return "saved, only the model (--save_only_model): a run can't be resumed from it"
    return "saved; the same command resumes from it"


@dataclasses.dataclass
class _Save:
    """A save in progress. keeps_all: keep older checkpoints; waited_s: time that training has waited for it so far."""

    step: int
    scratch: Path
    writer: CheckpointWriter
    keeps_all: bool
    waited_s: float


class Saver:
    """Saves a run's checkpoints, at once or in the background, one at a time. All methods are collective."""

    def __init__(
        self,
        engine,
        training: TrainingArguments,
        resume: ResumePlan,
        ranks: Ranks,
        model_writer: ModelWriter | None = None,
    ) -> None:
        """model_writer: for checkpoints with only the model."""
        self.model_writer = model_writer
        self.protected_checkpoint: Callable[[], Path | None] = lambda: None  # returns, on rank 0, a checkpoint to keep
        self.engine, self.output_dir, self.ranks = engine, Path(training.output_dir), ranks
        self.trainer = {"identity": dataclasses.asdict(resume.identity), "weights": resume.weights}
        self.limit, self.background = training.save_total_limit, training.async_save
        self.last_good = resume.point.path
        self.states: list[StatePart] = []  # extensions' parts, set by the session
        self.num_failed, self.failure = 0, ""  # number in a row, and the last failure
        self._save: _Save | None = None
        self._reduction: tuple[torch.distributed.Work, torch.Tensor] | None = None

    def after_step(self, step: int, saves: bool, last: bool = False, keeps_all: bool = False) -> str | None:
        """Save this step's checkpoint if `saves` is True, and commit a finished background save.

        last: this is the last step, so everything has to be on the disk on return; keeps_all: delete no older
        checkpoint. Returns the reason to end the run, the same on every rank, or None.
        """
        if self._save is not None and (saves or last or self._all_have_written()):
            self._commit_written()
        if saves and self.model_writer is not None:
            self._save_model(step, keeps_all)
        elif saves:
            self._begin(step, keeps_all)
            if self._save is not None and (last or not self.background):
                self._commit_written()
        if self.num_failed and (last or self.num_failed >= MAX_FAILED_SAVES):
            return self._problem(last)
        return None

    def rewind(self) -> Path | None:
        """Return the engine to the last good checkpoint (training_state.rewind); returns it, or None without one.

        A save in progress is committed first. If the last one is damaged or gone, the newest complete one is used.
        """
        if self._save is not None:
            self._commit_written()
        if self.last_good is None:
            return None
        path, lines = broadcast_from_first(self.ranks, self._whole)
        print_first(*lines)
        if path is not None:
            from llava_ds.checkpoint.training_state import rewind

            rewind(self.engine, path, self.ranks)
        self.last_good = path
        return path

    def _whole(self) -> tuple[Path | None, list[str]]:
        from llava_ds.checkpoint.trainer_file import checkpoint_problem
        from llava_ds.checkpoint.verification import newest_whole

        problem = checkpoint_problem(self.last_good)
        if problem is None:
            return self.last_good, []
        path, lines = newest_whole(self.output_dir, checkpoint_problem)
        return path, [f"{self.last_good} is not used: {problem}", *lines]

    def _begin(self, step: int, keeps_all: bool) -> None:
        """Write a checkpoint's files, or copy their content to be written in the background."""
        started = time.perf_counter()
        try:
            scratch = commit.begin(self.output_dir, step, self.ranks)
        except commit.SaveFailed as error:
            return self._failed(step, str(error))
        writer = CheckpointWriter(self.engine._config, scratch, self.background, reads_back=self.limit is not None)
        save_engine(self.engine, writer)
        writer.save_text(layout_text(self.engine), layout_file(scratch, self.ranks.rank))
        writer.save(random_states(self.ranks.device), scratch / f"random-{self.ranks.rank}.pt")
        if self.ranks.is_first:
            writer.save_text(json.dumps({"step": step, **self.trainer}, indent=1), scratch / commit.TRAINER)
            # For the zero_to_fp32.py that DeepSpeed copies there.
            writer.save_text(ENGINE, scratch / "latest")
            for part in self.states:
                if tensors := part.of(self.engine.module):
                    writer.save(tensors, scratch / part.file)
        writer.start()
        self._save = _Save(step, scratch, writer, keeps_all, time.perf_counter() - started)

    def _save_model(self, step: int, keeps_all: bool) -> None:
        """Save only the model, as a folder that opens by itself, with a checkpoint's manifest."""
        started, problem = time.perf_counter(), None
        try:
            scratch = commit.begin(self.output_dir, step, self.ranks)
        except commit.SaveFailed as error:
            return self._failed(step, str(error))
        try:
            self.model_writer.write(scratch)
            if self.ranks.is_first:
                trainer = {"step": step, **self.trainer, "model_only": self.model_writer.form}
                (scratch / commit.TRAINER).write_text(json.dumps(trainer, indent=1), encoding="utf-8")
        except OSError as error:
            place = Path(error.filename or scratch)
            problem = described(place.relative_to(scratch) if place.is_relative_to(scratch) else place, error)
        try:
            path = commit.commit(scratch, {}, problem, self.ranks)
        except commit.SaveFailed as error:
            return self._failed(step, str(error))
        self._is_saved(path, keeps_all)
        print_first(f"{path.name} is saved (only the model): training waited {time.perf_counter() - started:.2f} s")

    def _is_saved(self, path: Path, keeps_all: bool) -> None:
        if self.ranks.is_first and not keeps_all:
            commit.keep_newest(self.output_dir, self.limit, self.protected_checkpoint())
        self.last_good, self.num_failed = path, 0

    def _all_have_written(self) -> bool:
        """Return True if every rank's writer is done, the same on all ranks, without waiting for a writer.

        A reduction started at one step is read at the next, long after its arrival.
        """
        if self.ranks.world_size == 1:
            return self._save.writer.is_done
        if self._reduced():
            return True
        flag = torch.tensor([int(self._save.writer.is_done)])
        group, smallest = self.ranks.patient_group, torch.distributed.ReduceOp.MIN
        self._reduction = (torch.distributed.all_reduce(flag, smallest, group, async_op=True), flag)
        return False

    def _reduced(self) -> bool:
        """Return the result of the last reduction; False if there was none."""
        if self._reduction is None:
            return False
        work, flag = self._reduction
        self._reduction = None
        with waiting("the other ranks' answer on a save"):
            work.wait()
        return bool(flag)

    def _commit_written(self) -> None:
        """Commit the checkpoint once all ranks have written it."""
        save, self._save = self._save, None
        self._reduced()
        started = time.perf_counter()
        save.writer.finish()
        try:
            path = commit.commit(save.scratch, save.writer.written, save.writer.problem, self.ranks)
        except commit.SaveFailed as error:
            return self._failed(save.step, str(error))
        self._is_saved(path, save.keeps_all)
        waited_s = save.waited_s + time.perf_counter() - started
        behind = f", written in {save.writer.took_s:.2f} s in the background" if self.background else ""
        print_first(f"{path.name} is saved: training waited {waited_s:.2f} s{behind}")

    def _failed(self, step: int, why: str) -> None:
        self.num_failed += 1
        self.failure = f"checkpoint-{step} could not be saved to {self.output_dir}: {why}"
        print_first(f"WARNING: {self.failure}. {self._good()}")

    def _problem(self, last: bool) -> str:
        times = "" if last else f"{self.num_failed} saves in a row failed. "
        return f"{times}{self.failure}. {self._good()}: fix the cause and start again to resume there"

    def _good(self) -> str:
        return "No checkpoint exists yet" if self.last_good is None else f"The last good checkpoint is {self.last_good}"
