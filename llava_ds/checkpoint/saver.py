"""Save a run's checkpoints, one at a time, immediately or in the background, and count failed saves."""

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
    """Writes checkpoints with only the model (--save_only_model).

    form: "hf", "llava", "adapter" or "projector"; write: writes the model into a folder. It is collective, and raises
    OSError on rank 0 only, after the other ranks are done.
    """

    form: str
    write: Callable[[Path], None]


def can_be_resumed(training: TrainingArguments) -> bool:
    """Return True if the run saves checkpoints from which the same command can resume."""
    return training.save_strategy != "no" and not training.save_only_model


def describe_saving(training: TrainingArguments) -> str:
    """Return a clause that says whether the last step is saved, and whether the same command resumes from it."""
    if training.save_strategy == "no":
        return "not saved (--save_strategy no)"
    if training.save_only_model:
        return "saved, only the model (--save_only_model): a run can't be resumed from it"
    return "saved; the same command resumes from it"


@dataclasses.dataclass
class _Save:
    """A save in progress. keeps_all: True to delete no older checkpoints; waited_s: seconds training waited for it."""

    step: int
    scratch: Path
    writer: CheckpointWriter
    keeps_all: bool
    waited_s: float


class Saver:
    """Saves a run's checkpoints, one at a time, immediately or in the background. All methods are collective."""

    def __init__(
        self,
        engine,
        training: TrainingArguments,
        resume: ResumePlan,
        ranks: Ranks,
        model_writer: ModelWriter | None = None,
    ) -> None:
        """model_writer: writes checkpoints with only the model; None to save the full training state."""
        self.model_writer = model_writer
        self.protected_checkpoint: Callable[[], Path | None] = lambda: None  # on rank 0, a checkpoint not to delete
        self.engine, self.output_dir, self.ranks = engine, Path(training.output_dir), ranks
        self.trainer = {"identity": dataclasses.asdict(resume.identity), "weights": resume.weights}
        self.limit, self.background = training.save_total_limit, training.async_save
        self.last_good = resume.point.path
        self.states: list[StatePart] = []  # extensions' parts, set by the session
        self.num_failed, self.failure = 0, ""  # consecutive failures, and the last message
        self._save: _Save | None = None
        self._reduction: tuple[torch.distributed.Work, torch.Tensor] | None = None

    def after_step(self, step: int, saves: bool, last: bool = False, keeps_all: bool = False) -> str | None:
        """Save this step's checkpoint if `saves` is True, and commit a finished background save.

        last: True for the last step, after which everything has to be on the disk; keeps_all: True to delete no older
        checkpoints. Returns the reason to end the run, or None; it is the same on every rank.
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
        """Rewind the engine to the last good checkpoint (training_state.rewind). Returns its path, or None without one.

        Commits a save in progress first. Uses the newest complete checkpoint if the last good one is now damaged.
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
            # The zero_to_fp32.py that DeepSpeed copies into the checkpoint reads this file.
            writer.save_text(ENGINE, scratch / "latest")
            for part in self.states:
                if tensors := part.of(self.engine.module):
                    writer.save(tensors, scratch / part.file)
        writer.start()
        self._save = _Save(step, scratch, writer, keeps_all, time.perf_counter() - started)

    def _save_model(self, step: int, keeps_all: bool) -> None:
        """Save only the model, as a model folder that also has a checkpoint's manifest."""
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
        """Return True if the writers of all ranks are done. The result is the same on all ranks.

        Does not wait: the all-reduce of the ranks' flags is started at one step, and its result is read at the next.
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
        """Return the result of the all-reduce started at the previous step; False if none was started."""
        if self._reduction is None:
            return False
        work, flag = self._reduction
        self._reduction = None
        with waiting("the other ranks' answer on a save"):
            work.wait()
        return bool(flag)

    def _commit_written(self) -> None:
        """Wait until all ranks have written the checkpoint, then commit it."""
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
