"""The lock on --output_dir: only one run at a time writes there. It works on any shared file system.

run.lock names its holder: machine, process, start time. It is created by a hard link and replaced by a rename, both
atomic on NFS as well. A holder on this machine counts as alive while its process exists, a holder on another machine
while it renews the file.
"""

import contextlib
import dataclasses
import json
import os
import secrets
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import psutil
from pydantic import Field, TypeAdapter, ValidationError

from llava_ds.constants import EXIT_BAD_INPUT, ConfigError, DataError
from llava_ds.files.writing import described
from llava_ds.runtime.launchers import rank_variables
from llava_ds.runtime.processes import process_namespace, say_now, watch_launcher
from llava_ds.runtime.ranks import Ranks, broadcast_from_first, gather, print_first

NAME = "run.lock"
TICK_S, RENEWAL_S = 0.5, 5.0
SILENT_S = 60.0  # a holder on another machine counts as dead after this time without a renewal
ENDING_S = 900.0  # time to wait for a run that was asked to stop
LINGERING_S = 90.0  # time to wait for the ranks of a dead run; their watchdogs end them
SAME_START_S = 5.0  # tolerance between two reads of a process's start time, because clocks get adjusted
MOST_BYTES = 1 << 20

# Types of the fields in run.lock, checked because anybody may write it and its token becomes part of a file name.
Token = Annotated[str, Field(pattern="^[0-9a-f]{1,64}$")]
Pid = Annotated[int, Field(ge=1, lt=1 << 31)]
Text = Annotated[str, Field(max_length=256)]


@dataclasses.dataclass(frozen=True)
class Process:
    """A process, identified by its PID and start time, because PIDs are reused."""

    host: Text
    namespace: Text  # see process_namespace
    pid: Pid
    started: Annotated[float, Field(allow_inf_nan=False)]

    @classmethod
    def current(cls) -> "Process":
        started = psutil.Process().create_time()
        return cls(socket.gethostname(), process_namespace(), os.getpid(), started)

    @property
    def is_here(self) -> bool:
        """True for a process in this machine's PID namespace."""
        return (self.namespace or self.host) == (process_namespace() or socket.gethostname())

    @property
    def is_alive(self) -> bool:
        """True if a process of this machine still runs; a later process with the same PID does not count."""
        with contextlib.suppress(psutil.NoSuchProcess):
            found = psutil.Process(self.pid)
            same = abs(found.create_time() - self.started) < SAME_START_S
            return same and found.status() != psutil.STATUS_ZOMBIE
        return False


@dataclasses.dataclass(frozen=True)
class Holder:
    """The content of run.lock.

    first: process of rank 0. ranks: processes of all ranks, once they have joined. launcher: PID of rank 0's launcher,
    by which other ranks recognise their run. ending: True if the run was asked to stop.
    """

    token: Token
    first: Process | None
    since: Text = ""
    ranks: tuple[Process, ...] = ()
    launcher: int | None = None
    ending: bool = False

    def encoded(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @property
    def is_here(self) -> bool:
        return self.first is not None and self.first.is_here

    def __str__(self) -> str:
        if self.first is None:
            return "an unknown process"
        return f"process {self.first.pid} on {self.first.host}, started {self.since}"


_HOLDER = TypeAdapter(Holder)


class OutputLock:
    """The lock, held by rank 0 from before the ranks join until the end of the `with` block.

    After a crash or a kill the file remains and names a dead process.
    """

    def __init__(self) -> None:
        self._is_ending: Callable[[], bool] = lambda: False
        self._path: Path | None = None
        self._holder: Holder | None = None
        self._made: list[Path] = []  # folders that this run created, the innermost first
        self._released = threading.Event()
        self._writing = threading.Lock()  # guards the file and self._holder
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "OutputLock":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        if error is None or isinstance(error, (ConfigError, DataError)):  # else other ranks may still write
            self.release()

    def set_ending_check(self, is_ending: Callable[[], bool]) -> None:
        """Set the function that returns True once this run was asked to stop; runs that wait for the lock see it."""
        self._is_ending = is_ending

    def take_early(self, folder: Path) -> None:
        """Take the lock on rank 0 before the ranks join, if all are on this machine; the other ranks wait for it.

        Otherwise a second run started with the same port would join the ranks of the first. Raises ConfigError on rank
        0 if another run holds the lock.
        """
        variables = {**os.environ, **rank_variables(os.environ)[0]}
        here = int(variables.get("LOCAL_SIZE") or variables.get("LOCAL_WORLD_SIZE") or 1)
        if here < int(variables["WORLD_SIZE"]):
            return
        if variables["RANK"] == "0":
            self.take(folder)
        elif (launcher := watch_launcher().above.launcher) is not None:
            while not _is_held_by(folder / NAME, launcher):
                time.sleep(TICK_S / 2)  # if rank 0 fails, the launcher ends this rank

    def take_together(self, folder: Path, ranks: Ranks) -> None:
        """Take the lock on rank 0 if take_early did not, and record all ranks in it. Collective."""
        broadcast_from_first(ranks, lambda: self.take(folder) if self._holder is None else None)
        everyone = gather(Process.current(), ranks)
        if self._holder is not None:
            self._rewrite(ranks=tuple(everyone))

    def take(self, folder: Path) -> None:
        """Take the lock, or raise ConfigError naming its holder. Creates the folder."""
        try:
            self._made = [path for path in (folder, *folder.parents) if not path.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            self._path = folder / NAME
            before = self._acquire()
            self._wait_for_ranks(before)
        except OSError as error:
            raise ConfigError(f"--output_dir can't be written to: {described(folder, error)}") from error
        self._remove_leftovers()
        self._thread = threading.Thread(target=self._renew, name="output-lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Release the lock for the next run."""
        self._released.set()
        with self._writing, contextlib.suppress(OSError, ConfigError):  # ConfigError if the lock is no longer a file
            holder, self._holder = self._holder, None
            if holder is None:
                return
            found = _read(self._path)
            if found is not None and found.token == holder.token:
                self._path.unlink()
            for folder in self._made:
                folder.rmdir()  # only if nothing was written there
        if self._thread is not None:
            self._thread.join()

    def _acquire(self) -> Holder | None:
        """Become the holder. Returns the previous holder if it died with the lock, else None."""
        token = secrets.token_hex(8)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        mine = Holder(token, Process.current(), since, launcher=watch_launcher().above.launcher)
        own = self._path.with_name(f"{NAME}.{token}")
        own.write_text(mine.encoded(), encoding="utf-8")
        before = None
        try:
            while not _create(own, self._path):
                before = self._wait(own)
                if before is not None and self._succeed(own, before):
                    break
        finally:
            own.unlink(missing_ok=True)
        self._holder = mine
        return before

    def _wait(self, own: Path) -> Holder | None:
        """Wait until the holder is dead, and return it; None if the lock is free or another run took it. Raises
        ConfigError if the holder stays alive."""
        first, first_time = _read(self._path), _renewed(self._path)
        began, warned = time.monotonic(), False
        while first is not None and (holder := _read(self._path)) is not None and holder.token == first.token:
            renewed = _renewed(self._path)
            if holder.is_here:
                lives = holder.first.is_alive
                if not lives:
                    return holder
            else:
                os.utime(own)  # stamps it by the file system's clock: this machine's may differ
                lives = renewed != first_time
                if not lives and _renewed(own) - renewed > SILENT_S:
                    return holder
            if lives and (not holder.ending or time.monotonic() - began > ENDING_S):
                raise ConfigError(
                    f"--output_dir {self._path.parent} is in use by another run ({holder}): wait until it has ended, "
                    "stop it, or give another --output_dir"
                )
            if not warned:
                warned = True
                doing = "is stopping" if holder.ending else "has shown no sign of life yet"
                print_first(f"--output_dir is in use by another run ({holder}); it {doing}: waiting")
            time.sleep(TICK_S)
        return None

    def _succeed(self, own: Path, dead: Holder) -> bool:
        """Take over the lock from a dead holder; return False if another start did.

        To take over, a start creates a file named after the dead holder's token; only one start can. If that start dies
        as well, the next one creates a file named after that start's token.
        """
        token, passed = dead.token, []
        while not _create(own, right := self._path.with_name(f"{NAME}.after-{token}")):
            other = _read(right)
            if other is None or not other.is_here or other.first.is_alive:
                time.sleep(TICK_S / 5)
                os.utime(own)  # reads the file system's clock: this machine's may differ
                if other is None or other.is_here or _renewed(own) - _renewed(right) < SILENT_S:
                    return False
            token = other.token
            passed.append(right)
        found = _read(self._path)
        if found is None or found.token != dead.token:
            right.unlink()
            return False
        os.replace(right, self._path)
        for path in passed:
            path.unlink(missing_ok=True)
        return True

    def _wait_for_ranks(self, before: Holder | None) -> None:
        """Wait until all ranks of the dead previous run have ended, because they may still be writing."""
        began, warned = time.monotonic(), False
        while left := [each for each in (before.ranks if before else ()) if each.is_here and each.is_alive]:
            if time.monotonic() - began > LINGERING_S:
                self._rewrite(first=left[0], ranks=tuple(left))  # a living holder, so other starts don't take over
                self._holder = None
                pids = " ".join(str(each.pid) for each in left)
                raise ConfigError(
                    f"--output_dir {self._path.parent} is in use: rank 0 of an earlier run is gone, but its other "
                    f"processes have not ended within {LINGERING_S:.0f} s: kill -9 {pids}, or give another --output_dir"
                )
            if not warned:
                warned = True
                self._rewrite(ranks=tuple(left))
                print_first(f"{len(left)} ranks of the killed earlier run are still ending: waiting")
            time.sleep(TICK_S)

    def _remove_leftovers(self) -> None:
        for path in self._path.parent.glob(f"{NAME}.*"):
            with contextlib.suppress(OSError, ConfigError):  # ConfigError for anything but a file: no run left it
                if (other := _read(path)) is not None and other.is_here and not other.first.is_alive:
                    path.unlink()

    def _rewrite(self, **changes: object) -> None:
        """Change fields of run.lock, if this run still holds it."""
        with self._writing:
            if self._released.is_set():
                return
            self._holder = dataclasses.replace(self._holder, **changes)
            self._scratch.write_text(self._holder.encoded(), encoding="utf-8")
            try:
                if self._is_mine():  # the last check before the file is replaced
                    os.replace(self._scratch, self._path)
            finally:
                self._scratch.unlink(missing_ok=True)

    @property
    def _scratch(self) -> Path:
        return self._path.with_name(f"{NAME}.{self._holder.token}")

    def _is_mine(self) -> bool:
        """Return True if run.lock belongs to this run, False if it is gone. If another run took it, exit the process.

        A run that can't renew the file for SILENT_S (a suspended machine, a network disk that hangs) loses the lock to
        a start on another machine, so it has to check before it writes.
        """
        found = _read(self._path)
        if found is None:  # removed by hand
            return False
        if found.token != self._holder.token:
            say_now(
                f"run/train.py: error: --output_dir {self._path.parent} was taken over by another run ({found}), "
                "because this run was silent for too long. It ends now, to avoid writing there"
            )
            with contextlib.suppress(OSError):
                self._scratch.unlink(missing_ok=True)
            os._exit(EXIT_BAD_INPUT)
        return True

    def _renew(self) -> None:
        """Renew run.lock regularly, and record a request to stop; exit if another run took the lock."""
        due, warned = time.monotonic(), False
        while not self._released.wait(TICK_S):
            with contextlib.suppress(OSError, ConfigError):  # a failing disk is reported by the saves
                if self._is_ending() and not warned:
                    self._rewrite(ending=True)
                    warned = True
                if time.monotonic() < due:
                    continue
                due = time.monotonic() + RENEWAL_S
                with self._writing:
                    if not self._released.is_set() and self._is_mine():
                        os.utime(self._path)


def _create(own: Path, path: Path) -> bool:
    """Create `path` as a hard link to the complete file `own`; return False if `path` exists."""
    try:
        os.link(own, path)
        return True
    except FileExistsError:
        return False
    except OSError:  # the file system has no hard links, or NFS created the link and lost the reply
        with contextlib.suppress(OSError):
            if os.path.samefile(own, path):
                return True
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(own.read_text(encoding="utf-8"))
        return True
    except FileExistsError:
        return False


def _read(path: Path) -> Holder | None:
    """Read the holder from a lock file; None without a file; an unknown holder if the file can't be parsed.

    Raises OSError if it can't be read, and ConfigError if it is not a regular file.
    """
    try:
        # Opening makes NFS query its server; without O_NONBLOCK, opening a pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        if path.is_symlink():  # no lock could be created there either
            raise ConfigError(f"{path} is a broken link: remove it") from None
        return None
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path} is not a regular file, as a run's lock is: move it away")
        text = file.read(MOST_BYTES)
    try:
        return _HOLDER.validate_json(text, strict=True)
    except ValidationError:
        return Holder(f"unreadable-{status.st_ino}", None)


def _renewed(path: Path) -> float:
    """Return the time at which a lock was last renewed, by the file system's clock; 0 without a lock."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return 0.0


def _is_held_by(path: Path, launcher: int) -> bool:
    """Return True if rank 0 of this launcher, on this machine, holds the lock. False if it can't be read."""
    with contextlib.suppress(OSError, ConfigError):
        holder = _read(path)
        return holder is not None and holder.is_here and holder.launcher == launcher and holder.first.is_alive
    return False
