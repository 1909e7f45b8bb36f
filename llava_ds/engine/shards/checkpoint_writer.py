"""Write this rank's part of a checkpoint, immediately or in a background thread."""

import copy
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import deepspeed
import torch
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

from llava_ds.files.writing import Entry, damage, described, not_cached, write_file

ENGINE = "engine"  # tag and folder in a checkpoint for DeepSpeed's part


class CheckpointWriter(TorchCheckpointEngine):
    """Writes, flushes and hashes the files of DeepSpeed and of this package.

    It replaces the engine's own writer while a checkpoint is made. It stores the first file error instead of raising
    it: DeepSpeed runs collectives between files, and the other ranks would wait in them for a rank that raised. If
    `background` is True, save() copies the tensors to host memory, and a thread writes them after start().
    """

    def __init__(self, config, root: Path, background: bool, reads_back: bool) -> None:
        """config: the engine's DeepSpeed configuration; root: the checkpoint's folder; reads_back: read all files after
        writing them, and compare."""
        super().__init__(config)
        self.root, self.background, self.reads_back = root, background, reads_back
        self.written: dict[str, Entry] = {}
        self.problem: str | None = None
        self.took_s = 0.0  # seconds that the thread ran
        self._waiting: list[tuple[Path, Callable]] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._write_waiting, name="checkpoint-writer", daemon=True)

    def create(self, info) -> None:
        """Do nothing. DeepSpeed requires this method, and calls it at the start of a checkpoint."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.attempt(path, lambda: super(CheckpointWriter, self).makedirs(path, exist_ok=exist_ok))

    def save(self, state_dict: object, path: str | Path) -> None:
        """Write an object with torch.save."""
        if self.background:
            # The next step will change the tensors.
            state_dict = self.attempt(path, lambda: snapshot(state_dict, {}))

        def write(file) -> None:
            torch.save(state_dict, file, _use_new_zipfile_serialization=self.zipfile_serialization)

        self._hand_over(Path(path), write)

    def save_text(self, text: str, path: Path) -> None:
        self._hand_over(path, lambda file: file.write(text.encode()))

    def commit(self, info) -> bool:
        return True  # llava_ds.checkpoint.commit does it after all ranks have written

    def attempt(self, path: str | Path, act: Callable[[], object]) -> object:
        """Return act()'s result. A file or memory error is stored in `problem`, not raised; later calls do nothing."""
        if self.problem is not None:
            return None
        try:
            return act()
        except (OSError, RuntimeError, MemoryError) as error:
            self.note(path, error)

    def note(self, path: str | Path, error: Exception) -> None:
        path = Path(path)
        name = path.relative_to(self.root) if path.is_relative_to(self.root) else path
        self.problem = self.problem or described(name, error)

    def start(self) -> None:
        """Start writing the copies. Don't call save() afterwards."""
        if self.background:
            self._thread.start()
        else:
            self._read_back()

    @property
    def is_done(self) -> bool:
        """True if everything is on the disk or has failed."""
        return not self._thread.is_alive()

    def finish(self) -> None:
        """Wait until everything is on the disk or has failed."""
        if self.background:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def _hand_over(self, path: Path, write: Callable) -> None:
        if self.background:
            self._waiting.append((path, write))
        else:
            self._write(path, write)

    def _write(self, path: Path, write: Callable) -> None:
        entry = self.attempt(path, lambda: write_file(path, write))
        if entry is not None:
            self.written[path.relative_to(self.root).as_posix()] = entry

    def _read_back(self) -> None:
        for name, entry in self.written.items() if self.reads_back else ():
            self.attempt(self.root / name, lambda name=name: not_cached(self.root / name))
            self.problem = self.problem or damage(self.root, name, entry)

    def _write_waiting(self) -> None:
        started = time.perf_counter()
        try:
            while self._waiting:
                self._write(*self._waiting.pop(0))  # pop frees its memory
            self._read_back()
            self.took_s = time.perf_counter() - started
        except BaseException as error:  # re-raised when training waits for this thread
            self._error = error


def save_engine(engine, writer: CheckpointWriter) -> None:
    """Let DeepSpeed save its part of a checkpoint with the writer, in the folder ENGINE. Collective."""
    before, engine.checkpoint_engine = engine.checkpoint_engine, writer
    try:
        # Don't write DeepSpeed's "latest" file, because it may name an incomplete checkpoint; the manifest replaces it.
        # Frozen parameters are not written, because a resume reads them from the original model.
        engine.save_checkpoint(str(writer.root), tag=ENGINE, save_latest=False, exclude_frozen_parameters=True)
    except OSError as error:
        # DeepSpeed 0.19.8 copies its recovery scripts and files on NVMe without the writer, so errors are raised here.
        # Take the remaining steps of save_checkpoint, because the other ranks wait in its barrier.
        writer.note(error.filename2 or error.filename or writer.root, error)
        if engine._optimizer_has_ckpt_event_epilogue():
            engine.optimizer.checkpoint_event_epilogue()
        deepspeed.comm.barrier()
    finally:
        engine.checkpoint_engine = before


def snapshot(value: object, known: dict) -> object:
    """Return a copy of a nested value, with tensors in host memory. Of a view, only the visible elements are copied.

    known: copies made so far, by source tensor, so that a repeated tensor is copied once; pass {} at first.
    """
    if isinstance(value, torch.Tensor):
        key = (value.untyped_storage().data_ptr(), value.storage_offset(), value.shape, value.stride(), value.dtype)
        if value.numel() == 0 or key not in known:
            known[key] = value.detach().to("cpu", copy=True)
        return known[key]
    if type(value) in (dict, OrderedDict):
        return type(value)((key, snapshot(each, known)) for key, each in value.items())
    if type(value) in (list, tuple):
        return type(value)(snapshot(each, known) for each in value)
    return copy.deepcopy(value)
