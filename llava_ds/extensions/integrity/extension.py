"""Exchange all ranks' checksums and counts after a step, and end the run if a rank is at fault."""

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

SLOW = 1.5  # a rank is slow if its time per token exceeds this multiple of the median rank's
SLOW_STEPS = 8  # speed is judged over this many of the latest steps
SLOW_FIRST = 3  # ignore the first steps after a start, in which caches fill and kernels are chosen
MOST_NAMED = 3  # maximum number of parameters named in a message

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

# A rank's numbers for a step. The fields in COUNTED are counts of such faults. own: checksum of the weights that this
# rank's optimizer wrote; copies: checksum of its copies of what all ranks' optimizers wrote; all: checksum of all
# weights, if ranks hold equal weights; work: tokens; spent_us: the rank's own time, without waits for other ranks.
Report = namedtuple("Report", [*COUNTED, "own", "copies", "all", "work", "spent_us"])


def faults(reports: list[Report]) -> dict[int, list[str]]:
    """Return the keys of KINDS that apply, by rank, without faultless ranks. reports: of one step, in rank order."""
    kinds = COUNTED if not all(each.stale for each in reports) else COUNTED[:-1]  # no rank updates in a skipped step
    found = {rank: [kind for kind in kinds if getattr(each, kind)] for rank, each in enumerate(reports)}
    unlike = differing(reports)
    for rank in unlike if len(unlike) < len(reports) or not any(found.values()) else ():  # else another fault explains
        found[rank].append("differs")
    return {rank: kinds for rank, kinds in found.items() if kinds}


def differing(reports: list[Report]) -> list[int]:
    """Return the ranks whose weights differ from the majority's. Without a majority, return the ranks whose weights
    are not those that the optimizers wrote, or all ranks if no rank's match."""
    usual, number = Counter(each.all for each in reports).most_common(1)[0]
    if 2 * number > len(reports):
        return [rank for rank, each in enumerate(reports) if each.all != usual]
    written = (sum(each.own for each in reports) + 2**63) % 2**64 - 2**63  # wraps around like int64
    return [rank for rank, each in enumerate(reports) if each.copies != written] or list(range(len(reports)))


class Speeds:
    """Finds slow ranks: their time per token, the median of SLOW_STEPS steps, exceeds SLOW times the median rank's."""

    def __init__(self) -> None:
        self._paces, self._known, self._steps = deque(maxlen=SLOW_STEPS), set(), 0

    def add(self, reports: list[Report]) -> dict[int, float]:
        """Add a step. Returns the ranks that are newly slow, with their times as multiples of the median rank's."""
        self._paces.append([each.spent_us / max(1, each.work) for each in reports])
        self._steps += 1
        if self._steps < SLOW_FIRST + SLOW_STEPS:
            return {}
        paces = [statistics.median(own) for own in zip(*self._paces)]  # not the mean: steps that write files are slow
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
        """Exchange the reports. On a GPU, they are read after the next step, or at once if a checkpoint is due."""
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
            end.at_checkpoint = True  # prevents saving the corrupted state
            end.problems.append(message(step, found, places, self.watch.every))


def check(resolved: ResolvedConfig) -> Iterator[str]:
    """Yield a line if states are offloaded to NVMe, because then they are not in memory between steps."""
    if offload_device(resolved.config, "offload_optimizer") == "nvme":
        yield '--check_integrity_steps can\'t read states on NVMe: leave it out, or set offload_optimizer to "cpu"'


extension = Extension(check=check, part=Watch, hooks=((Phase.JUDGE, Judge),))
