"""The commit protocol stopped at every one of its calls to the system: by a kill, and by an error of the disk."""

import errno
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from llava_ds.checkpoint import commit, verification
from llava_ds.files import writing as files
from llava_ds.runtime.ranks import Ranks

RANKS = Ranks(0, 0, 1, torch.device("cpu"))
# Calls that leave Python for the system and change something there.
CALLS = {"open", "write", "flush", "fsync", "close", "mkdir", "rename", "unlink", "rmdir"}
MOST_CALLS = 500


def save(output_dir: Path, step: int, content: str, limit: int | None) -> None:
    scratch = commit.begin(output_dir, step, RANKS)
    (scratch / "engine").mkdir()
    names = ("engine/weights.pt", "random-0.pt")
    written = {name: files.write_file(scratch / name, lambda file: file.write(content.encode())) for name in names}
    (scratch / "copied.py").write_text(content)  # as DeepSpeed copies its scripts
    commit.commit(scratch, written, None, RANKS)
    commit.keep_newest(output_dir, limit)


def at_call(number: int, act: Callable[[], None]) -> Callable:
    """A profile function that acts before this process's number-th call to the system; 0: never."""
    count = 0

    def hook(frame, event: str, function) -> None:
        nonlocal count
        if event == "c_call" and function.__name__ in CALLS:
            count += 1
            if count == number:
                act()

    return hook


def kill_at(number: int, *arguments) -> bool:
    """Save in a process of its own that is killed at its number-th call. Whether it came that far."""
    child = os.fork()
    if child == 0:
        try:
            sys.setprofile(at_call(number, lambda: os.kill(os.getpid(), signal.SIGKILL)))
            save(*arguments)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def state_of(output_dir: Path) -> tuple[int, str] | None:
    """Step and content of the newest whole checkpoint."""
    path, _ = verification.newest_whole(output_dir)
    return path and (commit.step_of(path), (path / "engine" / "weights.pt").read_text())


# The save that is stopped: its step, and how many are kept. Step 2 is the one that lies there as the newest.
SAVES = {"another, with a deletion": (3, 1), "the same step again": (2, None)}


@pytest.fixture(scope="module")
def before(tmp_path_factory) -> Path:
    """An output folder with checkpoints 1 and 2."""
    output_dir = tmp_path_factory.mktemp("before")
    for step in (1, 2):
        save(output_dir, step, f"content {step}", None)
    return output_dir


AGAIN = pytest.param("the same step again", marks=pytest.mark.long)


@pytest.mark.parametrize("kind", ["another, with a deletion", AGAIN])
def test_a_kill_at_any_call_leaves_the_old_or_the_new_one(tmp_path, before, kind):
    step, limit = SAVES[kind]
    seen = set()
    for number in range(1, MOST_CALLS):
        output_dir = shutil.copytree(before, tmp_path / str(number))
        came_so_far = kill_at(number, output_dir, step, "new content", limit)
        seen.add(found := state_of(output_dir))
        assert found in {(2, "content 2"), (step, "new content")}, (number, sorted(output_dir.iterdir()))
        if not came_so_far:
            break
        # What was left does not stand in the way of the next save.
        save(output_dir, 4, "next", 1)
        assert [path.name for path in output_dir.iterdir()] == ["checkpoint-4"]
    assert 25 < number < MOST_CALLS - 1 and len(seen) == 2 and found == (step, "new content")


@pytest.mark.long
def test_a_kill_at_any_call_of_the_first_save_leaves_nothing_torn(tmp_path):
    for number in range(1, MOST_CALLS):
        output_dir = tmp_path / str(number)
        output_dir.mkdir()
        came_so_far = kill_at(number, output_dir, 1, "first", None)
        assert state_of(output_dir) in {None, (1, "first")}
        if not came_so_far:
            break
    assert state_of(output_dir) == (1, "first")


@pytest.mark.parametrize("kind", SAVES)
def test_an_error_at_any_call_is_said_and_costs_no_checkpoint(tmp_path, before, kind):
    step, limit = SAVES[kind]
    outcomes = []

    def fail() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for number in range(1, MOST_CALLS):
        output_dir = shutil.copytree(before, tmp_path / str(number))
        sys.setprofile(at_call(number, fail))
        try:
            save(output_dir, step, "new content", limit)
            outcome = "saved"
        except commit.SaveFailed as error:
            outcome = "failed"
            assert "No space left on device (ENOSPC); free space" in str(error)
        except OSError:
            outcome = "failed"  # while this test itself writes
        all_calls_seen = sys.getprofile() is not None
        sys.setprofile(None)
        outcomes.append(outcome)
        assert state_of(output_dir) in {(2, "content 2"), (step, "new content")}
        if outcome == "saved":
            assert state_of(output_dir) == (step, "new content")
        if all_calls_seen:
            break
    assert "failed" in outcomes and outcome == "saved" and number < MOST_CALLS - 1
