"""The simulation of many ranks runs, and its figures are those that the design promises."""

from pathlib import Path

import pytest
from measured import many_ranks as simulate


@pytest.mark.full
def test_connections_grow_with_the_logarithm_of_the_ranks():
    files = {lazy: simulate.measure_meeting(24, lazy)["most of the others"] for lazy in (False, True)}
    assert files[False] >= 3 * 23 and files[True] <= 36


def test_heartbeats_of_512_ranks_cost_a_rank_a_few_packets_and_none_is_lost():
    if int(Path("/proc/sys/net/core/rmem_max").read_text()) < 512 * 1280:
        pytest.skip("this machine's net.core.rmem_max holds fewer packets")
    few, many = simulate.measure_heartbeats(64), simulate.measure_heartbeats(512)
    assert few["packets per second, all"] == 64 * 63
    assert many["packets per second, all"] < 2 * few["packets per second, all"]
    assert many["most to one rank"] == 511 and many["lost of a burst"] == 0


def test_a_checkpoint_of_64_ranks_is_committed_refused_and_verified():
    assert simulate.measure_checkpoint(64)["files"] == 4 * 64 + 1


@pytest.mark.full
def test_other_ranks_map_the_order_that_the_first_one_made():
    found = simulate.measure_planning(1_000_000, 512, 4, 8192, "modality")
    assert found["mapped bytes per sample, once per machine"] < 16.1 and found["private MB, other ranks"] < 5
