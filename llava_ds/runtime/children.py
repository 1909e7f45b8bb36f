"""Child processes that share a rank's work. They end only when the rank ends."""

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Sequence

from llava_ds.constants import DataError
from llava_ds.runtime.processes import end_with_parent


def begin_helper(parent: int) -> None:
    """Prepare a forked process to end only with its parent. parent: the parent's process id."""
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends Ctrl-C to every process; the parent ends this one
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # drop the parent's handler


def in_processes(act: Callable, parts: Sequence) -> list:
    """Call a function on every part, each in its own forked process, and return the values.

    On an error, kills the other processes, then raises the process's error, or DataError if the process was killed.
    """
    context, parent, running = multiprocessing.get_context("fork"), os.getpid(), []

    def run(part, answer) -> None:
        begin_helper(parent)
        try:
            found = act(part), None
        except Exception as error:
            found = None, _portable(error)
        answer.send(found)

    try:
        for part in parts:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=run, args=(part, theirs), daemon=True)
            process.start()
            theirs.close()  # else recv() would not end with the process
            running.append((process, ours))
        return [_value_of(ours) for _, ours in running]
    finally:
        for process, ours in running:
            process.kill()
            process.join()
            ours.close()


def _portable(error: Exception) -> Exception:
    """Return the error, or a RuntimeError with its class and message if it can't be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _value_of(answer) -> object:
    try:
        value, error = answer.recv()
    except EOFError:
        raise DataError("a worker process was killed: this machine may be out of memory") from None
    if error is not None:
        raise error
    return value


def obey_only_parent(_: int = 0) -> None:
    """Ignore all signals except the parent's SIGTERM. A data-loader worker calls it as torch's worker_init_fn.

    Ctrl-C, a closed terminal and the launchers' SIGTERM reach every process. If they ended the workers, the rank would
    get no batches for its last step.
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
