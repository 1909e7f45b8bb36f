"""The processes around a rank: finds the launchers that started it, and ends children together with it."""

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

# Modules that start ranks, as given to python -m, and scripts that run these modules.
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

    links: pairs (child PID, parent PID) from this process up to the outermost launcher; empty without a launcher,
    because a shell may end before its background processes. launcher: PID of this machine's launcher. lost: evidence
    that one of the launchers had ended before this process checked, or None.
    """

    links: tuple[tuple[int, int], ...] = ()
    launcher: int | None = None
    lost: str | None = None

    @property
    def intact(self) -> bool:
        """True if all launchers still run."""
        return self.lost is None and all(_parent_of(child) == parent for child, parent in self.links)

    def started_s_ago(self, now: float) -> float:
        """Return the seconds since the outermost launcher, or this process, started. now: time.time()."""
        pids = [os.getpid(), *(parent for _, parent in self.links)]
        return now - min(psutil.Process(pid).create_time() for pid in pids)

    def siblings(self) -> list[psutil.Process]:
        """Return all processes started by the machine's launcher, including this one."""
        with contextlib.suppress(psutil.Error):
            return [] if self.launcher is None else psutil.Process(self.launcher).children()
        return []


def look_above(environ: Mapping[str, str] = os.environ) -> Above:
    """Find the launchers of this process by their command lines.

    environ: environment variables. Those set by deepspeed's launcher or torchrun show that a launcher existed even if
    it has ended. Open MPI's mpirun and Slurm's step daemon are recognised by their variables alone.
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
        except psutil.NoSuchProcess:  # an ancestor ended, so this process has another parent now
            time.sleep(0.02)
    # The mount option hidepid may hide some ancestors from this user.
    return parents[: len(words)], words


def _ended_launcher(environ: Mapping[str, str], parents: list[psutil.Process], words: list[list[str]]) -> str | None:
    """Return a message with the evidence that this process's launcher has ended; None without evidence."""
    remedy = "if it did not start this process, unset"
    if {"RANK", "CROSS_RANK", "LOCAL_SIZE"} <= environ.keys():
        return f"{GONE} (deepspeed's launcher set CROSS_RANK; {remedy} CROSS_RANK)"
    # Any Python ancestor may be torchrun's agent, except process 1: it adopts processes whose parent ended.
    agents = (process for process, line in zip(parents, words) if process.pid != 1 and _is_python(line))
    if {"RANK", "TORCHELASTIC_RUN_ID"} <= environ.keys() and next(agents, None) is None:
        return f"{GONE} (torchrun set TORCHELASTIC_RUN_ID; {remedy} TORCHELASTIC_RUN_ID)"
    return None


def _is_task(environ: Mapping[str, str]) -> bool:
    """Return True if srun or mpirun started this process as one of several."""
    sizes = {"SLURM_PROCID": "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE"}
    return any(rank in environ and environ.get(size, "1") != "1" for rank, size in sizes.items())


def _is_adopted(process: psutil.Process) -> bool:
    """Return True if the process that started this one has ended, so its parent is another process now.

    A process started by a shell, ssh or a container's first process leads a group or shares its parent's session.
    """
    pid, parent = process.pid, process.ppid()
    with contextlib.suppress(OSError, psutil.Error):  # it ended, or its parent is in another namespace
        if parent == 0 or os.getpgid(pid) == pid or os.getsid(pid) == pid:
            return False
        if os.getsid(pid) != os.getsid(parent):
            return True
        # In a container, all processes may share the session of process 1. If that is a Python program, it may have
        # called DeepSpeed's runner itself; a shell or an init adopted the process.
        return parent == 1 and not _is_python(_words(psutil.Process(1)))
    return False


class LauncherWatch:
    """A thread that checks whether the launchers of this process still run.

    prctl(PR_SET_PDEATHSIG) can't replace it: the kernel sends that signal when the parent's thread ends, even if the
    parent process lives on, and it does not watch the runner above the launcher.
    """

    def __init__(self, above: Above) -> None:
        self.above = above
        self._on_loss: Callable[[], None] = self._leave
        self._is_lost, self._calling = False, threading.Lock()
        self._thread = threading.Thread(target=self._look, name="launcher-watch", daemon=True)

    def start(self) -> "LauncherWatch":
        """Start the thread. If a launcher had ended before, exit this process at once."""
        if self.above.lost is not None:
            self._on_loss()
        elif self.above.links:
            self._thread.start()
        return self

    def call(self, on_loss: Callable[[], None]) -> None:
        """Set the function that the thread calls instead of exiting; call it now if a launcher has already ended."""
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


@functools.cache  # one watch per process: it remembers the launchers found at the first call
def watch_launcher() -> LauncherWatch:
    """Start to watch this process's launchers: when one ends, this process exits. Shells are not watched."""
    return LauncherWatch(look_above()).start()


def say_now(line: str) -> None:
    """Write a line to stderr; skip it if the reader is gone or too slow, to never block a thread that exits."""
    with contextlib.suppress(OSError):
        if select.select([], [2], [], 0.0)[1]:
            os.write(2, f"\n{line}\n".encode())


def process_namespace() -> str:
    """Return an id of this process's PID namespace, in which processes see each other. Empty if it can't be read."""
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
    """Suspend a process. It continues once this process ends in any way, or closes the stdin of the returned one."""
    keeper = subprocess.Popen(
        ["sh", "-c", 'read -r _; kill -CONT "$0"', str(pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # protects it from signals to this process's group
    )
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    return keeper


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when the thread that started it ends (Linux only).

    parent: PID of the process that started this one. If it has ended already, this process ends now.
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
