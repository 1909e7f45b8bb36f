"""The checks in a run: all ranks exchange their numbers after a step, and a rank at fault ends the run."""

import statistics
from collections import Counter, deque, namedtuple
from collections.abc import Iterator

import torch

from llava_ds.engine.ds_config.resolve import ResolvedConfig
from llava_ds.engine.ds_config.zero import offload_device
from llava_ds.extensions.base import Extension, Hook, Phase, StepEnd
from llava_ds.extensions.integrity.watch import Watch
from llava_ds.runtime.ranks import gather, print_first
from llava_ds.runtime.waiting import waiting
from llava_ds.train.hooks import log_lag_steps

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
LOCATED, COUNTED = list(KINDS)[:3], list(KINDS)[:7]

# A rank's numbers of a step. The first count faults of that kind. own, copies: checksums of the weights that its
# optimizer wrote, and of its copies of those of all ranks; all: of all weights, where the ranks have the same; work:
# tokens; spent_us: own time, without waits for other ranks.
Report = namedtuple("Report", [*COUNTED, "own", "copies", "all", "work", "spent_us"])


def faults(reports: list[Report]) -> dict[int, list[str]]:
    """Return the keys of KINDS that apply, by rank. reports: of one step, in rank order."""
    kinds = COUNTED if not all(each.stale for each in reports) else COUNTED[:-1]  # no rank updates in a skipped step
    found = {rank: [kind for kind in kinds if getattr(each, kind)] for rank, each in enumerate(reports)}
    unlike = differing(reports)
    for rank in unlike if len(unlike) < len(reports) or not any(found.values()) else ():  # else another fault tells
        found[rank].append("differs")
    return {rank: kinds for rank, kinds in found.items() if kinds}


def differing(reports: list[Report]) -> list[int]:
    """Return the ranks whose weights differ from those of most others. Without a majority: the ranks without the
    weights that the optimizers wrote, or all ranks if every rank lacks them."""
    usual, number = Counter(each.all for each in reports).most_common(1)[0]
    if 2 * number > len(reports):
        return [rank for rank, each in enumerate(reports) if each.all != usual]
    written = (sum(each.own for each in reports) + 2**63) % 2**64 - 2**63  # wraps around like int64
    return [rank for rank, each in enumerate(reports) if each.copies != written] or list(range(len(reports)))


class Speeds:
    """Finds ranks whose time per token, the median over SLOW_STEPS steps, is SLOW times the median rank's."""

    def __init__(self) -> None:
        self._paces, self._known, self._steps = deque(maxlen=SLOW_STEPS), set(), 0

    def add(self, reports: list[Report]) -> dict[int, float]:
        """Add a step; return the ranks that have become slow, with their times as multiples of the median."""
        self._paces.append([each.spent_us / max(1, each.work) for each in reports])
        self._steps += 1
        if self._steps < SLOW_FIRST + SLOW_STEPS:
            return {}
        paces = [statistics.median(own) for own in zip(*self._paces)]  # steps that write files take longer
        usual = statistics.median_low(paces)
        slow = {rank: pace / usual for rank, pace in enumerate(paces) if pace > SLOW * usual > 0}
        known, self._known = self._known, slow.keys()
        return {rank: slow[rank] for rank in slow.keys() - known}


def message(step: int, found: dict[int, list[str]], places: list[list[str]], every: int) -> str:
    """Name the ranks at fault, the reasons, and what to do. places: by rank, the changed parameters."""
    lines = [f"step {step:,}: silent corruption"]
    for rank, kinds in found.items():
        names = places[rank][:MOST_NAMED] + ["others"] * (len(places[rank]) > MOST_NAMED)
        where = f", in {' or '.join(names)}" if names else ""
        lines += [f"  rank {rank}: {KINDS[kind]}" + where * (kind in LOCATED) for kind in kinds]
    lines.append(
        "the memory, device, network or disk of that rank is at fault, or other code in the training process. Take its "
        f"machine out, and resume from a checkpoint before step {max(1, step - every):,}: --resume PATH"
    )
    return "\n".join(lines)


class Judge(Hook):
    """Exchanges the ranks' reports after every step, and ends the run on a fault."""

    def begin(self) -> None:
        self.watch = next(part for part in self.session.parts if isinstance(part, Watch))
        self.speeds, self.unread = Speeds(), deque()

    def after_step(self, end: StepEnd) -> None:
        """See Hook.after_step. On a GPU the numbers are read a step later, but before a checkpoint is saved."""
        session, watch = self.session, self.watch
        zero = torch.zeros((), dtype=torch.int64, device=session.ranks.device)
        own = torch.stack([zero + watch.counts[name] for name in Report._fields])
        everyone = own.new_zeros(session.ranks.world_size, len(own))
        torch.distributed.all_gather_into_tensor(everyone, own[None])
        self.unread.append((end.step, everyone, watch.details))
        at_once = end.last or session.saves_at(end.step, end.last)
        while len(self.unread) > (0 if at_once else log_lag_steps(session.plan.args, session.ranks)):
            self._judge(end, *self.unread.popleft())

    def _judge(self, end: StepEnd, step: int, everyone: torch.Tensor, details: list) -> None:
        with waiting("the reports of all ranks"):
            reports = [Report(*row) for row in everyone.tolist()]
        for rank, ratio in self.speeds.add(reports).items():
            print_first(
                f"warning: step {step:,}: rank {rank} is slow: its own time per token is {ratio:.1f} times the median "
                "rank's. Look at its machine's clock, temperature and other processes"
            )
        if found := faults(reports):
            places = gather([name for kept, changed in details for name in kept.names(changed)], self.session.ranks)
            end.at_checkpoint = True  # a corrupted state is not saved
            end.problems.append(message(step, found, places, self.watch.every))


def check(resolved: ResolvedConfig) -> Iterator[str]:
    """Yield a line for states on NVMe: between steps they are not in memory."""
    if offload_device(resolved.config, "offload_optimizer") == "nvme":
        yield '--check_integrity_steps can\'t read states on NVMe: leave it out, or set offload_optimizer to "cpu"'


extension = Extension(check=check, part=Watch, hooks=((Phase.JUDGE, Judge),))
