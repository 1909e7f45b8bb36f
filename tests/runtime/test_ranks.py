"""What is checked before ranks train together, with the other ranks' answers made up."""

import logging
import socket
import threading
import warnings

import pytest
import torch
import transformers

from llava_ds.constants import ConfigError, DataError
from llava_ds.runtime import ranks as distributed
from llava_ds.runtime.ranks import (
    DETAILS,
    Ranks,
    check_same,
    check_shared_folder,
    first_rank_first,
    print_details,
    quiet_libraries,
)

FOUR = Ranks(rank=0, local_rank=0, world_size=4, device=torch.device("cpu"))


def test_ranks_that_differ_are_named(monkeypatch):
    mine = {"torch": "2.13.0", "python": "3.11"}
    everyone = [mine, {**mine, "torch": "2.12.0"}, mine, mine]
    monkeypatch.setattr(distributed, "gather", lambda value, ranks: everyone)
    message = 'torch differs between ranks: "2.13.0" on ranks 0, 2-3; "2.12.0" on rank 1\ndo this'
    with pytest.raises(ConfigError) as error:
        check_same(mine, FOUR, "do this")
    assert str(error.value) == message
    everyone[1] = mine
    check_same(mine, FOUR, "do this")


def test_a_folder_that_not_all_ranks_share(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(distributed, "broadcast_from_first", lambda ranks, ask: seen.append(ask()) or seen[-1])
    monkeypatch.setattr(distributed, "gather", lambda value, ranks: [value, True, False, False])
    folder = tmp_path / "out"
    with pytest.raises(
        ConfigError, match=r"--output_dir .*out: ranks 2-3 of 4 do not see a file that rank 0 wrote there"
    ):
        check_shared_folder(folder, "--output_dir", FOUR, wait_s=0)
    monkeypatch.setattr(distributed, "gather", lambda value, ranks: [value] * 4)
    check_shared_folder(folder, "--output_dir", FOUR, wait_s=0)
    assert len(seen) == 2 and not list(folder.iterdir())  # nothing is left


class Turns:
    """Four ranks as threads, on two machines; their gather is a barrier with a list."""

    def __init__(self, monkeypatch):
        self.ranks = [Ranks(rank, rank % 2, 4, torch.device("cpu")) for rank in range(4)]
        self.values, self.barrier, self.order = [None] * 4, threading.Barrier(4, timeout=20), []
        monkeypatch.setattr(distributed, "gather", self.gather)

    def gather(self, value, ranks):
        self.values[ranks.rank] = value
        self.barrier.wait()
        everyone = list(self.values)
        self.barrier.wait()
        return everyone

    def run(self, failing: int | None) -> list[str | None]:
        said: list[str | None] = [None] * 4

        def one(ranks: Ranks) -> None:
            try:
                with first_rank_first(ranks):
                    self.order.append(ranks.rank)
                    if ranks.rank == failing:
                        raise DataError("no such file")
            except DataError as error:
                said[ranks.rank] = str(error)

        threads = [threading.Thread(target=one, args=(ranks,)) for ranks in self.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return said


def test_rank_0_goes_first_then_each_machines_first(monkeypatch):
    turns = Turns(monkeypatch)
    assert turns.run(failing=None) == [None] * 4
    assert turns.order[:2] == [0, 2] and set(turns.order[2:]) == {1, 3}


@pytest.mark.parametrize("failing", range(4))
def test_an_error_that_one_rank_meets_ends_all(monkeypatch, failing):
    said = Turns(monkeypatch).run(failing)
    assert said[failing] == "no such file"
    others = {text for rank, text in enumerate(said) if rank != failing}
    assert others == {"no such file" if failing == 0 else f"on rank {failing} ({socket.gethostname()}): no such file"}


def test_libraries_and_details_are_quiet_unless_asked_to_speak(monkeypatch, capsys):
    deepspeed, bars = logging.getLogger("DeepSpeed"), transformers.utils.logging.is_progress_bar_enabled()
    before = deepspeed.level, transformers.logging.get_verbosity()
    try:
        for rank, heard in (("0", True), ("1", False)):
            monkeypatch.setenv("RANK", rank)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                quiet_libraries()
                warnings.warn("something", UserWarning, stacklevel=1)
            assert bool(said) == heard  # every rank has the same to say
        assert deepspeed.level == logging.WARNING
        monkeypatch.setenv("RANK", "0")
        print_details("hidden")
        assert transformers.logging.get_verbosity() == transformers.logging.ERROR
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            quiet_libraries(verbose=True)
            warnings.warn("something", UserWarning, stacklevel=1)
        print_details("shown")
        assert capsys.readouterr().out == "shown\n"
        assert said and deepspeed.level == logging.INFO
        assert transformers.logging.get_verbosity() == transformers.logging.INFO
    finally:
        DETAILS.setLevel(logging.NOTSET)
        deepspeed.setLevel(before[0])
        transformers.logging.set_verbosity(before[1])
        if bars:
            transformers.logging.enable_progress_bar()
