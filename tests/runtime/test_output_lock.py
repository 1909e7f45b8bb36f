"""One run at a time holds an --output_dir; who is dead does not."""

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llava_ds.constants import ConfigError, DataError
from llava_ds.runtime import output_lock
from llava_ds.runtime.output_lock import NAME, Holder, OutputLock, Process

ELSEWHERE = Process("another", "another", 1, 0.0)
# Takes the lock, says so, and holds it until its stdin ends. A file `asked` beside the lock asks it to stop.
HOLD = """
import sys
from pathlib import Path
from llava_ds.runtime.output_lock import OutputLock
from llava_ds.constants import ConfigError
with OutputLock() as lock:
    lock.set_ending_check((Path(sys.argv[1]) / "asked").exists)
    try:
        lock.take(Path(sys.argv[1]))
    except ConfigError as error:
        print("refused", error, flush=True)
        sys.exit(2)
    print("holds", flush=True)
    sys.stdin.read()
"""


def start(folder: Path) -> subprocess.Popen:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], **pipes)


def holder_of(folder: Path) -> dict:
    return json.loads((folder / NAME).read_text())


def write(folder: Path, first: Process, **more: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / NAME).write_text(Holder("0", first, "long ago", **more).encoded())
    return folder / NAME


def ended() -> Process:
    """A process that is no more."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return dataclasses.replace(Process.current(), pid=child)


@pytest.mark.full
def test_a_second_start_is_refused_with_the_name_of_the_first_and_a_dead_one_holds_nothing(tmp_path):
    folder = tmp_path / "a" / "b"
    first, second = start(folder), None
    assert first.stdout.readline() == "holds\n"
    with pytest.raises(ConfigError, match=rf"is in use by another run \(process {first.pid} on "), OutputLock() as lock:
        lock.take(folder)
    first.send_signal(signal.SIGKILL)
    first.wait()
    second = start(folder)  # at once
    assert second.stdout.readline() == "holds\n"
    assert holder_of(folder)["first"]["pid"] == second.pid
    assert os.listdir(folder) == [NAME]
    second.stdin.close()
    assert second.wait() == 0
    assert os.listdir(folder) == []


@pytest.mark.parametrize("error", [None, ConfigError("x"), DataError("x")])
def test_it_is_released_where_all_ranks_have_come_to_their_end(tmp_path, error):
    (tmp_path / "kept").touch()
    try:
        with OutputLock() as lock:
            lock.take(tmp_path)
            if error is not None:
                raise error
    except ValueError as raised:
        assert raised is error
    assert os.listdir(tmp_path) == ["kept"]
    with OutputLock() as lock:
        lock.take(tmp_path / "a" / "b")
    assert os.listdir(tmp_path) == ["kept"]  # nor a folder that it made and nobody wrote to


def test_another_process_of_the_same_number_does_not_hold_it(tmp_path):
    write(tmp_path, dataclasses.replace(Process.current(), started=1.0))
    with OutputLock() as lock:
        lock.take(tmp_path)
        assert holder_of(tmp_path)["first"]["pid"] == os.getpid()


def test_a_run_that_was_asked_to_stop_is_waited_for(tmp_path, capsys):
    first = start(tmp_path)
    assert first.stdout.readline() == "holds\n"
    said = holder_of(tmp_path)
    (tmp_path / NAME).write_text(json.dumps({**said, "ending": True}))
    subprocess.Popen(["sh", "-c", f"sleep 0.7; kill -9 {first.pid}"])
    began = time.monotonic()
    with OutputLock() as lock:
        lock.take(tmp_path)
        assert time.monotonic() - began > 0.5
    assert "it is stopping: waiting" in capsys.readouterr().out
    first.wait()


def test_its_own_end_is_told(tmp_path):
    with OutputLock() as lock:
        lock.take(tmp_path)
        assert holder_of(tmp_path)["ending"] is False
        lock.set_ending_check(lambda: True)
        deadline = time.monotonic() + 10
        while not holder_of(tmp_path)["ending"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_ranks_of_a_dead_run_are_waited_for_and_named_if_they_stay(tmp_path, monkeypatch, capsys):
    sleeper = subprocess.Popen(["sleep", "60"])
    rank = dataclasses.replace(Process.current(), pid=sleeper.pid, started=time.time())
    write(tmp_path, ended(), ranks=(rank,))
    monkeypatch.setattr(output_lock, "LINGERING_S", 0.3)
    for says in ("kill -9 ", "is in use by another run"):  # and it does not hold less at the second look
        with pytest.raises(ConfigError, match=says), OutputLock() as lock:
            lock.take(tmp_path)
    sleeper.kill()
    sleeper.wait()
    with OutputLock() as lock:
        lock.take(tmp_path)
    assert "are still ending: waiting" in capsys.readouterr().out


def test_another_machine_holds_it_while_it_renews_it(tmp_path, monkeypatch):
    path = write(tmp_path, ELSEWHERE)
    os.utime(path, (0, time.time() - 2 * output_lock.SILENT_S))
    with OutputLock() as lock:
        lock.take(tmp_path)  # silent for long
    write(tmp_path, ELSEWHERE)
    subprocess.Popen(["sh", "-c", f"sleep 0.3; touch {path}"])
    with pytest.raises(ConfigError, match="process 1 on another, started long ago"), OutputLock() as lock:
        lock.take(tmp_path)
    monkeypatch.setattr(output_lock, "SILENT_S", 0.5)
    with OutputLock() as lock:
        lock.take(tmp_path)  # silent from now on


UNREADABLE = [b"", b"{}", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"first": {}, "ranks": 3}']
WRONG_TYPES = [
    ("first.pid", "x"),
    ("first.pid", -1),
    ("first.pid", 10**30),
    ("first.started", "x"),
    ("first.host", 3),
    ("ranks.0.pid", "x"),
    ("ranks", 3),
    ("token", "../../zz"),
    ("token", "a\0b"),
    ("token", "a" * 4000),
    ("token", 1),
    ("since", "x" * 5000),
    ("ending", "no"),
]


def with_wrong_type(first: Process, place: str, value: object) -> bytes:
    whole = target = json.loads(Holder("0", first, "long ago", (first,)).encoded())
    *above, last = place.split(".")
    for part in above:
        target = target[int(part) if part.isdigit() else part]
    target[last] = value
    return json.dumps(whole).encode()


@pytest.mark.parametrize("where", ["here", "elsewhere"])
@pytest.mark.parametrize("content", [*UNREADABLE, *WRONG_TYPES], ids=range(len(UNREADABLE + WRONG_TYPES)))
def test_what_cannot_be_read_holds_until_it_is_old(tmp_path, content, where):
    if isinstance(content, tuple):
        content = with_wrong_type(ended() if where == "here" else ELSEWHERE, *content)
    (tmp_path / NAME).write_bytes(content)
    assert output_lock._read(tmp_path / NAME).first is None
    os.utime(tmp_path / NAME, (0, time.time() - 2 * output_lock.SILENT_S))
    with OutputLock() as lock:
        lock.take(tmp_path)
    assert os.listdir(tmp_path) == []


def test_what_it_writes_it_reads(tmp_path):
    written = Holder("0f", Process.current(), "now", (ended(), ELSEWHERE), 7, True)
    (tmp_path / NAME).write_text(written.encoded())
    assert output_lock._read(tmp_path / NAME) == written


def test_a_link_that_leads_nowhere_is_named(tmp_path):
    (tmp_path / NAME).symlink_to("gone")
    child = start(tmp_path)
    try:
        said, _ = child.communicate(timeout=20)
    finally:
        child.kill()
    assert (child.returncode, said) == (2, f"refused {tmp_path / NAME} is a broken link: remove it\n")


def test_what_is_no_file_and_a_folder_that_cannot_be_written_to_are_named(tmp_path):
    os.mkfifo(tmp_path / NAME)
    with pytest.raises(ConfigError, match=f"{NAME} is not a regular file"):
        OutputLock().take(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--output_dir can't be written to: .*ENOTDIR"):
        OutputLock().take(tmp_path / "file" / "below")


def test_without_hard_links_it_is_one_step_too(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError(1, "no links")))
    with OutputLock() as lock:
        lock.take(tmp_path)
        with pytest.raises(ConfigError, match="is in use by another run"), OutputLock() as second:
            second.take(tmp_path)
    write(tmp_path, ended())
    with OutputLock() as lock:
        lock.take(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_holder_that_was_silent_and_lost_it_ends(tmp_path):
    first = start(tmp_path)
    assert first.stdout.readline() == "holds\n"
    write(tmp_path, ELSEWHERE)
    assert first.wait(30) == 2


def test_a_holder_that_lost_it_does_not_take_it_back_to_say_that_it_is_ending(tmp_path):
    first = start(tmp_path)
    assert first.stdout.readline() == "holds\n"
    time.sleep(2 * output_lock.TICK_S)  # beyond its first renewal; the next is RENEWAL_S later
    write(tmp_path, ELSEWHERE)
    (tmp_path / "asked").touch()
    assert first.wait(30) == 2
    assert holder_of(tmp_path)["first"]["host"] == ELSEWHERE.host
    assert sorted(os.listdir(tmp_path)) == ["asked", NAME]


def test_what_was_about_to_be_written_when_it_was_released_is_not(tmp_path):
    lock = OutputLock()
    lock.take(tmp_path)
    with lock._writing:
        lock.set_ending_check(lambda: True)
        time.sleep(2 * output_lock.TICK_S)  # the thread waits to write
        lock._released.set()
    lock.release()
    assert not lock._thread.is_alive()
    lock._rewrite(ending=True)
    assert os.listdir(tmp_path) == []


def test_other_ranks_wait_where_they_cannot_read_it(tmp_path, monkeypatch):
    assert not output_lock._is_held_by(tmp_path / NAME, 1)
    os.mkfifo(tmp_path / NAME)
    assert not output_lock._is_held_by(tmp_path / NAME, 1)
    for code in (errno.EACCES, errno.ESTALE):
        monkeypatch.setattr(os, "open", lambda *_, code=code: (_ for _ in ()).throw(OSError(code, "no")))
        assert not output_lock._is_held_by(tmp_path / NAME, 1)


def test_what_is_no_file_beside_it_does_not_end_the_one_that_took_it(tmp_path):
    os.mkfifo(tmp_path / f"{NAME}.x")
    with OutputLock() as lock:
        lock.take(tmp_path)
    assert os.listdir(tmp_path) == [f"{NAME}.x"]


@pytest.mark.parametrize("dead", ["holder", "holder and a start that was killed as it took over"])
def test_of_many_starts_at_once_one_gets_it(tmp_path, dead):
    """A dead holder's place too; each round all starts are forked at the same moment."""
    for round_number in range(4):
        folder = tmp_path / str(round_number)
        write(folder, ended())
        if dead != "holder":
            (folder / f"{NAME}.after-0").write_text(Holder("1", ended(), "now").encoded())
        go = time.time() + 0.1
        children, (reader, writer) = [], os.pipe()
        for _ in range(6):
            child = os.fork()
            if child == 0:
                code = 3
                try:
                    os.close(writer)
                    time.sleep(max(0.0, go - time.time()))
                    OutputLock().take(folder)
                    code = 0
                    os.read(reader, 1)  # holds it until all have tried
                except ConfigError:
                    code = 2
                finally:
                    os._exit(code)
            children.append(child)
        os.close(reader)
        codes, waiting = [], list(children)
        deadline = time.monotonic() + 60
        while len(waiting) > 1 and time.monotonic() < deadline:
            for child in waiting:
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    waiting.remove(child)
                    codes.append(os.waitstatus_to_exitcode(status))
                    break
            time.sleep(0.005)
        os.close(writer)
        codes += [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in waiting]
        assert sorted(codes) == [0, 2, 2, 2, 2, 2], round_number
