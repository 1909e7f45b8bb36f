"""Beats reach the other ranks, and nothing else that comes to the port counts."""

import itertools
import json
import os
import signal
import socket
import subprocess
import threading
import time
from dataclasses import replace

import pytest
import torch

from llava_ds.runtime import heartbeat
from llava_ds.runtime.hangs import Beat
from llava_ds.runtime.heartbeat import Peer, Peers, decoded, encoded, watchers
from llava_ds.runtime.ranks import Ranks

BEAT = Beat(1, "step", 7, 12.5, 480.0, "loader.py:205 (windows)", True, 3.0, 4.0, "rank 0 died", True)


@pytest.fixture
def meet(monkeypatch):
    """A function that makes the Peers of some ranks, each in a thread; gather works between them."""
    made: list[Peers] = []

    def all_of(num_ranks: int, on_each_machine: int | None = None) -> list[Peers]:
        values, barrier, own = {}, threading.Barrier(num_ranks), threading.local()

        def gather(value: object, ranks: Ranks) -> list:
            values[ranks.rank] = value
            barrier.wait(10)
            own.values = [values[rank] for rank in range(num_ranks)]
            barrier.wait(10)
            return own.values

        monkeypatch.setattr(heartbeat, "gather", gather)
        monkeypatch.setattr(heartbeat, "local_ranks", lambda: on_each_machine or num_ranks)

        def make(rank: int) -> None:
            made.append(Peers(Ranks(rank, rank, num_ranks, torch.device("cpu"))))

        threads = [threading.Thread(target=make, args=(rank,)) for rank in range(num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return sorted(made, key=lambda peers: peers.rank)

    yield all_of
    for peers in made:
        peers.close()


def within_2_s(ask):
    """The first answer that is not empty."""
    deadline = time.monotonic() + 2
    while not (found := ask()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def test_a_beat_arrives_as_it_was_said(meet):
    first, second, third = meet(3)
    second.send(BEAT)
    assert within_2_s(first.heard) == within_2_s(third.heard) == [BEAT]
    assert second.heard() == []


def test_several_machines_hear_each_other_on_the_way_to_the_first(meet, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    ways = iter([(socket.AF_INET, "127.0.0.1")] * 2)
    monkeypatch.setattr(heartbeat, "address_towards", lambda host: next(ways))
    first, second = meet(2, on_each_machine=1)
    second.send(BEAT)
    assert within_2_s(first.heard) == [BEAT]


def test_the_first_machine_is_known_by_the_address_that_others_reach(monkeypatch):
    """Debian gives a machine's own name 127.0.1.1."""
    ways = {"first": (socket.AF_INET, "127.0.1.1"), "10.0.0.2": (socket.AF_INET, "10.0.0.1")}
    monkeypatch.setenv("MASTER_ADDR", "first")
    monkeypatch.setattr(heartbeat, "local_ranks", lambda: 1)
    monkeypatch.setattr(heartbeat, "address_towards", ways.__getitem__)
    monkeypatch.setattr(heartbeat, "gather", lambda own, ranks: [own, (socket.AF_INET, "10.0.0.2")])
    assert heartbeat._own_address(Ranks(0, 0, 2, torch.device("cpu"))) == (socket.AF_INET, "10.0.0.1")


def test_a_long_beat_is_cut_and_fits_in_a_packet():
    long = replace(BEAT, where="\u2603" * 500, ends="\u2603" * 5000)
    packet = encoded(long, "s")
    assert len(packet) <= heartbeat.MOST_BYTES and decoded(packet, "s").step == 7


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        b"{}",
        b"[" * 100_000,
        b"\xff\x00",
        json.dumps(["wrong", 0, "done"]).encode(),
        encoded(BEAT, "other"),
        json.dumps(["s", 0, "nowhere"]).encode(),
        json.dumps(["s", "0", "step"]).encode(),
        json.dumps(["s", *range(99)]).encode(),
        json.dumps([["s"], 0, "step"]).encode(),
    ],
)
def test_other_packets_are_not_taken(packet):
    assert decoded(packet, "s") is None


def test_packets_of_strangers_do_not_keep_beats_away(meet):
    first, second = meet(2)
    for packet in (b"[" * 1000, encoded(replace(BEAT, rank=9), first.secret), encoded(BEAT, "other")):
        second._socket.sendto(packet, first.all[0].address)
    second.send(BEAT)
    assert within_2_s(first.heard) == [BEAT]


@pytest.fixture
def rank_0_of_512(monkeypatch):
    """Peers of rank 0 among 512 on 64 machines, and the sockets of the other 511."""
    sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(511)]

    def gather(value: tuple, ranks: Ranks) -> list:
        mine, secret = value
        others = [Peer(f"node-{rank // 8}", 0, mine.address, int(mine.family), "") for rank in range(1, 512)]
        return [(replace(mine, host="node-0"), secret), *((other, "") for other in others)]

    monkeypatch.setattr(heartbeat, "gather", gather)
    monkeypatch.setattr(heartbeat, "local_ranks", lambda: 512)

    def begin() -> tuple[Peers, list[socket.socket]]:
        return Peers(Ranks(0, 0, 512, torch.device("cpu"))), sockets

    yield begin
    for each in sockets:
        each.close()


def _send_all(peers: Peers, sockets: list[socket.socket], pause_s: float) -> None:
    for rank, each in enumerate(sockets, start=1):
        each.sendto(encoded(replace(BEAT, rank=rank), peers.secret), peers.all[0].address)
        time.sleep(pause_s)


def test_a_burst_of_511_beats_is_heard(rank_0_of_512):
    """The kernel's default buffer holds 256 of them."""
    peers, sockets = rank_0_of_512()
    with open("/proc/sys/net/core/rmem_max") as file:
        if int(file.read()) < 512 * 1280:
            pytest.skip("this machine's net.core.rmem_max holds fewer packets")
    _send_all(peers, sockets, 0.0)
    assert {beat.rank for beat in peers.heard()} == set(range(1, 512))
    peers.close()


def test_beats_are_read_while_they_come_where_the_buffer_is_small(rank_0_of_512, monkeypatch):
    monkeypatch.setattr(heartbeat, "RECEIVE_BYTES", 32 * 1024)
    peers, sockets = rank_0_of_512()
    sender = threading.Thread(target=_send_all, args=(peers, sockets, 0.001))
    sender.start()
    heard, due = set(), time.monotonic() + 0.2
    while sender.is_alive() or (len(heard) < 511 and time.monotonic() < due):
        peers.wait(due - time.monotonic())
        heard |= {beat.rank for beat in peers.heard()}
        due = max(due, time.monotonic() + 0.2)
    assert heard == set(range(1, 512))
    peers.close()


def test_the_watchers_of_512_ranks_are_on_different_machines():
    watching = watchers(512)
    assert len(watching) == 4 and 0 in watching and len({rank // 8 for rank in watching}) == 4
    assert watchers(64) == frozenset(range(64))  # as ever


def test_a_rank_of_many_sends_to_the_watchers_and_its_machine_and_its_end_to_all(meet, monkeypatch):
    monkeypatch.setattr(heartbeat, "MOST_IN_A_MESH", 6)
    names = iter(range(100))
    monkeypatch.setattr(socket, "gethostname", lambda: f"node-{next(names)}")
    peers = meet(12)
    hosts = [peer.host for peer in peers[0].all]
    assert len(set(hosts)) == 12 and peers[0].watchers == {0, 3, 6, 9}
    assert peers[1].heard_ranks == {0, 1, 3, 6, 9} and peers[3].heard_ranks == set(range(12))
    beat = replace(BEAT, ends=None, hangs=False)
    peers[1].send(beat)
    time.sleep(0.1)
    assert [each.rank for each in peers if each.heard()] == [0, 3, 6, 9]
    peers[1].send(replace(beat, ends="it crashed"))
    time.sleep(0.1)
    assert [each.rank for each in peers if each.heard()] == [0, *range(2, 12)]
    first_sends = sorted(each.first_send_s for each in peers)
    steps = [later - earlier for earlier, later in itertools.pairwise(first_sends)]
    assert max(steps) - min(steps) < 1e-9 and first_sends[-1] == peers[0].interval_s


def test_who_closed_its_port_is_known_to_be_gone_and_who_is_slow_is_not(meet):
    first, second, _ = meet(3)
    asked = []
    for _ in range(4):
        time.sleep(0.02)
        asked.append(first.refusals(2))
    assert asked[-1] == (0, 0)  # nobody reads there, but the port is open
    second.close()
    assert within_2_s(lambda: first.refusals(1)[0] >= 3)
    first.is_back(1)
    assert first.refusals(1) == (0, 0)


def test_a_process_of_this_machine_that_ends_is_noticed_at_once_and_once(meet):
    first, _ = meet(2)
    child = subprocess.Popen(["sleep", "60"])
    try:
        descriptor = os.pidfd_open(child.pid)
    except OSError:
        child.kill()
        pytest.skip("this kernel has no pidfd_open")
    for each in list(first._processes):
        first._forget(each)  # that of the test itself
    first._processes[descriptor] = 1
    first.all[1] = replace(first.all[1], pid=child.pid)
    assert first.wait(0.0) == []
    assert within_2_s(lambda: first.process_state(1) == "")  # at first it may wait for the disk that it is read from
    child.send_signal(signal.SIGSTOP)
    assert within_2_s(lambda: first.process_state(1)) == "stopped" and first.wait(0.0) == []
    child.kill()
    assert first.wait(5.0) == [1] and first.wait(0.0) == []
    child.wait()
