"""Heartbeats: every rank sends its position in the run to others, even while its main thread hangs.

A rank sends one UDP packet a second, without a collective or a server, so a rank that ends never silences the others.
A packet is JSON and carries this run's secret; packets without it are ignored. Up to MOST_IN_A_MESH ranks, every rank
sends to all. With 512 ranks that would be a quarter of a million packets a second, so above the limit a rank sends only
to the ranks of its machine and to WATCHERS watchers that exchange beats with all ranks. Each watcher can judge the
run alone; if none is left, every rank judges. No beat is relayed through another rank. A beat that ends the run goes
to all ranks.
"""

import contextlib
import dataclasses
import errno
import json
import os
import secrets
import select
import socket
from dataclasses import dataclass
from pathlib import Path

from llava_ds.runtime.hangs import MOST_IN_A_MESH, PHASES, Beat
from llava_ds.runtime.processes import process_namespace
from llava_ds.runtime.ranks import Ranks, address_towards, gather, local_ranks

MOST_BYTES = 1400  # bytes in a packet: fits into one Ethernet frame
MOST_PACKETS = 4096  # maximum packets per read, so that a flooded port can't keep the thread busy
RECEIVE_BYTES = 4 * 2**20  # requested; the kernel's default holds 256 packets, and net.core.rmem_max may not allow more
WATCHERS = 4  # number of watchers in runs of more than MOST_IN_A_MESH ranks
INTERVAL_S = 1.0  # between two beats of a rank


def encoded(beat: Beat, secret: str) -> bytes:
    """Encode a beat as a packet, and shorten its texts if the packet is too long."""
    texts = (beat.where[:200], beat.ends and beat.ends[:600])
    packet = json.dumps([secret, *dataclasses.astuple(dataclasses.replace(beat, where=texts[0], ends=texts[1]))])
    if len(packet) <= MOST_BYTES:
        return packet.encode()
    short = dataclasses.replace(beat, where="", ends=beat.ends and beat.ends[:100])
    return json.dumps([secret, *dataclasses.astuple(short)]).encode()


def decoded(packet: bytes, secret: str) -> Beat | None:
    """Decode a packet; return None if it is not a beat of this run."""
    try:
        key, *values = json.loads(packet)
        if not isinstance(key, str) or not secrets.compare_digest(key.encode(), secret.encode()):
            return None
        beat = Beat(*values)
        known = isinstance(beat.rank, int) and isinstance(beat.step, int) and beat.phase in PHASES
        return beat if known else None
    except (ValueError, TypeError, RecursionError):
        return None


@dataclass(frozen=True)
class Peer:
    """Another rank: its machine, process and address."""

    host: str
    pid: int
    address: tuple
    family: int
    namespace: str  # see process_namespace

    @property
    def is_here(self) -> bool:
        """True if this process can see the peer's process."""
        return self.namespace != "" and self.namespace == process_namespace()


def watchers(world_size: int) -> frozenset[int]:
    """Return the ranks that hear all ranks: rank 0 and others evenly spaced, so on different machines if possible."""
    count = world_size if world_size <= MOST_IN_A_MESH else WATCHERS
    return frozenset(i * world_size // count for i in range(count))


class Peers:
    """Sends beats to the other ranks, receives theirs, and notices when their processes are gone.

    watchers: the ranks that hear all ranks. heard_ranks: this rank and the ranks whose beats reach it.
    """

    interval_s = INTERVAL_S

    def __init__(self, ranks: Ranks) -> None:
        """Collective: all ranks construct it together."""
        self.rank, self.world_size = ranks.rank, ranks.world_size
        family, own = _own_address(ranks)
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.bind((own, 0))
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)  # limited to net.core.rmem_max
        mine = Peer(socket.gethostname(), os.getpid(), self._socket.getsockname(), int(family), process_namespace())
        everyone = gather((mine, secrets.token_hex(16)), ranks)
        self.secret = everyone[0][1]
        self.all = [peer for peer, _ in everyone]
        self.watchers = watchers(self.world_size)
        # Each rank sends to the next rank first; otherwise all ranks might send to rank 0 at the same time.
        others = [(self.rank + i) % self.world_size for i in range(1, self.world_size)]
        self._others, listeners = others, self.listeners_of(self.rank)
        self._listeners = [rank for rank in others if rank in listeners]
        self.heard_ranks = frozenset((*self._listeners, self.rank))
        self._processes: dict[int, int] = {}  # pidfd to rank; a pidfd becomes readable when its process is gone
        for rank, peer in enumerate(self.all):
            if rank != ranks.rank and peer.is_here and hasattr(os, "pidfd_open"):
                with contextlib.suppress(OSError):  # an old kernel, or a system that only resembles Linux
                    self._processes[os.pidfd_open(peer.pid)] = rank
        self._probes: dict[int, socket.socket] = {}
        self._refusals: dict[int, tuple[int, int]] = {}

    @property
    def watches(self) -> bool:
        """True if this rank is a watcher."""
        return self.rank in self.watchers

    @property
    def first_send_s(self) -> float:
        """Seconds until the first regular beat. It differs between ranks, because packets in a burst would be lost."""
        return self.interval_s * (self.rank + 1) / self.world_size

    def send(self, beat: Beat) -> None:
        """Send a beat to the ranks that hear this one, or to all ranks if it ends the run.

        A packet that can't be sent is dropped, because the next beat replaces it.
        """
        packet = encoded(beat, self.secret)
        for rank in self._listeners if beat.ends is None else self._others:
            with contextlib.suppress(OSError):
                self._socket.sendto(packet, self.all[rank].address)

    def heard(self) -> list[Beat]:
        """Return all beats since the last call, in order."""
        beats = []
        for _ in range(MOST_PACKETS):
            try:
                beats.append(decoded(self._socket.recv(2 * MOST_BYTES), self.secret))
            except BlockingIOError:
                break
            except OSError:
                continue  # an earlier packet was refused
        return [beat for beat in beats if beat is not None and 0 <= beat.rank < self.world_size]

    def listeners_of(self, rank: int) -> frozenset[int]:
        """Return the ranks that hear a rank, and notice when it falls silent or its process is gone."""
        if rank in self.watchers:
            return frozenset(range(self.world_size))
        here = (other for other, peer in enumerate(self.all) if peer.host == self.all[rank].host)
        return self.watchers.union(here)

    def wait(self, seconds: float) -> list[int]:
        """Wait for the timeout, for beats, or for the end of a process on this machine.

        Returns each gone rank once. Call heard() afterwards, or beats are lost when the socket's buffer fills.
        """
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        for descriptor in self._processes:
            poll.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(max(0.0, seconds) * 1000)}
        return sorted(self._forget(descriptor) for descriptor in ready - {self._socket.fileno()})

    def _forget(self, descriptor: int) -> int:
        os.close(descriptor)
        return self._processes.pop(descriptor)

    def refusals(self, rank: int) -> tuple[int, int]:
        """Probe a silent rank, and return how often (its machine refused the port, the network had no route) so far.

        Call it once a second, because the answer to a probe arrives at a later call.
        """
        if rank not in self._probes:
            peer = self.all[rank]
            probe = socket.socket(peer.family, socket.SOCK_DGRAM)
            probe.setblocking(False)
            self._probes[rank], self._refusals[rank] = probe, (0, 0)
            with contextlib.suppress(OSError):
                probe.connect(peer.address)
        refused, unreachable = self._refusals[rank]
        try:
            self._probes[rank].send(b"")
        except OSError as error:
            refused += error.errno == errno.ECONNREFUSED
            unreachable += error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH)
        self._refusals[rank] = refused, unreachable
        return refused, unreachable

    def is_back(self, rank: int) -> None:
        """Reset the counts of refusals() for a rank that was heard again."""
        self._refusals.pop(rank, None)
        if probe := self._probes.pop(rank, None):
            probe.close()

    def process_state(self, rank: int) -> str:
        """Return the kernel's state of a process on this machine: "stopped", "waiting for a disk", or "" otherwise."""
        peer = self.all[rank]
        try:
            status = Path(f"/proc/{peer.pid}/stat").read_text() if peer.is_here else ""
        except OSError:
            return ""
        letter = status.rpartition(")")[2].split()[:1]
        return {"T": "stopped", "t": "stopped by a debugger", "D": "waiting for a disk"}.get("".join(letter), "")

    def close(self) -> None:
        for descriptor in list(self._processes):
            self._forget(descriptor)
        for rank in list(self._probes):
            self.is_back(rank)
        self._socket.close()


def _own_address(ranks: Ranks) -> tuple[socket.AddressFamily, str]:
    """Return this rank's address for the others; 127.0.0.1 if all are on this machine. Collective."""
    loopback = (socket.AF_INET, "127.0.0.1")
    if local_ranks() >= ranks.world_size:
        return loopback
    own = _towards(os.environ["MASTER_ADDR"]) or loopback
    # Rank 0's machine may resolve its own name to 127.0.1.1: the route to any other machine gives its real address.
    others = [address for _, address in gather(own, ranks) if not _is_loopback(address)]
    return (_towards(others[-1]) or own) if others and _is_loopback(own[1]) else own


def _towards(host: str) -> tuple[socket.AddressFamily, str] | None:
    try:
        return address_towards(host)
    except OSError:
        return None


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
