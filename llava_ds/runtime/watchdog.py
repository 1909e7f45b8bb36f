"""The watchdog: aborts the run when a rank dies or hangs, and names the rank.

A thread inspects the main thread five times a second, and sends its position to the other ranks (heartbeat.py). It
still runs while the main thread hangs in a collective, where Python runs no signal handler and a timeout takes minutes
or hours.
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
from llava_ds.runtime.hangs import MOST_IN_A_MESH, Beat, Known, late_ranks, place, standstill, stragglers
from llava_ds.runtime.main_thread import WRITING_S, Activity, dump_stacks, look_at, no_collection, say, within
from llava_ds.runtime.ranks import Ranks, barrier, format_ranks
from llava_ds.runtime.waiting import noted_progress

TICK_S = 0.2
LONGEST_TICK_S = 1.0  # a longer pause means this process was stopped, unable to progress
SILENT_S = 10.0  # a rank without a beat for this long counts as silent
REFUSED_S, UNREACHABLE_S = 30.0, 60.0  # a rank silent for this long is gone if probes are refused, or unroutable
REFUSALS = 3
MOST_NAMED = 4  # maximum ranks in a message, with their samples
STEPS_LONGER = 4  # the limit of a step is at least this many times the longest step so far
WINDOW_S = 60.0  # seconds of steps over which busy times are compared
WINDOWS_BETWEEN = 10  # minimum windows between two reports of the same slow rank
LAUNCHER_S = 10.0  # time for a launcher to end all ranks after one ended
PEER_IS_GONE = (  # parts of error messages of gloo, NCCL and torch's store: they have no error class for a lost peer
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited",
    "Did the remote server shutdown or crash",
)  # fmt: skip


class Watchdog:
    """Watches this rank and the others, from start() to the end of its `with` block."""

    def __init__(self, tick_s: float = TICK_S, window_s: float = WINDOW_S) -> None:
        self._tick_s, self._window_s = tick_s, window_s
        self._at = ("start", 0)  # phase and step, set by the main thread in one atomic assignment
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._samples: Callable[[int, int], str] | None = None

    def start(self, training: TrainingArguments, ranks: Ranks) -> None:
        """Begin to watch. Collective; call it from the thread that trains."""
        self._training, self._ranks = training, ranks
        self._peers = None
        if ranks.world_size > 1:
            from llava_ds.runtime.heartbeat import Peers

            self._peers = Peers(ranks)
        self._main, self._on_gpu = threading.current_thread(), ranks.device.type == "cuda"
        self._now = self._since = self._sent_at = self._longest = 0.0
        self._beat = Beat(ranks.rank, limit=self._limit("start"))
        self._place_key: tuple = ()
        self._noted = 0
        self._activity = Activity(self._on_gpu)
        self._beats: dict[int, tuple[Beat, float]] = {}  # every rank's last beat, with the time it was heard
        self._before: dict[int, tuple[float, float]] = {}  # busy_s and step_s at the last comparison
        self._next_report: dict[int, float] = {}  # slow ranks, with the earliest time to report them again
        self._sent_position = self._beat.position
        self._reported_unheard = False
        self._sending = threading.Lock()
        self._interval_s = self._peers.interval_s if self._peers else 1.0
        if self._peers:
            self._sent_at = self._peers.first_send_s - self._interval_s
        self._send(self._beat)  # send it now: a rank that was never heard looks like a blocked network
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def set_samples(self, samples: Callable[[int, int], str]) -> None:
        """Set the function that describes the samples of an optimizer step and rank, for messages."""
        self._samples = samples

    def set_phase(self, phase: str, step: int) -> None:
        """Set this rank's position: one of heartbeat.PHASES, and the current or last optimizer step."""
        self._at = (phase, step)

    def leaving(self, reason: str) -> None:
        """Tell the other ranks that this rank exits on request, so they don't report a crash."""
        if self._thread is not None:
            here = replace(self._beat, phase=self._at[0], step=self._at[1])
            self._send(replace(here, ends=f"{self._name(here.rank)} left {place(here)}: {reason}", leaves=True))

    def __enter__(self) -> "Watchdog":
        faulthandler.enable(2)  # from here on a crash in native code prints the stacks of all threads
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        if self._thread is None:
            return
        if isinstance(error, Exception):
            self._raised(error)
        else:  # the run is over, or SystemExit (every rank raises it)
            with self._sending:  # makes this the last beat, sent before any rank's process ends
                self.set_phase("done", self._at[1])
                self._send(replace(self._beat, phase="done", step=self._at[1], seconds=0.0, limit=self._limit("done")))
            if error is None:
                try:
                    barrier(self._ranks)  # keeps this rank alive until all have ended their work
                except RuntimeError as lost:
                    self._raised(lost)
                    raise
        self._closed.set()
        self._thread.join(timeout=WRITING_S)
        self._thread = None

    def _raised(self, error: Exception) -> None:
        """Send the error that ends this rank to the others, and name this rank before the traceback."""
        if self._peers and any(text in str(error) for text in PEER_IS_GONE):
            # Another rank's end caused this error. Wait: the watchdog's thread names that rank and ends this process.
            time.sleep(LAUNCHER_S + 5.0)
        here = replace(self._beat, phase=self._at[0], step=self._at[1])
        is_users = isinstance(error, (ConfigError, DataError))  # the caller prints these
        first = next(iter(str(error).strip().splitlines()), "")
        reason = f"{self._name(here.rank)} ended {place(here)}: {first if is_users else repr(error)}"
        self._send(replace(here, ends=reason))
        if not is_users:
            say(f"run/train.py: error: {reason}{self._on_samples(here)}")

    # All methods from here on run in the watchdog's thread.

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
            elapsed_s = self._now - self._sent_at
            speaks = elapsed_s >= self._interval_s
            if speaks and self._beat.phase != "step" and not self._beat.waits and self._activity.goes_on(elapsed_s):
                self._since = self._now  # it makes progress in a long call, or its workers do
            with self._sending:
                self._look(passed)
                at = self._beat.position
                if speaks or (at != self._sent_position and elapsed_s >= self._ranks.world_size / MOST_IN_A_MESH):
                    self._sent_at, self._sent_position = self._now, at
                    self._send(self._beat)
            if speaks:
                self._probe()
                self._judge()
        if self._peers:
            self._peers.close()

    def _look(self, passed: float) -> None:
        """Update this rank's beat from the main thread's state. passed: seconds since the last look."""
        phase, step = self._at
        if (phase, step) != (self._beat.phase, self._beat.step):
            if self._beat.phase == "step":
                self._longest = max(self._longest, self._now - self._since)
            self._since = self._now
        with no_collection():
            sight = look_at(sys._current_frames().get(self._main.ident), self._main)
        moved, self._place_key = sight.key != self._place_key, sight.key
        noted = noted_progress(self._main)
        if (phase != "step" and not sight.waits and moved) or noted != self._noted:
            self._since = self._now  # no limit while the main thread moves: reading and writing may take hours
        self._noted = noted
        queues = self._on_gpu and sight.queues and not sight.waits
        works = not sight.waits and (moved or not queues)
        in_step = passed if phase == "step" else 0.0
        self._beat = Beat(
            rank=self._ranks.rank,
            phase=phase,
            step=step,
            seconds=round(self._now - self._since, 1),
            limit=self._limit(phase),
            where=sight.where,
            waits=sight.waits,
            queues=queues,
            busy_s=round(self._beat.busy_s + (in_step if works else 0.0), 3),
            step_s=round(self._beat.step_s + in_step, 3),
        )

    def _limit(self, phase: str) -> float | None:
        training = self._training
        given = {"start": training.watchdog_start_s, "step": training.watchdog_step_s}
        limit = given.get(phase, training.watchdog_save_s)
        if phase == "step" and limit and self._longest:
            limit = max(limit, STEPS_LONGER * self._longest)  # a slow machine is not a hang
        elif phase == "step" and limit:  # the first step compiles and allocates
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
        """Return the last known state of this rank and of every rank that was heard."""
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
        """End the run if no rank makes progress; report ranks that slow down the others."""
        known, silent_after_s = self._known(), max(SILENT_S, 3 * self._interval_s)
        if self._peers and len(known) < len(self._peers.heard_ranks):
            self._report_missing_heartbeats(known)
            return
        watching = {each.beat.rank for each in known if each.silent_s <= silent_after_s}
        if self._peers and not self._peers.watches and watching & self._peers.watchers:
            return  # the watchers hear all ranks
        self._compare(known)
        if not all(each.is_late for each in known):
            return
        late = late_ranks(known, silent_after_s)[0][:MOST_NAMED]
        samples = {each.beat.rank: self._on_samples(each.beat) for each in late}
        message = standstill(known, silent_after_s, samples) + self._about_limits()
        alive = [each.beat.rank for each in known if each.silent_s <= silent_after_s]
        self._beat = replace(self._beat, speaker=min(alive))
        self._leave(message, speaks=self._ranks.rank == min(alive), hangs=True)

    def _about_limits(self) -> str:
        limits = ", ".join(
            f"--watchdog_{name}_s {value:g}"
            for name in ("start", "step", "save")
            if (value := getattr(self._training, f"watchdog_{name}_s"))
        )
        stacks = Path(self._training.output_dir) / "hang-rank<rank>.txt"
        return (
            f"\n  the limit is {self._beat.limit or 0:.0f} s ({limits}; 0: no limit). The ranks' stacks are in "
            f"{stacks}, if they could write them. The same command resumes from the newest checkpoint"
        )

    def _report_missing_heartbeats(self, known: list[Known]) -> None:
        """Report once that some ranks were never heard, so hangs can't be detected. The lowest rank heard prints it."""
        if self._now < SILENT_S * 3 or self._reported_unheard:
            return
        self._reported_unheard = True
        heard = {each.beat.rank for each in known}
        if self._ranks.rank == min(heard):
            missing = sorted(self._peers.heard_ranks - heard)
            say(
                f"watchdog: no heartbeat of {format_ranks(missing)} reached {self._name(self._ranks.rank)}: UDP "
                "between the machines is blocked. Until a heartbeat arrives, no time limit ends the run"
            )

    def _probe(self) -> None:
        """Probe silent ranks, and end the run if the process or machine of one is gone."""
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
        message = f"{self._name(beat.rank)} {how}, when last heard of {place(beat)}{self._on_samples(beat)}"
        here, noticing = self._peers.all[self._ranks.rank].host, self._peers.listeners_of(beat.rank) - set(gone)
        alive = [each for each in self._known() if each.beat.rank in noticing and each.silent_s < SILENT_S]
        speaks = self._ranks.rank == min(each.beat.rank for each in alive if each.host == here)
        self._leave(message, speaks, hangs=False)

    def _compare(self, known: list[Known]) -> None:
        """Report ranks that work while the others wait for them. Rank 0 prints this at intervals."""
        if self._ranks.rank != 0 or not self._peers:
            return
        now = {each.beat.rank: (each.beat.busy_s, each.beat.step_s) for each in known}
        before = self._before or now
        passed = {rank: (busy - before[rank][0], seconds - before[rank][1]) for rank, (busy, seconds) in now.items()}
        if self._before and min(seconds for _, seconds in passed.values()) < self._window_s:
            return
        self._before = now
        for rank, part, median, factor in stragglers(passed):
            if self._now < self._next_report.get(rank, 0.0):
                continue  # reported recently
            self._next_report[rank] = self._now + WINDOWS_BETWEEN * self._window_s
            say(
                f"watchdog: {self._name(rank)} holds up the others: over {passed[rank][1]:.0f} s of steps it worked "
                f"for {part:.0%} of the time, {factor:.1f} times as long as the others ({median:.0%}, median), and "
                "they waited for it"
            )

    def _ended_by(self, beat: Beat) -> None:
        """End this process after another rank ended the run, unless the launcher does so within LAUNCHER_S."""
        if beat.hangs:
            self._dump(beat.ends)
        if beat.hangs and beat.speaker == self._ranks.rank:  # the rank that ended the run chose this one to print
            say(f"run/train.py: error: {beat.ends}{self._about_limits()}")
        if beat.leaves and self._ranks.is_first:
            say(f"run/train.py: {beat.ends}; the other ranks end now")
        self._closed.wait(LAUNCHER_S)
        if self._closed.is_set():
            return  # this rank ended by itself
        if self._ranks.local_rank == 0 and self._peers.all[beat.rank].host != self._peers.all[self._ranks.rank].host:
            say(f"{beat.ends} (reported by {self._name(beat.rank)}): this machine's ranks end now")
        os._exit(EXIT_RANK_LOST)

    def _leave(self, message: str, speaks: bool, hangs: bool) -> None:
        """Print the message if `speaks`, and end this process, so the other ranks end as well."""
        self._send(replace(self._beat, ends=message.partition("\n")[0], hangs=hangs))
        if hangs:
            self._dump(message)
        if speaks:
            say(f"run/train.py: error: {message}")
        # Give the other ranks time to write stacks, and the launcher time to notice the dead rank: it returns the exit
        # code of the first rank that it sees end.
        time.sleep(LAUNCHER_S / (4 if speaks and hangs else 1) if self._peers else 0)
        os._exit(EXIT_RANK_LOST)

    def _dump(self, message: str) -> None:
        path = Path(self._training.output_dir) / f"hang-rank{self._ranks.rank}.txt"
        name = self._name(self._ranks.rank)
        dump_stacks(path, f"{name}, {place(self._beat)}, {time.ctime()}\n{message}\n", name)

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
