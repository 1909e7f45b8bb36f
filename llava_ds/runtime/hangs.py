"""Diagnose the ranks' heartbeats: find the late rank when nothing progresses, or the rank that slows the others
down."""

import statistics
from dataclasses import dataclass

from llava_ds.runtime.ranks import format_ranks

SLOW_FACTOR = 1.5  # minimum ratio of a slow rank's busy fraction to the median of the other ranks
LEAST_BUSY = 0.5  # minimum busy fraction: a rank that waits more than half of the time does not slow the others

MOST_IN_A_MESH = 64  # up to this many ranks, every rank hears every other
PHASES = ("start", "step", "evaluation", "save", "export", "done")


@dataclass(frozen=True)
class Beat:
    """The state of a rank.

    phase: one of PHASES. step: the current or last optimizer step. seconds: time in this step, or in other phases time
    since the last progress. limit: maximum of `seconds`, or None. where: innermost line of the main thread. waits: True
    if that line is in a collective or reads from the device. step_s: seconds in steps so far. busy_s: part of step_s
    without waiting. ends: reason why this rank ends the run, or None. hangs: True if the reason is a hang. leaves: True
    if it ends on request. queues: True if it queues GPU work (the queue may be full). speaker: rank that prints the
    reason.
    """

    rank: int
    phase: str = "start"
    step: int = 0
    seconds: float = 0.0
    limit: float | None = None
    where: str = ""
    waits: bool = False
    busy_s: float = 0.0
    step_s: float = 0.0
    ends: str | None = None
    hangs: bool = False
    leaves: bool = False
    queues: bool = False
    speaker: int | None = None

    @property
    def position(self) -> tuple[int, int]:
        """A key that grows as the run progresses. A save has the number of the step before it."""
        last = {"start": -1, "step": self.step, "save": self.step}.get(self.phase, 1 << 60)
        return last, PHASES.index(self.phase)


@dataclass(frozen=True)
class Known:
    """The last known state of a rank. silent_s: seconds since its last beat; state: process state, "" if normal."""

    beat: Beat
    host: str
    pid: int
    silent_s: float = 0.0
    state: str = ""

    @property
    def seconds(self) -> float:
        """Seconds without progress, assuming none since the last beat."""
        return self.beat.seconds + self.silent_s

    @property
    def is_late(self) -> bool:
        return self.beat.limit is not None and self.seconds > self.beat.limit

    @property
    def name(self) -> str:
        return f"rank {self.beat.rank} on {self.host} (pid {self.pid})"


def late_ranks(known: list[Known], silent_after_s: float) -> tuple[list[Known], str]:
    """Return the ranks that the others wait for, and the evidence.

    They are the first group with any ranks: silent ranks; ranks in an earlier phase or step; ranks that work while the
    rest wait or queue GPU work; ranks that queue while the rest wait. Empty if all ranks wait.
    """
    silent = [each for each in known if each.silent_s > silent_after_s and each.beat.phase != "done"]
    if silent:
        return silent, "no sign of life"
    first = min(each.beat.position for each in known)
    last = [each for each in known if each.beat.position == first]
    if len(last) < len(known):
        return last, "the other ranks are ahead"
    awake = [each for each in known if not each.beat.waits]
    at_work = [each for each in awake if not each.beat.queues] or awake
    if at_work and (len(at_work) < len(known) or len(known) == 1):
        return at_work, "the other ranks wait for it in a collective" if len(known) > 1 else "it makes no progress"
    return [], "all ranks wait: their collectives don't match, or the network lost one"


def standstill(known: list[Known], silent_after_s: float, samples: dict[int, str]) -> str:
    """Return the message when no rank progresses: the late ranks, their work, and the state of the others.

    samples: description of each late rank's samples, by rank.
    """
    late, how = late_ranks(known, silent_after_s)
    lines = [] if late else [f"the run hangs, and no rank holds up the others: {how}"]
    for each in late:
        state = f", its process is {each.state}" if each.state else ""
        quiet = f" for {each.silent_s:.0f} s{state}" if each.silent_s > silent_after_s else ""
        at = f", at {each.beat.where}" if each.beat.where else ""
        on = samples.get(each.beat.rank, "")
        lines.append(
            f"the run hangs: {each.name} holds it up ({how}{quiet}), {place(each.beat)} for "
            f"{each.seconds:.0f} s{at}{on}"
        )
    others: dict[str, list[Known]] = {}
    for each in known:
        if each not in late:
            does = "waits" if each.beat.waits else "queues work for its GPU" if each.beat.queues else "works"
            others.setdefault(f"{place(each.beat)}, {does} at {each.beat.where}", []).append(each)
    for text, group in others.items():
        seconds = max(each.seconds for each in group)
        lines.append(f"  {format_ranks([each.beat.rank for each in group])}: {text}, for {seconds:.0f} s")
    return "\n".join(lines)


def place(beat: Beat) -> str:
    """Describe a rank's position in the run."""
    return {
        "start": "at startup",
        "step": f"in step {beat.step:,}",
        "evaluation": f"evaluating after step {beat.step:,}",
        "save": f"saving after step {beat.step:,}",
        "export": "exporting the model",
        "done": "at the end of the run",
    }[beat.phase]


def stragglers(busy: dict[int, tuple[float, float]]) -> list[tuple[int, float, float, float]]:
    """Find the ranks that the others always wait for: (rank, its busy fraction, the others' median, ratio of the two).

    busy: for every rank, the seconds its main thread spent outside collectives, and all seconds of the same steps.
    """
    parts = {rank: at_work / seconds for rank, (at_work, seconds) in busy.items() if seconds > 0}
    found = []
    for rank, part in parts.items():
        others = [other for each, other in parts.items() if each != rank]
        if others and part >= LEAST_BUSY and part > SLOW_FACTOR * (median := statistics.median(others)):
            found.append((rank, part, median, part / max(median, 0.01)))
    return found
