"""Messages about a run that hangs: the ranks that hold it up, from their last heartbeats."""

import pytest

from llava_ds.runtime.hangs import Beat, Known, late_ranks, standstill, stragglers


def known(rank: int, phase: str = "step", step: int = 7, silent_s: float = 0.0, state: str = "", **more) -> Known:
    return Known(Beat(rank, phase, step, seconds=20.0, limit=10.0, **more), "gpu-02", 100 + rank, silent_s, state)


WAITS = {"waits": True, "where": "distributed_c10d.py:9 (all_reduce)"}


@pytest.mark.parametrize(
    ("ranks", "late"),
    [
        ([known(0, **WAITS), known(1, silent_s=31.0, **WAITS), known(2, **WAITS)], [1]),
        ([known(0, "save"), known(1), known(2, "save")], [1]),  # saving follows the step of its number
        ([known(0, step=8), known(1, "save"), known(2, step=8)], [1]),
        ([known(0, "export"), known(1, step=900), known(2, "done", silent_s=99.0)], [1]),
        ([known(0, "start", 0), known(1, step=1)], [0]),
        ([known(0, **WAITS), known(1, where="loader.py:205 (windows)"), known(2, **WAITS)], [1]),
        ([known(0, **WAITS), known(1, **WAITS)], []),
        ([known(0)], [0]),
        # On GPUs a host waits in the reading of a result, or for room in the device's queue.
        ([known(0, queues=True), known(1, where="loader.py:205 (windows)"), known(2, **WAITS)], [1]),
        ([known(0, queues=True), known(1, where="loader.py:205 (windows)"), known(2, queues=True)], [1]),
        ([known(0, **WAITS), known(1, queues=True), known(2, **WAITS)], [1]),
        ([known(0, queues=True), known(1, queues=True)], []),
        ([known(0, queues=True)], [0]),
    ],
)
def test_the_rank_that_is_behind_is_found(ranks, late):
    assert [each.beat.rank for each in late_ranks(ranks, 10.0)[0]] == late


def test_the_message_names_rank_place_and_samples():
    ranks = [known(rank, **WAITS) for rank in (0, 2, 3)]
    ranks.insert(1, known(1, silent_s=31.0, state="stopped", where="loader.py:205 (windows)"))
    first, second = standstill(ranks, 10.0, {1: ", on 2 samples (a1, a2)", 0: ", on none"}).splitlines()
    assert first == (
        "the run hangs: rank 1 on gpu-02 (pid 101) holds it up (no sign of life for 31 s, its process is "
        "stopped), in step 7 for 51 s, at loader.py:205 (windows), on 2 samples (a1, a2)"
    )
    assert second == "  ranks 0, 2-3: in step 7, waits at distributed_c10d.py:9 (all_reduce), for 20 s"
    said = standstill([known(0, **WAITS), known(1, **WAITS)], 10.0, {})
    assert said.startswith("the run hangs, and no rank holds up the others: all ranks wait")


def test_a_rank_at_work_while_the_others_wait_is_a_straggler():
    assert stragglers({0: (30.0, 60.0), 1: (58.2, 60.0), 2: (28.0, 60.0), 3: (29.0, 60.0)}) == [
        (1, pytest.approx(0.97), pytest.approx(29 / 60), pytest.approx(58.2 / 29))
    ]
    assert stragglers({0: (50.0, 60.0), 1: (58.0, 60.0)}) == []  # all work most of the time
    assert stragglers({0: (5.0, 60.0), 1: (12.0, 60.0)}) == []  # all wait: for a device, or for each other in turn
    assert stragglers({0: (30.0, 60.0)}) == stragglers({0: (0.0, 0.0), 1: (0.0, 0.0)}) == []
