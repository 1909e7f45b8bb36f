"""What a request to stop does in one process: at its start, in training, a second time, and to those around it."""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import pytest
import torch

from llava_ds.config.bounds import seconds_of
from llava_ds.constants import EXIT_NOT_RESUMABLE, EXIT_STOPPED, ConfigError
from llava_ds.runtime import stopping
from llava_ds.runtime.children import obey_only_parent
from llava_ds.runtime.processes import Above, LauncherWatch, end_with_parent, hold, look_above
from llava_ds.runtime.ranks import Ranks
from llava_ds.runtime.stopping import Agreement, Stopping

ALONE = Ranks(0, 0, 1, torch.device("cpu"))
SURVIVED = 99


def in_child(run: Callable[[], None]) -> int:
    """The exit code of a forked process that runs a function; SURVIVED where that returns."""

    def run_with_default_signals() -> None:
        for number in stopping.REQUESTS:  # nohup and a shell's background ignore some of them
            signal.signal(number, signal.SIG_DFL)
        run()

    pid = fork(run_with_default_signals)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def fork(run: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            run()
            os._exit(SURVIVED)
        finally:
            os._exit(1)
    return pid


def kill_self(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.3)


@pytest.mark.parametrize("number", stopping.REQUESTS)
def test_before_training_a_signal_ends_the_process_at_once(number):
    def run() -> None:
        with Stopping():
            kill_self(number)

    assert in_child(run) == EXIT_STOPPED


@pytest.mark.parametrize("number", stopping.REQUESTS)
def test_in_training_a_signal_is_agreed_on_at_the_step_boundary(number):
    def run() -> None:
        with Stopping() as stop, stop.training(None, ALONE):
            assert not stop.agreed(0.1)
            kill_self(number)
            os._exit(SURVIVED if stop.agreed(0.1) else 1)

    assert in_child(run) == SURVIVED


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_leaves_at_once_though_the_main_thread_hears_nothing(number, monkeypatch):
    monkeypatch.setattr(stopping, "SAME_REQUEST_S", 0.2)

    def run() -> None:
        with Stopping() as stop, stop.training(None, ALONE):
            kill_self(signal.SIGTERM)
            subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -{int(number)} {os.getpid()}"])
            libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
            for _ in range(2):
                libc.pthread_mutex_lock(mutex)  # the second time for ever, as in a collective that a peer never joins

    assert in_child(run) == 128 + number


def test_one_ctrl_c_that_comes_as_two_signals_is_one_request():
    def run() -> None:
        with Stopping() as stop, stop.training(None, ALONE):
            kill_self(signal.SIGINT)
            kill_self(signal.SIGTERM)
            os._exit(SURVIVED if stop.agreed(0.1) else 1)

    assert in_child(run) == SURVIVED


def test_when_training_failed_the_launchers_signal_ends_the_process():
    def run() -> None:
        with Stopping() as stop:
            try:
                with stop.training(None, ALONE):
                    raise RuntimeError("a peer is gone")
            except RuntimeError:
                kill_self(signal.SIGTERM)

    assert in_child(run) == EXIT_STOPPED


def test_a_signal_after_the_last_step_waits_only_for_what_is_saved_nowhere():
    def run(is_saved: bool) -> None:
        with Stopping() as stop:
            with stop.training(None, ALONE):
                pass
            stop.end(is_saved)
            kill_self(signal.SIGTERM)

    assert in_child(lambda: run(True)) == EXIT_STOPPED
    assert in_child(lambda: run(False)) == SURVIVED


@pytest.mark.parametrize(("resumable", "expected"), [(True, EXIT_STOPPED), (False, EXIT_NOT_RESUMABLE)])
def test_who_leaves_hears_no_more(resumable, expected):
    def run() -> None:
        with Stopping() as stop:
            with stop.training(None, ALONE):
                kill_self(signal.SIGTERM)
                stop.agreed(0.1)
            code = stop.leave(7, "saved; the same command resumes from it", resumable, ALONE)
            kill_self(signal.SIGTERM)
        kill_self(signal.SIGTERM)
        os._exit(SURVIVED if code == expected else 1)

    assert in_child(run) == SURVIVED


def test_the_end_of_the_process_above_asks_too():
    (reader, writer), (trains, says_so) = os.pipe(), os.pipe()

    def rank(parent: int) -> None:
        with Stopping(LauncherWatch(Above(((os.getpid(), parent),))).start()) as stop:
            with stop.training(None, ALONE):
                os.write(says_so, b"!")
                deadline = time.monotonic() + 20
                while not stop.agreed(0.1) and time.monotonic() < deadline:
                    time.sleep(0.05)
            os.write(writer, b"stopped" if stop._reason == stopping.LAUNCHER_GONE else b"not")

    def launcher() -> None:
        own = os.getpid()
        fork(lambda: rank(own))
        os.read(trains, 1)  # with a fork hook of Stopping's, its children would end with it

    assert in_child(launcher) == SURVIVED
    assert select.select([reader], [], [], 30)[0] and os.read(reader, 20) == b"stopped"


def test_signals_of_children_are_not_this_processes_and_they_end_with_it():
    reader, writer = os.pipe()

    def run() -> None:
        with Stopping() as stop, stop.training(None, ALONE):
            child = fork(lambda: time.sleep(30))
            time.sleep(0.2)
            os.kill(child, signal.SIGINT)  # not heard
            time.sleep(0.2)
            assert not stop.agreed(0.1) and os.waitpid(child, os.WNOHANG) == (0, 0)
            os.kill(child, signal.SIGTERM)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
            assert not stop.agreed(0.1)
            os.write(writer, str(fork(lambda: time.sleep(30))).encode())
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(run) == -signal.SIGKILL
    pid = int(os.read(reader, 20))
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_child_whose_parent_ended_while_it_was_forked_ends_too():
    def child() -> None:
        end_with_parent(os.getppid() + 1)  # as it is when another process has inherited the child
        time.sleep(30)

    assert in_child(child) == -signal.SIGKILL


def test_a_loader_worker_obeys_only_its_parent():
    def worker() -> None:
        obey_only_parent()
        time.sleep(30)

    pid = fork(worker)
    time.sleep(0.3)
    for number in stopping.REQUESTS:
        subprocess.run(["sh", "-c", f"kill -{int(number)} {pid}"], check=True)
    time.sleep(0.3)
    assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_held_process_goes_on_when_its_holder_ends_in_whatever_way():
    launcher = subprocess.Popen(["sleep", "30"])
    process = psutil.Process(launcher.pid)

    def holder() -> None:
        hold(launcher.pid)
        time.sleep(30)

    def wait_until(is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not is_so():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    pid = fork(holder)
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    wait_until(lambda: process.status() != psutil.STATUS_STOPPED)
    launcher.kill()
    launcher.wait()


def test_launchers_are_known_by_their_command_lines_and_a_shell_is_none(tmp_path):
    look = "from llava_ds.runtime import processes; a = processes.look_above()"
    probe = f"{look}; print(len(a.links), a.launcher is not None)"
    (tmp_path / "torchrun").write_text("import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))")
    python = [sys.executable, "-c", probe]

    def links(*before: str) -> str:
        return subprocess.run([*before, *python], capture_output=True, text=True, check=True).stdout.strip()

    assert links() == "0 False"
    assert links(sys.executable, str(tmp_path / "torchrun")) == "1 True"
    assert links(sys.executable, str(tmp_path / "torchrun"), "sh", "-c", '"$0" "$@"; true') == "2 True"
    assert look_above() == Above()


def test_a_number_is_learnt_a_step_after_it_was_given(monkeypatch):
    class Work:
        def wait(self) -> None:
            waits.append(len(begun))

    begun, waits = [], []

    def all_reduce(tensor, op, group, async_op):
        begun.append(int(tensor[0]))
        tensor.fill_(max(int(tensor[0]), others.pop(0)))
        return Work()

    others = [0, 0, 5]
    monkeypatch.setattr(torch.distributed, "new_group", lambda **_: "group")
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    agreement = Agreement(Ranks(0, 0, 2, torch.device("cpu")))
    assert [agreement.exchange(mine) for mine in (0, 3, 0)] == [0, 0, 3]
    assert begun == [0, 3] and waits == [1, 2]  # none is waited for in the step that begins it, none is left over
    assert agreement.close() == 0


def test_time_is_over_while_a_step_more_and_the_save_still_fit():
    stop = Stopping()
    with stop.training("100s", ALONE):
        stop._started_s = time.monotonic() - 50
        assert not stop.agreed(50.0)  # the first step, which is no measure
        assert not stop.agreed(2.0)
        stop.saved(20.0)  # 1.5 * 20 + 3 * 2 + 1 + 10 s are kept now, of 100
        assert not stop.agreed(2.0)
        stop._started_s = time.monotonic() - 54
        assert stop.agreed(2.0)


@pytest.mark.parametrize(("text", "seconds"), [("3h50m", 13800), ("90s", 90), ("5400", 5400), ("1d", 86400)])
def test_lengths_of_time(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "1h30", "3 hours", "1.5h", "-5", "m"])
def test_what_is_no_length_of_time_is_refused(text):
    with pytest.raises(ConfigError, match="3h50m"):
        seconds_of(text)
