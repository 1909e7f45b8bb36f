"""Ends a run in which a rank died or stands still, and says which: no rank waits for ever for one that won't come.

A thread beside the main one looks five times a second where that one is, and tells the other ranks (heartbeat.py). It
goes on while the main thread hangs in a collective, where no signal handler runs and a timeout takes minutes or hours.
"""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from llava_ds.config.arguments import TrainingArguments
from llava_ds.constants import EXIT_RANK_LOST, ConfigError, DataError
from llava_ds.runtime.activity import Activity
from llava_ds.runtime.hangs import Known, behind, look_at, place, standstill, stragglers
from llava_ds.runtime.heartbeat import RANKS_PER_SECOND, Beat, Peers
from llava_ds.runtime.ranks import Ranks, barrier, spelled
from llava_ds.runtime.stack_dump import WRITING_S, dump_stacks, no_collection, say, within

TICK_S = 0.2
LONGEST_TICK_S = 1.0  # what is beyond it, this process was stopped: no time in which it could have got on
SILENT_S = 10.0  # without a beat, a rank is named as giving no sign of life
REFUSED_S, UNREACHABLE_S = 30.0, 60.0  # without a beat, a rank is gone if its machine, or the network, says so
REFUSALS = 3
MOST_NAMED = 4  # ranks, with their samples
STEPS_LONGER = 4  # than the longest so far is too long, whatever the limit
WINDOW_S = 60.0  # over which ranks are compared
WINDOWS_BETWEEN = 10  # two lines about the same rank
LAUNCHER_S = 10.0  # in which a launcher ends its ranks once one of them has ended
PATIENCE_S = LAUNCHER_S + 5.0
PEER_IS_GONE = (  # gloo's words, NCCL's and those of torch's store; they have no type of error of their own for it
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited",
    "Did the remote server shutdown or crash",
)  # fmt: skip


class Watchdog:
    """Watches this rank and the others, from starts() to the end of the block that it is entered for."""

    def __init__(self, tick_s: float = TICK_S, window_s: float = WINDOW_S) -> None:
        self._tick_s, self._window_s = tick_s, window_s
        self._at = ("start", 0)  # set by the main thread, in one piece
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._samples: Callable[[int, int], str] | None = None

    def starts(self, training: TrainingArguments, ranks: Ranks) -> None:
        """Begin to watch. All ranks call it together, from the thread that trains."""
        self._training, self._ranks = training, ranks
        self._peers = Peers(ranks) if ranks.world_size > 1 else None
        self._main = threading.get_ident()
        self._now = self._since = self._spoke = self._longest = 0.0
        self._beat = Beat(ranks.rank, limit=self._limit("start"))
        self._looked_like: tuple = ()
        self._activity = Activity()
        self._beats: dict[int, tuple[Beat, float]] = {}  # of every rank, and when it was heard
        self._before: dict[int, tuple[float, float]] = {}  # busy_s and step_s, when they were last compared
        self._named: dict[int, float] = {}  # ranks that held the others up, and when that may be said again
        self._told = self._beat.position
        self._deaf = False
        self._speaking = threading.Lock()
        self._interval_s = self._peers.interval_s if self._peers else 1.0
        self._send(self._beat)  # at once: a rank that was never heard can't be told from a network that is blocked
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def knows(self, samples: Callable[[int, int], str]) -> None:
        """Let it name the samples of a step; samples: from an optimizer step and a rank to a line about them."""
        self._samples = samples

    def enters(self, phase: str, step: int) -> None:
        """Tell where this rank is: one of heartbeat.PHASES, and the optimizer step that it is in or comes from."""
        self._at = (phase, step)

    def leaving(self, reason: str) -> None:
        """Tell the others that this rank ends at once because it was asked to: it did not crash."""
        if self._thread is not None:
            here = replace(self._beat, phase=self._at[0], step=self._at[1])
            self._send(replace(here, ends=f"{self._name(here.rank)} left {place(here)}: {reason}", leaves=True))

    def __enter__(self) -> "Watchdog":
        faulthandler.enable(2)  # from here on a crash in native code leaves the stacks of all threads
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        if self._thread is None:
            return
        if isinstance(error, Exception):
            self._raised(error)
        else:  # the end, or SystemExit, which the others meet by themselves
            with self._speaking:  # no earlier word follows this one, and none of these processes is gone before it
                self.enters("done", self._at[1])
                self._send(replace(self._beat, phase="done", step=self._at[1], seconds=0.0, limit=self._limit("done")))
            if error is None:
                self._wait_for_all()
        self._closed.set()
        self._thread.join(timeout=WRITING_S)
        self._thread = None

    def _wait_for_all(self) -> None:
        """Until every rank is at its end. One that fails there says so itself, and the launcher ends this one."""
        try:
            barrier(self._ranks)
        except RuntimeError as lost:
            self._raised(lost)
            raise

    def _raised(self, error: Exception) -> None:
        """Tell the others why this rank ends, and name it before the traceback."""
        if self._peers and any(text in str(error) for text in PEER_IS_GONE):
            time.sleep(PATIENCE_S)  # it only met another's end: the watchdog's thread says whose, and ends this one
        here = replace(self._beat, phase=self._at[0], step=self._at[1])
        users = isinstance(error, (ConfigError, DataError))  # said by who reports it
        first = next(iter(str(error).strip().splitlines()), "")
        reason = f"{self._name(here.rank)} ended {place(here)}: {first if users else repr(error)}"
        self._send(replace(here, ends=reason))
        if not users:
            say(f"run/train.py: error: {reason}{self._on_samples(here)}")

    # What follows runs in the watchdog's thread.

    def _watch(self) -> None:
        clock = time.monotonic()
        due = clock + self._tick_s
        while not self._closed.is_set():
            gone = self._peers.wait(due - time.monotonic()) if self._peers else time.sleep(self._tick_s)
            passed, clock = min(time.monotonic() - clock, LONGEST_TICK_S), time.monotonic()
            self._now += passed
            self._hear()
            if gone:
                self._processes_gone(gone)
            if time.monotonic() < due:
                continue
            due = time.monotonic() + self._tick_s
            elapsed_s = self._now - self._spoke
            speaks = elapsed_s >= self._interval_s
            if speaks and self._beat.phase != "step" and not self._beat.waits and self._activity.goes_on(elapsed_s):
                self._since = self._now  # in a long call, or waiting for its own workers
            with self._speaking:
                self._look(passed)
                at = self._beat.position
                if speaks or (at != self._told and elapsed_s >= self._ranks.world_size / RANKS_PER_SECOND):
                    self._spoke, self._told = self._now, at
                    self._send(self._beat)
            if speaks:
                self._probe()
                self._judge()
        if self._peers:
            self._peers.close()

    def _look(self, passed: float) -> None:
        """Note where the main thread is."""
        phase, step = self._at
        if (phase, step) != (self._beat.phase, self._beat.step):
            if self._beat.phase == "step":
                self._longest = max(self._longest, self._now - self._since)
            self._since = self._now
        with no_collection():
            where, waits, looks_like = look_at(sys._current_frames().get(self._main))
        if phase != "step" and not waits and looks_like != self._looked_like:
            self._since = self._now  # reading, encoding and writing may take hours: they get on
        self._looked_like = looks_like
        in_step = passed if phase == "step" else 0.0
        self._beat = Beat(
            rank=self._ranks.rank,
            phase=phase,
            step=step,
            seconds=round(self._now - self._since, 1),
            limit=self._limit(phase),
            where=where,
            waits=waits,
            busy_s=round(self._beat.busy_s + (0.0 if waits else in_step), 3),
            step_s=round(self._beat.step_s + in_step, 3),
        )

    def _limit(self, phase: str) -> float | None:
        training = self._training
        given = {"start": training.watchdog_start_s, "step": training.watchdog_step_s}
        limit = given.get(phase, training.watchdog_save_s)
        if phase == "step" and limit and self._longest:
            limit = max(limit, STEPS_LONGER * self._longest)  # a machine that is slow is not hanging
        elif phase == "step" and limit:  # the first one compiles and allocates
            limit = training.watchdog_start_s and max(limit, training.watchdog_start_s)
        return limit or None

    def _send(self, beat: Beat) -> None:
        if self._peers:
            self._peers.send(beat)

    def _hear(self) -> None:
        for beat in self._peers.heard() if self._peers else []:
            if beat.ends is not None and not self._closed.is_set():
                self._ended_by(beat)
            self._beats[beat.rank] = beat, self._now
            self._peers.is_back(beat.rank)

    def _known(self) -> list[Known]:
        """Every rank that was heard of, and this one."""
        if not self._peers:
            return [Known(self._beat, "this machine", os.getpid())]
        self._beats[self._ranks.rank] = self._beat, self._now
        found = []
        for rank, (beat, at) in sorted(self._beats.items()):
            peer, silent_s = self._peers.all[rank], self._now - at
            state = self._peers.process_state(rank) if silent_s > SILENT_S / 2 else ""
            found.append(Known(beat, peer.host, peer.pid, silent_s, state))
        return found

    def _judge(self) -> None:
        """End the run if no rank gets on any more; report who holds the others up."""
        known = self._known()
        if len(known) < self._ranks.world_size:
            self._say_who_is_not_heard(known)
            return
        self._compare(known)
        if not all(each.is_late for each in known):
            return
        silent_after_s = max(SILENT_S, 3 * self._interval_s)
        late = behind(known, silent_after_s)[0][:MOST_NAMED]
        samples = {each.beat.rank: self._on_samples(each.beat) for each in late}
        said = standstill(known, silent_after_s, samples)
        limits = ", ".join(
            f"--watchdog_{name}_s {value:g}"
            for name in ("start", "step", "save")
            if (value := getattr(self._training, f"watchdog_{name}_s"))
        )
        stacks = Path(self._training.output_dir) / "hang-rank<rank>.txt"
        said += (
            f"\n  the limit is {self._beat.limit:.0f} s ({limits}; 0 is none). The stacks of all ranks that could "
            f"write them are in {stacks}. The same command goes on from the newest checkpoint"
        )
        alive = [each.beat.rank for each in known if each.silent_s <= silent_after_s]
        self._leave(said, speaks=self._ranks.rank == min(alive), hangs=True)

    def _say_who_is_not_heard(self, known: list[Known]) -> None:
        """Once, and by the first who misses one: without all beats nobody can tell a rank that hangs."""
        if self._now < SILENT_S * 3 or self._deaf:
            return
        self._deaf = True
        missing = sorted(set(range(self._ranks.world_size)) - {each.beat.rank for each in known})
        if self._ranks.rank == min(set(range(self._ranks.world_size)) - set(missing)):
            say(
                f"watchdog: no heartbeat of {spelled(missing)} reached {self._name(self._ranks.rank)}: UDP between the "
                "machines is blocked. Until it comes, no limit ends the run"
            )

    def _probe(self) -> None:
        """Ask after ranks of other machines that fell silent: a process that is gone is not one that is slow."""
        for each in self._known() if self._peers else []:
            rank = each.beat.rank
            if each.silent_s < REFUSED_S - 5 or rank == self._ranks.rank or each.beat.phase == "done":
                continue
            refused, unreachable = self._peers.refusals(rank)
            gone = refused >= REFUSALS and each.silent_s > REFUSED_S
            if gone or (unreachable >= REFUSALS and each.silent_s > UNREACHABLE_S):
                why = "its process is gone" if gone else "its machine can't be reached"
                self._lost(each.beat, f"gave no sign of life for {each.silent_s:.0f} s, and {why}", [rank])

    def _processes_gone(self, gone: list[int]) -> None:
        for rank in gone:
            beat = self._beats.get(rank, (Beat(rank), 0.0))[0]
            if beat.phase != "done" and self._beat.phase != "done" and not self._closed.is_set():
                self._lost(beat, "died: its process was killed or crashed", gone)

    def _lost(self, beat: Beat, how: str, gone: list[int]) -> None:
        said = f"{self._name(beat.rank)} {how}, when last heard of {place(beat)}{self._on_samples(beat)}"
        here = self._peers.all[self._ranks.rank].host
        alive = [each for each in self._known() if each.beat.rank not in gone and each.silent_s < SILENT_S]
        speaks = self._ranks.rank == min(each.beat.rank for each in alive if each.host == here)
        self._leave(said, speaks, hangs=False)

    def _compare(self, known: list[Known]) -> None:
        """Once in a while, on the first rank that lives: say who works while the others wait for it."""
        if self._ranks.rank != 0 or not self._peers:
            return
        now = {each.beat.rank: (each.beat.busy_s, each.beat.step_s) for each in known}
        before = self._before or now
        passed = {rank: (busy - before[rank][0], seconds - before[rank][1]) for rank, (busy, seconds) in now.items()}
        if self._before and min(seconds for _, seconds in passed.values()) < self._window_s:
            return
        self._before = now
        for rank, part, median, factor in stragglers(passed):
            if self._now < self._named.get(rank, 0.0):
                continue  # it was, not long ago
            self._named[rank] = self._now + WINDOWS_BETWEEN * self._window_s
            say(
                f"watchdog: {self._name(rank)} holds the others up: over {passed[rank][1]:.0f} s of steps it was at "
                f"work for {part:.0%}, the others for {median:.0%} (median) and waited for it: {factor:.1f} times "
                "their work"
            )

    def _ended_by(self, beat: Beat) -> None:
        """Another rank ends the run: where no launcher ends this one, for it is on another machine, end it here."""
        if beat.hangs:
            self._dump(beat.ends)
        if beat.leaves and self._ranks.is_first:
            say(f"run/train.py: {beat.ends}; the others end, too")
        self._closed.wait(LAUNCHER_S)
        if self._closed.is_set():
            return  # it met the same, and is on its way out
        if self._ranks.local_rank == 0 and self._peers.all[beat.rank].host != self._peers.all[self._ranks.rank].host:
            say(f"{beat.ends} (so says {self._name(beat.rank)}): this machine's ranks end, too")
        os._exit(EXIT_RANK_LOST)

    def _leave(self, said: str, speaks: bool, hangs: bool) -> None:
        """End this process, once what is to say is said, and the others with it."""
        self._send(replace(self._beat, ends=said.partition("\n")[0], hangs=hangs))
        if hangs:
            self._dump(said)
        if speaks:
            say(f"run/train.py: error: {said}")
        # Time for the others' stacks, and for the launcher to see first the rank that died, whose exit code it takes.
        time.sleep(LAUNCHER_S / (4 if speaks and hangs else 1) if self._peers else 0)
        os._exit(EXIT_RANK_LOST)

    def _dump(self, said: str) -> None:
        """Write all threads' stacks to the run's folder."""
        path = Path(self._training.output_dir) / f"hang-rank{self._ranks.rank}.txt"
        name = self._name(self._ranks.rank)
        dump_stacks(path, f"{name}, {place(self._beat)}, {time.ctime()}\n{said}\n", name)

    def _name(self, rank: int) -> str:
        if not self._peers:
            return f"rank {rank} (pid {os.getpid()})"
        peer = self._peers.all[rank]
        return f"rank {rank} on {peer.host} (pid {peer.pid})"

    def _on_samples(self, beat: Beat) -> str:
        if beat.phase != "step" or self._samples is None:
            return ""
        found: list[str] = []
        within(WRITING_S, lambda: found.append(self._samples(beat.step, beat.rank)))
        return "".join(f", on {samples}" for samples in found)
