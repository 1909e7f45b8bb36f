"""kill -9 at every call that one of two ranks makes while they commit a checkpoint."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from llava_ds.checkpoint import commit, verification
from llava_ds.files import writing as files
from llava_ds.runtime.ranks import Ranks

pytestmark = pytest.mark.faults

CALLS = {"open", "write", "flush", "fsync", "close", "mkdir", "rename", "unlink", "rmdir"}  # that change something


def save_together(rank: int, folder: Path, killed_at: int) -> None:
    """One rank's part of a save on two ranks; 0: it is not killed."""
    store = torch.distributed.FileStore(str(folder / "meeting"), 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    ranks = Ranks(rank, rank, 2, torch.device("cpu"), torch.distributed.group.WORLD)
    count = 0

    def hook(frame, event: str, function) -> None:
        nonlocal count
        if event == "c_call" and function.__name__ in CALLS:
            count += 1
            if count == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)

    if killed_at:
        sys.setprofile(hook)
    scratch = commit.begin(folder, 2, ranks)
    content = f"new {rank}".encode()
    written = {f"{rank}.pt": files.write_file(scratch / f"{rank}.pt", lambda file: file.write(content))}
    commit.commit(scratch, written, None, ranks)
    if ranks.is_first:
        commit.keep_newest(folder, 1)


def run_two(folder: Path, killed: int, killed_at: int) -> bool:
    """Save in two processes, one of which is killed at a call of its. Whether it came that far."""
    children = []
    for rank in range(2):
        children.append(os.fork())
        if children[-1] == 0:
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 2)
            try:
                save_together(rank, folder, killed_at if rank == killed else 0)
            finally:
                os._exit(0)
    was_killed = os.WIFSIGNALED(os.waitpid(children[killed], 0)[1])
    other = children[1 - killed]
    if was_killed:
        os.kill(other, signal.SIGKILL)  # as the launcher does
    os.waitpid(other, 0)
    return was_killed


@pytest.mark.parametrize("killed", [0, 1])
def test_every_call_of_either_rank_may_be_the_last(tmp_path, killed):
    alone = Ranks(0, 0, 1, torch.device("cpu"))
    for number in range(1, 500):
        folder = tmp_path / str(number)
        scratch = commit.begin(folder, 1, alone)
        (scratch / "0.pt").write_text("old")
        commit.commit(scratch, {}, None, alone)
        was_killed = run_two(folder, killed, number)
        path, _ = verification.newest_whole(folder)
        contents = {file.name: file.read_text() for file in path.glob("*.pt")}
        assert contents in ({"0.pt": "old"}, {"0.pt": "new 0", "1.pt": "new 1"}), number
        if not was_killed:
            break
    assert contents == {"0.pt": "new 0", "1.pt": "new 1"} and 5 < number < 499
