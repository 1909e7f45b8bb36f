"""The processes around a rank: the launchers above it, and those that it starts itself."""

import contextlib
import ctypes
import itertools
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass

import psutil

# The modules that start ranks, by the names that python -m is given, and the scripts that run them.
LAUNCHER_MODULES = {"deepspeed.launcher.launch", "torch.distributed.run", "torch.distributed.launch"}
LAUNCHER_SCRIPTS = {"torchrun"}
RUNNER_SCRIPTS = {"deepspeed", "deepspeed.pt", "ds"}  # what a person calls; it starts the launcher of the machine
PR_SET_PDEATHSIG = 1  # prctl(2)


@dataclass(frozen=True)
class Above:
    """Who started this process: (child, parent) from itself up to the outermost launcher, and its machine's launcher.

    Empty where no launcher of ranks did: a shell may end before what it started in the background.
    """

    links: tuple[tuple[int, int], ...] = ()
    launcher: int | None = None

    @property
    def intact(self) -> bool:
        """Whether all of them still run."""
        return all(_parent_of(child) == parent for child, parent in self.links)

    def started_s_ago(self, now: float) -> float:
        """Seconds since the first of them began. now: of time.time()."""
        pids = [os.getpid(), *(parent for _, parent in self.links)]
        return now - min(psutil.Process(pid).create_time() for pid in pids)

    def siblings(self) -> list[psutil.Process]:
        """All processes that the machine's launcher has started, this one among them."""
        if self.launcher is None:
            return []
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self.launcher).children()
        return []


def look_above() -> Above:
    """The launchers of this process, found by their command lines."""
    try:
        parents = psutil.Process().parents()
        words = [_words(process) for process in parents]
    except psutil.Error:  # one ended meanwhile
        return Above()
    nearest = next((i for i, said in enumerate(words) if _starts_ranks(said)), None)
    if nearest is None:
        return Above()
    outermost = nearest
    if nearest + 1 < len(parents) and RUNNER_SCRIPTS & _scripts(words[nearest + 1]):
        outermost += 1
    chain = [os.getpid(), *(process.pid for process in parents[: outermost + 1])]
    return Above(tuple(itertools.pairwise(chain)), parents[nearest].pid)


def has_ended(process: psutil.Process) -> bool:
    """Whether a process is gone, or only waits for its parent to notice."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def hold(pid: int) -> subprocess.Popen:
    """Stop a process until this one ends, in whatever way, or until the answer's stdin is closed."""
    keeper = subprocess.Popen(
        ["sh", "-c", 'read -r _; kill -CONT "$0"', str(pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a signal to this process's group is not for it
    )
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    return keeper


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends (Linux; elsewhere nothing does)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def obey_only_parent(_: int = 0) -> None:
    """Let no signal end this data-loader worker but its parent's SIGTERM (for torch's worker_init_fn).

    Ctrl-C, a closed terminal and the launchers' SIGTERM reach every process: the rank would miss the batches that its
    last step needs.
    """
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    parent = os.getppid()

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
            pass
        os._exit(0)

    threading.Thread(target=wait, name="obey_only_parent", daemon=True).start()


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.AccessDenied, psutil.ZombieProcess):  # another user's, which is no launcher of ours
        return []


def _scripts(words: list[str]) -> set[str]:
    """The names that a command line begins with: an interpreter, or a script beside it."""
    return {os.path.basename(word) for word in words[:3]}


def _starts_ranks(words: list[str]) -> bool:
    return bool(LAUNCHER_MODULES & set(words) or LAUNCHER_SCRIPTS & _scripts(words))


def _parent_of(pid: int) -> int | None:
    if pid == os.getpid():
        return os.getppid()
    try:
        return psutil.Process(pid).ppid()
    except psutil.NoSuchProcess:
        return None
