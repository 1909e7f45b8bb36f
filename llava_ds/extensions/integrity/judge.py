"""Judge the numbers that all ranks exchanged after a step: which ranks are at fault, and why."""

import statistics
from collections import Counter, deque
from typing import NamedTuple

SLOW = 1.5  # as a multiple of the ranks' median
SLOW_STEPS = 8  # latest steps by which speed is judged
SLOW_FIRST = 3  # first steps of a start, which are left out: caches fill, kernels are chosen
MOST_NAMED = 3  # parameters

KINDS = {
    "weight": "a weight changed outside of the optimizer's step",
    "gradient": "a gradient changed before the next pass or step read it",
    "state": "an optimizer state changed outside of the optimizer's step",
    "behind": "weights are not the rounded fp32 copies that its optimizer wrote: a stale shard",
    "twice": "the micro-batches of an earlier step were repeated",
    "missed": "this step got other samples than planned",
    "stale": "a stale shard: its optimizer states were not updated, or come from an earlier step",
    "differs": "a stale copy: its weights differ from the ones that the ranks' optimizers wrote",
}


class Report(NamedTuple):
    """A rank's numbers of a step. The first seven count faults of that kind.

    own, copies: checksums of the weights that its optimizer wrote, and of its copies of all ranks' weights; whole: of
    weights without an owner; work: tokens; spent_us: own time, without waits for other ranks.
    """

    weight: int
    gradient: int
    state: int
    behind: int
    twice: int
    missed: int
    stale: int
    own: int
    copies: int
    whole: int
    work: int
    spent_us: int


def faults(reports: list[Report]) -> dict[int, list[str]]:
    """Return the keys of KINDS that apply, by rank. reports: of one step, in rank order."""
    found = {rank: [kind for kind in list(KINDS)[:6] if getattr(each, kind)] for rank, each in enumerate(reports)}
    stale = [rank for rank, each in enumerate(reports) if each.stale]
    for rank in stale if len(stale) < len(reports) else []:  # a skipped step updates no rank's states
        found[rank].append("stale")
    unlike = differing(reports)
    if len(unlike) < len(reports) or not any(found.values()):  # otherwise another fault identifies the rank
        for rank in unlike:
            found[rank].append("differs")
    return {rank: kinds for rank, kinds in found.items() if kinds}


def differing(reports: list[Report]) -> list[int]:
    """Return the ranks whose weights differ from those of most others. Without a majority: the ranks without the
    weights that the optimizers wrote, or all ranks if every rank lacks them."""
    held = [(each.copies, each.whole) for each in reports]
    usual, number = Counter(held).most_common(1)[0]
    if 2 * number > len(reports):
        return [rank for rank, each in enumerate(held) if each != usual]
    written = (sum(each.own for each in reports) + 2**63) % 2**64 - 2**63  # wraps around like int64
    return [rank for rank, each in enumerate(reports) if each.copies != written] or list(range(len(reports)))


class Speeds:
    """Finds ranks whose time per token, the median over SLOW_STEPS steps, is SLOW times the median rank's."""

    def __init__(self) -> None:
        self._latest: deque[list[Report]] = deque(maxlen=SLOW_STEPS)
        self._known: set[int] = set()
        self._to_skip = SLOW_FIRST

    def add(self, reports: list[Report]) -> dict[int, float]:
        """Add a step; return the ranks that have become slow, with their times as multiples of the median."""
        if self._to_skip:
            self._to_skip -= 1
            return {}
        self._latest.append(reports)
        # Medians, because steps that write files take longer.
        paces = [statistics.median(each.spent_us / max(1, each.work) for each in own) for own in zip(*self._latest)]
        usual = statistics.median_low(paces)
        if len(self._latest) < SLOW_STEPS:
            return {}
        slow = {rank: pace / usual for rank, pace in enumerate(paces) if pace > SLOW * usual > 0}
        new = {rank: slow[rank] for rank in slow.keys() - self._known}
        self._known = set(slow)
        return new


def message(step: int, found: dict[int, list[str]], places: list[list[str]], every: int) -> str:
    """Name the ranks at fault, the reasons, and what to do. places: by rank, the changed parameters."""
    lines = [f"step {step:,}: silent corruption"]
    for rank, kinds in found.items():
        names = places[rank][:MOST_NAMED] + ["others"] * (len(places[rank]) > MOST_NAMED)
        where = f", in {' or '.join(names)}" if names else ""
        lines += [f"  rank {rank}: {KINDS[kind]}" + where * (kind in list(KINDS)[:3]) for kind in kinds]
    lines.append(
        "the memory, device, network or disk of that rank is at fault, or other code in the training process. Take its "
        f"machine out, and resume from a checkpoint before step {max(1, step - every):,}: --resume PATH"
    )
    return "\n".join(lines)
