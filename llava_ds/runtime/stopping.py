"""Stopping a run on request: all ranks save at the same step boundary and exit.

A request is SIGTERM, SIGINT, SIGUSR1 or SIGHUP to any rank, the end of the process that started the ranks, or the end
of --max_run_time. A thread reads the signals, because a second signal has to end the process at once, even if the main
thread is inside a collective.
"""

import contextlib
import functools
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from enum import Enum

import numpy as np
import torch

from llava_ds.config.bounds import seconds_of
from llava_ds.constants import EXIT_NOT_RESUMABLE, EXIT_STOPPED
from llava_ds.runtime.processes import (
    GONE,
    LOOK_S,
    Above,
    LauncherWatch,
    end_with_parent,
    has_ended,
    hold,
    say_now,
    watch_launcher,
)
from llava_ds.runtime.ranks import Ranks, barrier, print_first
from llava_ds.runtime.waiting import waiting

REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)  # SIGHUP: the terminal was closed
LAUNCHER_GONE, TIME_IS_OVER = 101, 102  # requests that are not signals; larger than every signal number
# Signals within this time are one request: a Ctrl-C arrives from the terminal and as SIGTERM from the launcher.
SAME_REQUEST_S = 2.0
WAIT_S = 1.0  # time for the other tasks to end
HOLD_S = 900.0  # maximum time to suspend a launcher; then it may kill a run that reaches no step boundary
PATIENCE = timedelta(hours=12)  # timeout of all waits during which a rank may be writing files
LEAVING_S, LEAVING = 20.0, 0.1  # reserve for the report and the end of processes, at most this fraction of the limit
UNKNOWN_SAVE = 0.05  # fraction of --max_run_time reserved for a save until one has been timed


class Phase(Enum):
    """The effect of a request at this point of the run."""

    LEAVES = "everything is on disk: the process exits at once"
    SAVES = "the ranks agree on it, and stop at a step boundary"
    WAITS = "the run is about to end and save the model"
    IGNORED = "this rank is exiting"


class Agreement:
    """Computes the maximum of one number per rank, available one step later, without waiting for a device.

    Each call finishes the reduction that the previous call started, and starts the next. The reductions use a separate
    gloo group. Finishing one takes no time unless a rank is a whole step late.
    """

    def __init__(self, ranks: Ranks) -> None:
        """Collective: all ranks construct it together."""
        alone = ranks.world_size == 1
        self._group = None if alone else torch.distributed.new_group(backend="gloo", timeout=PATIENCE)
        self._begun: tuple[torch.distributed.Work, np.ndarray] | None = None

    def exchange(self, mine: int) -> int:
        """Return the maximum over ranks of the previous call's `mine`; 0 at first. A single rank gets `mine` back."""
        if self._group is None:
            return mine
        agreed = self.close()
        if not agreed:
            values = np.array([mine], dtype=np.int64)  # read as numpy, because reading a tensor counts as a wait
            work = torch.distributed.all_reduce(
                torch.from_numpy(values), torch.distributed.ReduceOp.MAX, group=self._group, async_op=True
            )
            self._begun = (work, values)
        return agreed

    def close(self) -> int:
        """Finish the reduction in progress, and return its maximum; 0 without one. Collective."""
        if self._begun is None:
            return 0
        (work, values), self._begun = self._begun, None
        with waiting("the other ranks' answer on stopping"):
            work.wait()
        return int(values[0])


class Stopping:
    """Receives requests to stop, lets all ranks agree on them, and reports them."""

    def __init__(
        self, watch: LauncherWatch | None = None, on_leaving: Callable[[str], None] = lambda reason: None
    ) -> None:
        """watch: None to use this process's LauncherWatch; on_leaving: function called with the reason before an
        immediate exit."""
        self._watch, self._on_leaving = watch, on_leaving
        self._phase = Phase.LEAVES
        self._asked = 0  # the first request: a signal's number, LAUNCHER_GONE or TIME_IS_OVER
        self._signalled_s: float | None = None  # time.monotonic() of the first SIGTERM or SIGINT
        self._reason = 0  # the request that all ranks agreed on
        self._above, self._siblings = Above(), []
        self._rank = self._local_rank = 0
        self._held: subprocess.Popen | None = None
        self._agreement: Agreement | None = None
        self._started_s = time.monotonic()
        self._limit_s: float | None = None
        self._longest_step_s, self._longest_save_s, self._num_steps = 0.0, None, 0
        # With srun --kill-on-bad-exit, the first task that fails ends the others, and its exit code is the job's.
        self._one_code = "RANK" not in os.environ and "SLURM_STEP_NUM_TASKS" in os.environ

    def __enter__(self) -> "Stopping":
        """Install the signal handlers, from the main thread. Until training() is entered, a signal ends the process."""
        self._watch = self._watch or watch_launcher()
        self._above = self._watch.above
        self._started_s = time.monotonic() - self._above.started_s_ago(time.time())
        reader, writer = os.pipe()
        for end in (reader, writer):
            os.set_blocking(end, False)
        self._pipe = (reader, writer)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        # Under nohup SIGHUP is ignored, because the run has to outlive its terminal.
        is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        heard = [number for number in REQUESTS if not (number == signal.SIGHUP and is_nohup)]
        self._before = {number: signal.signal(number, lambda *_: None) for number in heard}
        _prepare_children()
        self._thread = threading.Thread(target=self._hear, name="stopping", daemon=True)
        self._thread.start()
        self._watch.call(lambda: os.write(writer, bytes([LAUNCHER_GONE])))
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the handlers; a process that exits on request ignores further signals."""
        self._watch.call(lambda: None)  # this process is about to end
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self._phase is Phase.IGNORED else handler)
        os.write(self._pipe[1], b"\0")
        self._thread.join()
        for end in self._pipe:
            os.close(end)

    @contextlib.contextmanager
    def training(self, max_run_time: str | None, ranks: Ranks) -> Iterator[None]:
        """Handle requests at step boundaries within the block. Collective."""
        self._agreement = Agreement(ranks)
        self._limit_s = None if max_run_time is None else seconds_of(max_run_time)
        self._local_rank, self._rank = ranks.local_rank, ranks.rank
        self._siblings = self._above.siblings()
        barrier(ranks)  # no rank exits while another already waits for it in a step
        self._phase = Phase.SAVES
        try:
            yield
            self._agreement.close()
            self._phase = Phase.IGNORED if self._reason else Phase.WAITS
        except BaseException:
            self._phase = Phase.LEAVES  # the launcher now sends SIGTERM to all ranks
            self._release()
            raise

    @property
    def is_requested(self) -> bool:
        """True if this rank got a request, or all ranks agreed on one."""
        return bool(self._asked or self._reason)

    def agreed(self, step_time_s: float, ahead_s: float = 0.0) -> bool:
        """Return True if all ranks save and stop at this step boundary. Every rank calls it once per step.

        step_time_s: seconds of this step; ahead_s: seconds of work besides the step before the next boundary.
        """
        self._num_steps += 1
        if self._num_steps > 1:  # the first step also compiles and allocates
            self._longest_step_s = max(self._longest_step_s, step_time_s)
        limited = self._limit_s is not None and not self._asked
        if limited and time.monotonic() - self._started_s > self._limit_s - self._needed_s() - ahead_s:
            self._asked = TIME_IS_OVER
        self._reason = self._agreement.exchange(self._asked)
        return self._reason != 0

    def saved(self, seconds: float) -> None:
        """Record how many seconds a checkpoint took, for --max_run_time."""
        self._longest_save_s = max(seconds, self._longest_save_s or 0.0)

    def end(self, is_saved: bool) -> None:
        """Record the end of training. is_saved: True if a checkpoint has the last step.

        If it is saved, a request ends the process at once, even if it came after the last boundary.
        """
        if is_saved:
            self._phase = Phase.LEAVES
            if self._asked:
                self._leave_now(self._asked)

    def leave(self, step: int, saved: str, resumable: bool, ranks: Ranks) -> int:
        """Print that the run stopped, and return the exit code. Collective. Signals are already ignored.

        saved: text about the last step's checkpoint and the effect of the same command; resumable: True if the same
        command resumes, so a batch system may start it again.
        """
        print_first(f"{_name_of(self._reason)}: stopped after step {step:,}: {saved}")
        barrier(ranks)
        if self._one_code:
            time.sleep(WAIT_S if ranks.is_first else 0.0)
        code = EXIT_STOPPED if resumable else EXIT_NOT_RESUMABLE
        return code if ranks.is_first or not self._one_code else 0

    def _needed_s(self) -> float:
        """Return the seconds to reserve for stopping: agreeing takes one more step, then the ranks save and exit."""
        save_s = UNKNOWN_SAVE * self._limit_s if self._longest_save_s is None else 1.5 * self._longest_save_s
        return 3 * self._longest_step_s + save_s + WAIT_S + min(LEAVING_S, LEAVING * self._limit_s)

    def _hear(self) -> None:
        """Handle signals and the end of a launcher. Runs in the thread."""
        while True:
            ready, _, _ = select.select([self._pipe[0]], [], [], LOOK_S)
            received = os.read(self._pipe[0], 512) if ready else b""
            if 0 in received:
                return
            for number in received:
                if number in REQUESTS or (number == LAUNCHER_GONE and not self._asked):
                    self._ask(number)  # ignores signals of other handlers: the pipe receives all
            if self._held is not None and time.monotonic() - self._signalled_s > HOLD_S:
                self._release()

    def _ask(self, reason: int) -> None:
        if self._phase is Phase.IGNORED:
            return
        now, first = time.monotonic(), not self._asked
        if reason in (signal.SIGTERM, signal.SIGINT):
            if self._signalled_s is not None and now - self._signalled_s > SAME_REQUEST_S:
                os._exit(128 + reason)
            self._signalled_s = self._signalled_s or now
            if self._phase is Phase.SAVES and any(has_ended(process) for process in self._siblings):
                os._exit(128 + reason)  # a rank has failed, so no step boundary will be reached
        self._asked = self._asked or reason
        if self._phase is Phase.LEAVES:
            self._leave_now(reason)
        if self._phase is Phase.SAVES and self._signalled_s == now and self._local_rank == 0 and self._above.launcher:
            # The launcher sends SIGTERM to one rank after another, and kills each after 30 s, too early for a large
            # checkpoint.
            self._held = hold(self._above.launcher)
        if first and self._rank == 0:
            again = f"again after {SAME_REQUEST_S:.0f} s (kill -TERM -{os.getpgrp()}) exits at once"
            then = "a checkpoint after this step, then the end" if self._phase is Phase.SAVES else "finishing the run"
            say_now(f"{_name_of(reason)}: {then}; {again}")

    def _leave_now(self, reason: int) -> None:
        self._on_leaving(_name_of(reason))
        if os.environ.get("RANK", "0") == "0":
            say_now(f"{_name_of(reason)}: exiting at once, nothing is lost; the same command starts again")
        first = not self._one_code or os.environ.get("SLURM_PROCID") == "0"
        if self._one_code and first:
            time.sleep(WAIT_S)
        os._exit(EXIT_STOPPED if first or reason != signal.SIGUSR1 else 0)  # Slurm sends SIGUSR1 to all tasks

    def _release(self) -> None:
        if self._held is not None:
            self._held.stdin.close()
            self._held = None


@functools.cache  # hooks can't be removed
def _prepare_children() -> None:
    """Make forked processes ignore this process's signals, and end when it ends."""

    parent = 0

    def before() -> None:
        nonlocal parent
        parent = os.getpid()

    def in_child() -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # pools end their workers with it
        for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):  # sent by the terminal to all processes
            signal.signal(number, signal.SIG_IGN)
        end_with_parent(parent)

    os.register_at_fork(before=before, after_in_child=in_child)


def _name_of(reason: int) -> str:
    others = {LAUNCHER_GONE: GONE, TIME_IS_OVER: "--max_run_time is nearly over"}
    return others.get(reason) or signal.Signals(reason).name
