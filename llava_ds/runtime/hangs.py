"""Who is behind where a run stands still, and who holds the others up: read from what the ranks say of themselves."""

import os
import statistics
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from llava_ds.runtime.heartbeat import Beat
from llava_ds.runtime.ranks import spelled

OURS = f"{Path(__file__).resolve().parents[1]}{os.sep}"  # this package, beside the script that is run
SLOW_FACTOR = 1.5  # of the others' work, in the same steps
LEAST_BUSY = 0.5  # of its time: who waits for more than half of it holds nobody up


@dataclass(frozen=True)
class Known:
    """What is known of a rank. silent_s: since its last beat; state: of its process, "" if nothing is to say."""

    beat: Beat
    host: str
    pid: int
    silent_s: float = 0.0
    state: str = ""

    @property
    def seconds(self) -> float:
        """In its phase, as far as is known."""
        return self.beat.seconds + self.silent_s

    @property
    def is_late(self) -> bool:
        return self.beat.limit is not None and self.seconds > self.beat.limit

    @property
    def name(self) -> str:
        return f"rank {self.beat.rank} on {self.host} (pid {self.pid})"


def behind(known: list[Known], silent_after_s: float) -> tuple[list[Known], str]:
    """The ranks that the others wait for, and how that is seen.

    Those that give no sign of life; else those in the earliest phase or step, if others are further; else those whose
    main thread is not in a collective, if others' are. None where all wait alike.
    """
    silent = [each for each in known if each.silent_s > silent_after_s and each.beat.phase != "done"]
    if silent:
        return silent, "no sign of life"
    first = min(each.beat.position for each in known)
    last = [each for each in known if each.beat.position == first]
    if len(last) < len(known):
        return last, "the others are further"
    at_work = [each for each in known if not each.beat.waits]
    if at_work and (len(at_work) < len(known) or len(known) == 1):
        return at_work, "the others wait for it in a collective" if len(known) > 1 else "it does not get on"
    return [], "all wait alike: the ranks' collectives don't match, or the network between them lost one"


def standstill(known: list[Known], silent_after_s: float, samples: dict[int, str]) -> str:
    """What to say when nothing gets on: who is behind and on what it works, and where the others are.

    samples: what is added of them, by rank.
    """
    late, how = behind(known, silent_after_s)
    lines = [] if late else [f"the run stands still, and no rank is behind: {how}"]
    for each in late:
        said = f", its process is {each.state}" if each.state else ""
        quiet = f" for {each.silent_s:.0f} s{said}" if each.silent_s > silent_after_s else ""
        at = f", at {each.beat.where}" if each.beat.where else ""
        on = samples.get(each.beat.rank, "")
        lines.append(
            f"the run stands still: {each.name} is behind ({how}{quiet}), {place(each.beat)} for "
            f"{each.seconds:.0f} s{at}{on}"
        )
    others: dict[str, list[Known]] = {}
    for each in known:
        if each not in late:
            does = "waits" if each.beat.waits else "works"
            others.setdefault(f"{place(each.beat)}, {does} at {each.beat.where}", []).append(each)
    for text, group in others.items():
        seconds = max(each.seconds for each in group)
        lines.append(f"  {spelled([each.beat.rank for each in group])}: {text}, for {seconds:.0f} s")
    return "\n".join(lines)


def place(beat: Beat) -> str:
    """Where a rank is, in words."""
    return {
        "start": "in its start",
        "step": f"in step {beat.step:,}",
        "evaluation": f"evaluating after step {beat.step:,}",
        "save": f"saving after step {beat.step:,}",
        "export": "writing the result",
        "done": "at its end",
    }[beat.phase]


def stragglers(busy: dict[int, tuple[float, float]]) -> list[tuple[int, float, float, float]]:
    """The ranks that the others wait for all the time: (rank, its busy part, the others' median, factor between them).

    busy: of every rank, the seconds in which its main thread was in no collective, and those that this is a part of.
    """
    parts = {rank: at_work / seconds for rank, (at_work, seconds) in busy.items() if seconds > 0}
    found = []
    for rank, part in parts.items():
        others = [other for each, other in parts.items() if each != rank]
        if others and part >= LEAST_BUSY and part > SLOW_FACTOR * (median := statistics.median(others)):
            found.append((rank, part, median, part / max(median, 0.01)))
    return found


def look_at(frame: FrameType | None) -> tuple[str, bool, tuple]:
    """Of a thread: its innermost line, and this package's in which that is; whether it is in a collective; and what
    changes when it gets on."""
    if frame is None:
        return "", False, ()
    innermost, looks_like, own = frame, [], None
    while frame is not None:
        looks_like.append((id(frame.f_code), frame.f_lasti))
        is_ours = frame.f_code.co_filename.startswith(OURS) or frame.f_globals.get("__name__") == "__main__"
        if own is None and is_ours:
            own = frame
        frame = frame.f_back
    file = innermost.f_code.co_filename
    waits = f"torch{os.sep}distributed{os.sep}" in file or (
        # DeepSpeed waits for what it began in methods of this name.
        f"{os.sep}deepspeed{os.sep}" in file and innermost.f_code.co_name == "wait"
    )
    lines = [_line(each) for each in (own, innermost) if each is not None]
    return " in ".join(dict.fromkeys(reversed(lines))), waits, tuple(looks_like)


def _line(frame: FrameType) -> str:
    parts = Path(frame.f_code.co_filename).parts
    return f"{'/'.join(parts[-2:])}:{frame.f_lineno} ({frame.f_code.co_name})"
