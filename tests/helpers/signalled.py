"""Runs that are started through the deepspeed launcher in the background, and all that belongs to them."""

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
from launching import DEEPSPEED, TRAIN, command_line, environment

from llava_ds.files.jsonl import read_metrics
from llava_ds.runtime.launchers import free_port

MARK = "LLAVA_DS_TESTED_RUN"


class Started:
    """A background run in its own session. The context manager ends all its processes."""

    def __init__(self, num_ranks: int, flags: dict[str, object], command: Sequence[str] = (), **variables: str) -> None:
        """command: another way to start it than DeepSpeed's; variables: more of the environment."""
        self.output_dir = Path(flags["output_dir"])
        self.log = self.output_dir.with_suffix(".log")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.mark = uuid.uuid4().hex
        where = ["--num_accelerators", str(num_ranks), "--master_port", str(free_port())]
        with self.log.open("w") as file:
            self.runner = subprocess.Popen(
                [*(command or [*DEEPSPEED, *where, str(TRAIN)]), *command_line(flags)],
                env={**environment(), **variables, MARK: self.mark},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # A shell has commands in its background ignore SIGINT, and nohup SIGHUP: start from their defaults.
                preexec_fn=lambda: [signal.signal(each, signal.SIG_DFL) for each in (signal.SIGINT, signal.SIGHUP)],
            )

    def __enter__(self) -> "Started":
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.runner.wait()

    def processes(self) -> list[psutil.Process]:
        """All that were started by this run and have not ended."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self.mark:
                    found.append(process)
        return found

    def process(self, name: str) -> int:
        """The id of runner, launcher, rank-<n>, or loader-<n> (a data-loader worker of rank n)."""
        if name == "runner":
            return self.runner.pid
        launcher = next(p for p in self.processes() if "deepspeed.launcher.launch" in p.cmdline())
        if name == "launcher":
            return launcher.pid
        kind, number = name.split("-")
        rank = next(p for p in launcher.children() if p.environ().get("RANK") == number)
        return rank.pid if kind == "rank" else rank.children()[0].pid

    def send(self, name: str, number: int) -> None:
        """Signal a process (see process()), or the whole group."""
        if name == "group":
            os.killpg(self.runner.pid, number)
        else:
            os.kill(self.process(name), number)

    def steps(self) -> list[dict]:
        """The rows of metrics.jsonl."""
        path = self.output_dir / "run" / "metrics.jsonl"
        return read_metrics(path) if path.exists() else []

    def wait_for_step(self, step: int, timeout_s: float = 600) -> None:
        self.wait_until(lambda: len(self.steps()) >= step, timeout_s)

    def wait_until(self, done: Callable[[], bool], timeout_s: float = 600) -> None:
        """Wait for something that only happens during the run."""
        self._wait(done, timeout_s, while_it_runs=True)

    def wait_for_end(self, timeout_s: float = 300) -> int:
        """The runner's exit code, once every process of the run has ended."""
        self._wait(lambda: self.runner.poll() is not None and not self.processes(), timeout_s)
        return self.runner.wait()

    def _wait(self, done: Callable[[], bool], timeout_s: float, while_it_runs: bool = False) -> None:
        deadline = time.monotonic() + timeout_s
        while not done():
            if time.monotonic() > deadline or (while_it_runs and self.runner.poll() is not None):
                left = [f"{process.pid} {process.status()} {process.cmdline()}" for process in self.processes()]
                raise AssertionError(
                    "\n".join([f"waited in vain at step {len(self.steps())}", self.log.read_text(), *left])
                )
            time.sleep(0.1)


SIGNALS = {
    "TERM": signal.SIGTERM,
    "INT": signal.SIGINT,
    "USR1": signal.SIGUSR1,
    "HUP": signal.SIGHUP,
    "KILL": signal.SIGKILL,
}
