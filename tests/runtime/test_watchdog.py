"""What ends a run and what does not, with one rank's thread, short limits, and a clock of its own."""

import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
import torch
from ds_json import arguments

from llava_ds.constants import EXIT_RANK_LOST, ConfigError
from llava_ds.runtime import heartbeat
from llava_ds.runtime import watchdog as module
from llava_ds.runtime.hangs import Beat
from llava_ds.runtime.heartbeat import Peer
from llava_ds.runtime.main_thread import Activity, look_at
from llava_ds.runtime.ranks import Ranks
from llava_ds.runtime.waiting import note_progress, queuing, waiting
from llava_ds.runtime.watchdog import Watchdog

CPU = torch.device("cpu")


class Others:
    """Stands for Peers: rank 1 says what it is told to say."""

    interval_s = first_send_s = 0.02
    watches = True

    def __init__(self, ranks: Ranks) -> None:
        self.watchers = self.heard_ranks = frozenset(range(ranks.world_size))
        self.all = [Peer("here", 100 + rank, (), 0, "") for rank in range(ranks.world_size)]
        self.says: list[Beat] = []
        self.sent: list[Beat] = []
        self.gone: list[int] = []
        self.refused = (0, 0)

    def send(self, beat: Beat) -> None:
        self.sent.append(beat)

    def heard(self) -> list[Beat]:
        found, self.says = self.says, []
        return found

    def wait(self, seconds: float) -> list[int]:
        time.sleep(max(0.0, seconds))
        found, self.gone = self.gone, []
        return found

    def listeners_of(self, rank: int) -> frozenset[int]:
        return self.heard_ranks

    def refusals(self, rank: int) -> tuple[int, int]:
        return self.refused

    def process_state(self, rank: int) -> str:
        return ""

    def is_back(self, rank: int) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def start(monkeypatch, tmp_path):
    """A function that starts a watchdog with limits; os._exit ends its thread only, and its code is noted."""
    codes: list[int] = []
    said: list[str] = []
    started: list[Watchdog] = []

    def leave(code: int) -> None:
        codes.append(code)
        raise SystemExit

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    monkeypatch.setattr(module, "say", said.append)
    monkeypatch.setattr(heartbeat, "Peers", Others)
    monkeypatch.setattr(module, "barrier", lambda ranks: None)
    # A machine that is busy with other things only slows the clock down.
    short = {"SILENT_S": 0.3, "REFUSED_S": 0.3, "UNREACHABLE_S": 0.6, "LAUNCHER_S": 0.1, "LONGEST_TICK_S": 0.02}
    for name, seconds in short.items():
        monkeypatch.setattr(module, name, seconds)

    def begin(world_size: int = 1, window_s: float = 60.0, device: str = "cpu", **limits: float) -> SimpleNamespace:
        limits = {"watchdog_start_s": 0.0, "watchdog_step_s": 0.0, "watchdog_save_s": 0.0, **limits}
        args = arguments(**limits).replaced(output_dir=str(tmp_path))
        dog = Watchdog(tick_s=0.01, window_s=window_s)
        dog.start(args.training, Ranks(0, 0, world_size, torch.device(device)))
        started.append(dog)
        return SimpleNamespace(dog=dog, codes=codes, said=said, others=dog._peers, thread=dog._thread, folder=tmp_path)

    yield begin
    for dog in started:
        dog._closed.set()


def blocks(seconds: float) -> None:
    """Stay at one line."""
    threading.Event().wait(seconds)


def test_a_step_that_waits_for_work_that_goes_on_elsewhere_is_not_ended(start):
    run = start(watchdog_start_s=0.3, watchdog_step_s=0.3)
    run.dog.set_phase("step", 1)
    for _ in range(8):
        note_progress()
        blocks(0.1)
    assert not run.codes
    blocks(1.5)
    assert run.codes == [EXIT_RANK_LOST]


def test_a_step_over_its_limit_ends_the_run_with_its_samples_and_stacks(start):
    run = start(watchdog_step_s=0.3)
    run.dog._samples = lambda step, rank: f"2 samples of step {step}, rank {rank}"
    run.dog.set_phase("step", 1)
    blocks(0.2)
    run.dog.set_phase("step", 2)  # the first may take as long as starting; now it is known how long steps take
    run.thread.join(20)
    assert run.codes == [EXIT_RANK_LOST]
    (message,) = run.said
    assert "run/train.py: error: the run hangs: rank 0" in message and "in step 2 for" in message
    assert "2 samples of step 2, rank 0" in message and "--watchdog_step_s 0.3" in message
    stacks = (run.folder / "hang-rank0.txt").read_text()
    assert "in step 2" in stacks and "in test_a_step_over_its_limit" in stacks and "_watch" in stacks


def test_steps_that_end_in_time_and_phases_without_a_limit_go_on(start):
    run = start(watchdog_step_s=0.4)
    blocks(0.6)  # in start, without a limit
    for step in range(1, 6):
        run.dog.set_phase("step", step)
        blocks(0.15)
    run.dog.set_phase("save", 5)
    blocks(0.6)
    run.dog.set_phase("step", 6)
    assert run.codes == [] and run.thread.is_alive()


@pytest.mark.full
def test_starting_may_take_long_while_it_gets_on(start, monkeypatch):
    goes_on = [True]
    monkeypatch.setattr(module, "Activity", lambda on_gpu: SimpleNamespace(goes_on=lambda elapsed_s: goes_on[0]))
    run = start(2, watchdog_start_s=1.5)
    run.others.says = [peer("start", waits=True)]
    blocks(2.0)  # at one line, but its workers or the disk are busy
    assert run.codes == []
    goes_on[0] = False
    until = time.monotonic() + 2.5
    while time.monotonic() < until:  # at many lines
        sum(range(1000))
        sum(range(2000))
        sum(range(3000))
        sum(range(4000))
    assert run.codes == []
    run.thread.join(20)
    assert run.codes == [EXIT_RANK_LOST] and "at startup" in run.said[0]


def test_a_wait_that_spins_is_no_progress(start, monkeypatch):
    """CUDA and NCCL use a whole core while they wait."""
    monkeypatch.setattr(module, "Activity", lambda on_gpu: SimpleNamespace(goes_on=lambda elapsed_s: True))
    run = start(2, watchdog_start_s=0.3)
    run.others.says = [peer("start", waits=True)]
    with waiting("the numbers of a step"):
        blocks(3.0)
    run.thread.join(20)
    assert run.codes == [EXIT_RANK_LOST] and "for the numbers of a step" in run.said[0]


def test_on_a_gpu_a_process_gets_on_with_its_files_and_children_not_with_its_own_processor():
    own, others = Activity(), Activity(on_gpu=True)
    own._before, others._before = (own._used()[0], 10**12), (others._used()[0], 10**12)
    busy_until = time.process_time() + 0.3  # six times what a process that gets on uses in a second
    while time.process_time() < busy_until:
        pass
    assert own.goes_on(1.0) and not others.goes_on(1.0)
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    deadline, used = time.monotonic() + 20, others._used()[0]
    while others._used()[0] < used + 0.2 and time.monotonic() < deadline:
        time.sleep(0.05)
    found = others._used()[0]
    child.kill()
    child.wait()
    assert found >= used + 0.2


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_on_a_gpu_a_host_that_stands_still_while_it_queues_waits(start, device):
    run = start(2, device=device)
    run.dog.set_phase("step", 1)
    with queuing():
        blocks(1.5)
    beat = run.others.sent[-1]
    assert beat.queues == (device == "cuda") and not beat.waits and beat.step_s > 0.3
    assert (beat.busy_s < 0.5 * beat.step_s) == (device == "cuda")


def test_the_innermost_mark_is_seen_and_ends_with_its_block():
    def sight():
        return look_at(sys._getframe(), threading.current_thread())

    assert not sight().waits and not sight().queues
    with queuing():
        assert sight().queues and not sight().waits
        with pytest.raises(RuntimeError), waiting("the log"):
            assert sight().waits and not sight().queues and sight().where.endswith(" for the log")
            raise RuntimeError
        assert sight().queues
    assert not sight().queues
    with waiting("the log"):  # each thread has its own
        seen = []
        other = threading.Thread(target=lambda: seen.append(sight().waits))
        other.start()
        other.join()
    assert seen == [False]


def test_a_process_gets_on_with_its_processor_its_files_and_its_children():
    activity = Activity()
    activity._before = (0.0, 0)  # as if all that this process ever used were since the last look
    assert activity.goes_on(0.1)
    assert not activity.goes_on(1e6)
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    deadline = time.monotonic() + 20
    used = activity._before[0]
    while (found := activity._used()[0]) < used + 0.2 and time.monotonic() < deadline:
        time.sleep(0.05)
    child.kill()
    child.wait()
    assert found >= used + 0.2 and psutil.Process().cpu_times().user < found


def test_a_rank_is_heard_before_it_can_be_stopped(start, monkeypatch):
    monkeypatch.setattr(Others, "interval_s", 1000.0)
    assert [beat.phase for beat in start(2).others.sent] == ["start"]


def test_a_crash_in_native_code_leaves_the_stacks(tmp_path):
    said = tmp_path / "said.txt"
    child = os.fork()
    if child == 0:
        with said.open("w") as file, Watchdog():
            os.dup2(file.fileno(), 2)
            os.kill(os.getpid(), signal.SIGSEGV)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in said.read_text()
    assert "in test_a_crash_in_native_code_leaves_the_stacks" in said.read_text()


def test_a_steps_limit_grows_with_the_steps(start):
    run = start(watchdog_step_s=0.1)
    run.dog.set_phase("step", 1)
    blocks(0.4)
    run.dog.set_phase("step", 2)
    blocks(0.8)  # over the limit, below four times the longest
    assert run.codes == []


def peer(phase: str = "step", step: int = 1, **more) -> Beat:
    return Beat(1, phase, step, **{"seconds": 5.0, "limit": 0.2, **more})


def test_a_rank_waits_as_long_as_another_is_in_time(start):
    run = start(2, watchdog_step_s=0.2)
    run.dog.set_phase("step", 2)
    run.dog._longest = 0.01
    for _ in range(20):  # rank 1 saves, and has a long limit for it
        run.others.says = [peer("save", limit=100.0)]
        blocks(0.05)
    assert run.codes == []
    run.others.says = [peer("save")]
    run.thread.join(20)
    assert (
        run.codes == [EXIT_RANK_LOST]
        and "rank 1 on here (pid 101) holds it up (the other ranks are ahead" in run.said[0]
    )
    assert run.others.sent[-1].ends.startswith("the run hangs: rank 1") and run.others.sent[-1].hangs
    assert run.others.sent[-1].speaker == 0 and len(run.said) == 1


def test_without_every_ranks_beat_no_limit_ends_the_run_and_that_is_said_once(start):
    run = start(2, watchdog_start_s=0.1)
    for _ in range(200):
        blocks(0.05)
        if run.said:
            break
    blocks(0.2)
    assert run.codes == [] and len(run.said) == 1 and "no heartbeat of rank 1 reached rank 0" in run.said[0]


def test_a_rank_that_hears_few_judges_only_when_no_watcher_is_left(start, monkeypatch):
    """At hundreds of ranks: rank 0 is no watcher here, rank 1 is, and rank 2's beats go to rank 1 alone."""
    monkeypatch.setattr(Others, "watches", False)
    monkeypatch.setattr(module, "SILENT_S", 1.0)
    # On a busy machine the watchdog's own looks, fifty a second here, would count as progress.
    monkeypatch.setattr(module, "Activity", lambda on_gpu: SimpleNamespace(goes_on=lambda elapsed_s: False))
    run = start(3, watchdog_start_s=0.1)
    run.others.watchers, run.others.heard_ranks = frozenset({1}), frozenset({0, 1})
    run.others.says = [peer(limit=0.1, seconds=9.0)]
    blocks(0.6)
    assert run.codes == [] and run.said == []
    run.thread.join(20)
    assert run.codes == [EXIT_RANK_LOST] and "rank 1 on here (pid 101) holds it up (no sign of life" in run.said[0]


def test_a_process_that_died_is_named_at_once(start):
    run = start(2)
    run.others.says = [peer()]
    blocks(0.1)
    run.others.gone = [1]
    run.thread.join(20)
    assert (
        run.codes == [EXIT_RANK_LOST] and "rank 1 on here (pid 101) died: " in run.said[0] and "step 1" in run.said[0]
    )
    assert not (run.folder / "hang-rank0.txt").exists()


def test_a_process_that_is_done_may_end(start):
    run = start(2)
    run.others.says = [peer("done")]
    blocks(0.1)
    run.others.gone, run.others.refused = [1], (9, 9)
    blocks(0.8)
    assert run.codes == [] and run.said == []


def test_a_silent_rank_is_lost_only_if_its_machine_says_so(start):
    run = start(2)
    run.others.says = [peer(limit=None)]
    blocks(0.5)
    assert run.codes == []  # stopped, or slow
    run.others.refused = (3, 0)
    run.thread.join(20)
    assert run.codes == [EXIT_RANK_LOST] and "its process is gone" in run.said[0]


def test_the_end_that_another_rank_tells_ends_this_one(start):
    run = start(2)
    run.others.all[1] = Peer("far", 101, (), 0, "")
    run.others.says = [peer(ends="rank 3 on far died", hangs=True)]
    run.thread.join(20)
    assert run.codes == [EXIT_RANK_LOST] and (run.folder / "hang-rank0.txt").exists()
    assert run.said == ["rank 3 on far died (reported by rank 1 on far (pid 101)): this machine's ranks end now"]


def test_a_standstill_is_printed_whichever_rank_judges_first(start):
    """The first rank alive prints it, for all judge at about the same moment."""
    run = start(2, watchdog_step_s=0.3)
    run.others.says = [peer(ends="the run hangs: rank 1 holds it up", hangs=True, speaker=0)]
    run.thread.join(20)
    (message,) = run.said
    assert message.startswith("run/train.py: error: the run hangs: rank 1 holds it up\n  the limit is ")
    assert "--watchdog_step_s 0.3" in message and run.codes == [EXIT_RANK_LOST]


def test_an_error_is_told_to_the_others_with_the_ranks_name(start):
    run = start(2)
    with pytest.raises(RuntimeError, match="boom"), run.dog:
        run.dog.set_phase("save", 4)
        raise RuntimeError("boom")
    assert "saving after step 4: RuntimeError('boom')" in run.said[0]
    (told,) = [beat.ends for beat in run.others.sent if beat.ends]
    assert told in run.said[0] and not run.thread.is_alive()
    run = start(2)
    with pytest.raises(ConfigError), run.dog:
        raise ConfigError("a flag")
    (told,) = [beat.ends for beat in run.others.sent if beat.ends]
    assert len(run.said) == 1 and "a flag" in told  # said by who reports it


def test_at_the_end_all_are_told_before_anyone_leaves(start):
    run = start(2)
    with run.dog:
        run.dog.set_phase("export", 4)
    assert run.others.sent[-1].phase == "done" and not run.thread.is_alive() and run.codes == []
    with Watchdog():
        pass  # which never started: the flags were wrong


def test_who_holds_the_others_up_is_said(start):
    run = start(2, window_s=0.5)
    run.dog.set_phase("step", 1)
    for k in range(200):  # this rank is always at work, rank 1 a third of its time
        run.others.says = [peer(step=k, limit=None, busy_s=0.1 * k, step_s=0.3 * k)]
        blocks(0.05)
        if run.said:
            break
    assert run.said and run.said[0].startswith("watchdog: rank 0 on here (pid 100) holds up the others")
    assert "(33%, median)" in run.said[0] and run.codes == []


@pytest.mark.parametrize("name", ["watchdog_start_s", "watchdog_step_s", "watchdog_save_s"])
def test_a_limit_is_no_less_than_none(name):
    with pytest.raises(ConfigError, match=f"--{name} is -1.0: give 0 or more"):
        arguments(**{name: -1.0})


def test_a_rank_that_was_asked_to_leave_is_not_said_to_have_crashed(start):
    run = start(world_size=2)
    run.dog.set_phase("step", 3)
    run.dog.leaving("the process that started this run has ended")
    assert [(beat.ends, beat.leaves) for beat in run.others.sent if beat.ends] == [
        ("rank 0 on here (pid 100) left in step 3: the process that started this run has ended", True)
    ]
    run.others.says.append(Beat(1, "step", 3, ends="rank 1 on here (pid 101) left in step 3: SIGTERM", leaves=True))
    run.others.gone.append(1)  # its process ends at once
    run.thread.join(20)
    assert run.codes == [EXIT_RANK_LOST]
    assert run.said == ["run/train.py: rank 1 on here (pid 101) left in step 3: SIGTERM; the other ranks end now"]
