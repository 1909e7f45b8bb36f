"""The processes around a rank: the launchers above it, and how children end with it."""

import contextlib
import ctypes
import functools
import itertools
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from llava_ds.constants import EXIT_STOPPED

# The modules that start ranks, as given to python -m, and the scripts that run them.
DEEPSPEED_LAUNCHER = "deepspeed.launcher.launch"
LAUNCHER_MODULES = {DEEPSPEED_LAUNCHER, "torch.distributed.run", "torch.distributed.launch"}
LAUNCHER_SCRIPTS = {"torchrun", "accelerate"}
RUNNER_SCRIPTS = {"deepspeed", "deepspeed.pt", "ds"}  # the user's command; it starts each machine's launcher
RUNNER_MODULE = "deepspeed.launcher.runner"
PR_SET_PDEATHSIG = 1  # prctl(2)
LOOK_S = 0.5  # seconds between checks of the launchers
LOOKS = 5  # attempts to list processes while the list changes
GONE = "the process that started this run has ended"


@dataclass(frozen=True)
class Above:
    """The launchers above this process.

    links: (child, parent) from this process up to the outermost launcher, empty without a launcher of ranks (a shell
    may end before its background processes); launcher: this machine's; lost: the reason why one of them must have ended
    before this process checked, None if none has.
    """

    links: tuple[tuple[int, int], ...] = ()
    launcher: int | None = None
    lost: str | None = None

    @property
    def intact(self) -> bool:
        """True if all of them still run."""
        return self.lost is None and all(_parent_of(child) == parent for child, parent in self.links)

    def started_s_ago(self, now: float) -> float:
        """Seconds since the first of them started. now: time.time()."""
        pids = [os.getpid(), *(parent for _, parent in self.links)]
        return now - min(psutil.Process(pid).create_time() for pid in pids)

    def siblings(self) -> list[psutil.Process]:
        """Return all processes started by the machine's launcher, including this one."""
        with contextlib.suppress(psutil.Error):
            return [] if self.launcher is None else psutil.Process(self.launcher).children()
        return []


def look_above(environ: Mapping[str, str] = os.environ) -> Above:
    """Find the launchers of this process by their command lines.

    environ: variables set by deepspeed's launcher and torchrun; they distinguish a launcher that has already ended from
    a shell. Open MPI's mpirun and Slurm's step daemon are recognised by their variables alone.
    """
    parents, words = _ancestors()
    nearest = next((i for i, line in enumerate(words) if _starts_ranks(line)), None)
    if nearest is None and (lost := _ended_launcher(environ, parents, words)):
        return Above(lost=lost)
    if nearest is None:
        return Above(((os.getpid(), os.getppid()),) if _is_task(environ) else ())
    outermost = nearest
    if nearest + 1 < len(parents) and _is_runner(words[nearest + 1]):
        outermost += 1
    elif DEEPSPEED_LAUNCHER in words[nearest] and _is_adopted(parents[nearest]):
        return Above(launcher=parents[nearest].pid, lost=f"{GONE}: deepspeed's launcher still runs")
    chain = [os.getpid(), *(process.pid for process in parents[: outermost + 1])]
    return Above(tuple(itertools.pairwise(chain)), parents[nearest].pid)


def _ancestors() -> tuple[list[psutil.Process], list[list[str]]]:
    """Return all ancestors of this process, the nearest first, and their command lines."""
    for _ in range(LOOKS):
        parents: list[psutil.Process] = []
        words: list[list[str]] = []
        pid = os.getppid()
        try:
            while pid:
                parents.append(psutil.Process(pid))
                words.append(_words(parents[-1]))
                pid = parents[-1].ppid()
            break
        except psutil.NoSuchProcess:  # it ended meanwhile: this process has another parent now
            time.sleep(0.02)
    # Some may be hidden from this user (the mount option hidepid).
    return parents[: len(words)], words


def _ended_launcher(environ: Mapping[str, str], parents: list[psutil.Process], words: list[list[str]]) -> str | None:
    """Return the evidence of a launcher that has ended; None without any."""
    remedy = "if it did not start this process, unset"
    if {"RANK", "CROSS_RANK", "LOCAL_SIZE"} <= environ.keys():
        return f"{GONE} (deepspeed's launcher set CROSS_RANK; {remedy} CROSS_RANK)"
    # Any Python program may run torch's agent; process 1 adopts processes whose parent ended.
    agents = (process for process, line in zip(parents, words) if process.pid != 1 and _is_python(line))
    if {"RANK", "TORCHELASTIC_RUN_ID"} <= environ.keys() and next(agents, None) is None:
        return f"{GONE} (torchrun set TORCHELASTIC_RUN_ID; {remedy} TORCHELASTIC_RUN_ID)"
    return None


def _is_task(environ: Mapping[str, str]) -> bool:
    """Return True if srun or mpirun started this process as one of several."""
    sizes = {"SLURM_PROCID": "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE"}
    return any(rank in environ and environ.get(size, "1") != "1" for rank, size in sizes.items())


def _is_adopted(process: psutil.Process) -> bool:
    """Return True if a process has another parent than the one that started it.

    A process started by a shell, ssh or a container's first process leads a group, or is in its parent's session.
    """
    pid, parent = process.pid, process.ppid()
    with contextlib.suppress(OSError, psutil.Error):  # it ended, or its parent is in another namespace
        if parent == 0 or os.getpgid(pid) == pid or os.getsid(pid) == pid:
            return False
        if os.getsid(pid) != os.getsid(parent):
            return True
        # A container's first process shares its session with all others: a shell, an init, or a Python program of the
        # user's that calls DeepSpeed's runner.
        return parent == 1 and not _is_python(_words(psutil.Process(1)))
    return False


class LauncherWatch:
    """A thread that checks whether the launchers of this process still run.

    prctl(PR_SET_PDEATHSIG) can't replace it: that signal comes when the thread that started this process ends, even if
    its process lives on, and the runner above the launcher is not covered.
    """

    def __init__(self, above: Above) -> None:
        self.above = above
        self._on_loss: Callable[[], None] = self._leave
        self._is_lost, self._calling = False, threading.Lock()
        self._thread = threading.Thread(target=self._look, name="launcher-watch", daemon=True)

    def start(self) -> "LauncherWatch":
        """Start the thread. If a launcher is known to be gone, this process exits at once."""
        if self.above.lost is not None:
            self._on_loss()
        elif self.above.links:
            self._thread.start()
        return self

    def call(self, on_loss: Callable[[], None]) -> None:
        """Set the function that the thread calls instead of exiting; called at once if the launchers are gone."""
        with self._calling:
            self._on_loss = on_loss
            if self._is_lost:
                on_loss()

    def _look(self) -> None:
        while self.above.intact:
            time.sleep(LOOK_S)
        with self._calling:
            self._is_lost = True
            self._on_loss()

    def _leave(self) -> None:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            say_now(f"{self.above.lost or GONE}: exiting at once, nothing is lost; the same command starts again")
        os._exit(EXIT_STOPPED)


@functools.cache  # one per process: it compares with the launchers at the first check
def watch_launcher() -> LauncherWatch:
    """From now on, exit when a launcher of this process ends; a shell may end."""
    return LauncherWatch(look_above()).start()


def say_now(line: str) -> None:
    """Write a line to stderr, unless its reader is gone or too slow: it must not block a thread that exits."""
    with contextlib.suppress(OSError):
        if select.select([], [2], [], 0.0)[1]:
            os.write(2, f"\n{line}\n".encode())


def process_namespace() -> str:
    """Return a name of the PID namespace: processes with the same name see each other. Empty if it can't be read."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def has_ended(process: psutil.Process) -> bool:
    """Return True if a process is gone, or is a zombie."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def hold(pid: int) -> subprocess.Popen:
    """Stop a process until this one ends in any way, or until the returned process's stdin is closed."""
    keeper = subprocess.Popen(
        ["sh", "-c", 'read -r _; kill -CONT "$0"', str(pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # signals to this process's group must not reach it
    )
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    return keeper


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when the thread that started it ends (Linux only).

    parent: the process that started it; if that has ended already, this one ends now.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before prctl took effect
        os.kill(os.getpid(), signal.SIGKILL)


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.AccessDenied, psutil.ZombieProcess):  # another user's process can't be a launcher of this one
        return []


def _starts_ranks(words: list[str]) -> bool:
    scripts = {os.path.basename(word) for word in words[:3]}  # an interpreter and a script, or a script
    return bool(LAUNCHER_MODULES & set(words) or LAUNCHER_SCRIPTS & scripts)


def _is_runner(words: list[str]) -> bool:
    first = words[:8]  # the interpreter may have options
    return bool(RUNNER_SCRIPTS & {os.path.basename(word) for word in first}) or RUNNER_MODULE in first


def _is_python(words: list[str]) -> bool:
    return "python" in os.path.basename("".join(words[:1]))


def _parent_of(pid: int) -> int | None:
    if pid == os.getpid():
        return os.getppid()
    try:
        return psutil.Process(pid).ppid()
    except psutil.NoSuchProcess:
        return None
